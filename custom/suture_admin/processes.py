"""The processes of a federation on this machine: start them, check them, and stop these and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from suture.core.errors import FederationError
from suture.core.escaping import printable
from suture.core.files import read_regular, write_json
from suture.core.processes import keeping_memory
from suture.flare.kit import Kit

STARTED = "suture-poc.json"
_LOG = "poc_console.log"
_GRACE = 10.0
_LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} - (?:\S+ - )?(?:ERROR|CRITICAL) - (.+)")


@dataclass(frozen=True)
class Party:
    """The process of a party.

    Attributes:
        started: time of its start, by the system's clock; another process may have the same id later.
    """

    name: str
    pid: int
    started: float

    def process(self) -> psutil.Process | None:
        """Return the process while it runs, else None."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


def start(folder: Path, kits: Iterable[Kit]) -> list[Party]:
    """Start, by its own start script, the process of each kit whose party does not run.

    All processes are recorded in the POC's folder, including those that already run.

    Returns:
        the parties that were started.

    Raises:
        FederationError: a process does not start.
    """
    alive = set(running(folder))
    dead = [kit for kit in kits if kit.name not in alive]
    others = [party for party in parties_of(folder) if party.name not in {kit.name for kit in dead}]
    begun: list[Party] = []
    for kit in dead:
        with (kit.folder / _LOG).open("ab") as printed:
            child = subprocess.Popen(
                ["bash", str(kit.folder / "startup" / "sub_start.sh"), "--once"],
                cwd=kit.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begun.append(Party(kit.name, child.pid, psutil.Process(child.pid).create_time()))
        # After each one, so that it can be stopped whatever happens next.
        write_json(folder / STARTED, [vars(party) for party in (*others, *begun)])
    return begun


def _environment() -> dict[str, str]:
    """Return the environment of a party: this Python is `python3`; sites find their own configuration."""
    others = {key: value for key, value in os.environ.items() if key != "SUTURE_SITES"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{others.get('PATH', '')}"
    return keeping_memory({**others, "PATH": path})


def parties_of(folder: Path) -> list[Party]:
    """Return the parties that `start` recorded; empty where nothing was started.

    Raises:
        FederationError: the record is damaged.
    """
    path = folder / STARTED
    if not path.exists():
        return []
    try:
        return [Party(**entry) for entry in json.loads(read_regular(path))]
    except (ValueError, TypeError) as error:
        raise FederationError(
            f"{path} is damaged ({error}); end the processes of this federation by hand, then delete the file"
        ) from error


def running(folder: Path) -> list[str]:
    """Return the names of the parties whose processes run."""
    return [party.name for party in parties_of(folder) if party.process()]


def check_alive(parties: Iterable[Party], kits: dict[str, Kit]) -> None:
    """Check that the processes of all parties run.

    Raises:
        FederationError: one has ended; contains the last lines of its output.
    """
    for party in parties:
        if party.process() is None:
            printed = read_regular(kits[party.name].folder / _LOG).decode(errors="replace").splitlines()[-8:]
            raise FederationError(f"the process of {party.name} has ended:\n" + "\n".join(printed))


def last_error(kit: Kit, since: str) -> str | None:
    """Return the last error in the log of a party; None where there is none.

    Args:
        since: time before which its entries are of an earlier start, as FLARE's logs write it.
    """
    path = kit.folder / "log.txt"
    lines = read_regular(path).decode(errors="replace").splitlines() if path.is_file() else []
    errors = [found[2] for line in lines if (found := _LOGGED.match(line)) and found[1] >= since]
    return printable(errors[-1]) if errors else None


def stop(folder: Path) -> list[str]:
    """Stop the processes that `start` started, and their children; return the parties that were running."""
    found = {party.name: party.process() for party in parties_of(folder)}
    alive = {name: process for name, process in found.items() if process}
    everything = [p for process in alive.values() for p in (process, *process.children(recursive=True))]
    for process in everything:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(everything, timeout=_GRACE)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE)
    (folder / STARTED).unlink(missing_ok=True)
    return list(alive)
