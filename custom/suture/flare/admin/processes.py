"""The processes of a federation on this machine: started, looked after, and stopped, these and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from suture.core.errors import FederationError
from suture.core.files import write_json
from suture.flare.admin.kit import Kit

_STARTED = "suture-poc.json"
_LOG = "poc_console.log"
_GRACE = 10.0


@dataclass(frozen=True)
class Party:
    """A party's process.

    Attributes:
        started: its start by the system's clock; a process id alone may have gone to another process.
    """

    name: str
    pid: int
    started: float

    def process(self) -> psutil.Process | None:
        """The process, while it lives."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


def start(folder: Path, kits: Iterable[Kit]) -> list[Party]:
    """Starts a process by its own start script for each kit whose party does not live.

    All are noted in the POC's folder, those that live already too.

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
        # After each: what was started can be stopped, whatever happens next.
        write_json(folder / _STARTED, [vars(party) for party in (*others, *begun)])
    return begun


def _environment() -> dict[str, str]:
    """This Python comes first, as `python3` of the start script; sites look for their own configuration."""
    kept = {key: value for key, value in os.environ.items() if key != "SUTURE_SITES"}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}


def parties_of(folder: Path) -> list[Party]:
    """What `start` noted; empty where nothing was started."""
    path = folder / _STARTED
    return [Party(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def running(folder: Path) -> list[str]:
    """The parties whose processes live."""
    return [party.name for party in parties_of(folder) if party.process()]


def check_alive(parties: Iterable[Party], kits: dict[str, Kit]) -> None:
    """Looks whether all live.

    Raises:
        FederationError: one has died; with the end of what it printed.
    """
    for party in parties:
        if party.process() is None:
            printed = (kits[party.name].folder / _LOG).read_text(errors="replace").splitlines()[-8:]
            raise FederationError(f"the process of {party.name} has ended:\n" + "\n".join(printed))


def stop(folder: Path) -> list[str]:
    """Stops what `start` started, and their children, and returns the parties that were running."""
    found = {party.name: party.process() for party in parties_of(folder)}
    alive = {name: process for name, process in found.items() if process}
    everything = [p for process in alive.values() for p in (process, *process.children(recursive=True))]
    for process in everything:
        _send(process, kill=False)
    _, left = psutil.wait_procs(everything, timeout=_GRACE)
    for process in left:
        _send(process, kill=True)
    psutil.wait_procs(left, timeout=_GRACE)
    (folder / _STARTED).unlink(missing_ok=True)
    return list(alive)


def _send(process: psutil.Process, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
