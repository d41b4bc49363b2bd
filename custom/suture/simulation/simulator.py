"""FLARE's simulator in a process of its own, and the first real error of a run that failed."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suture.core.allocator import keeping_memory
from suture.core.errors import ConfigError, FederationError
from suture.core.files import hold, make_folder, read_json
from suture.core.printable import printable
from suture.federation.server.record import LOCK, TAKEOVER, Record
from suture.federation.site.abstention import first_recorded
from suture.simulation.start_watch import Lost, end, watch_start

log = logging.getLogger(__name__)

LOG = "flare.log"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - ")
_ERROR = re.compile(rf"{_ENTRY.pattern}(?:\S+ - )?(?:ERROR|CRITICAL) - (.*)")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Mismatch|InUse|Aborted|Refused)\b(?:: .*)?")
_OWN = re.compile(r"suture\.core\.errors\.\w+: ")
_KILLED = re.compile(r"return code (?:-9|137)\b")


def check_paths(out: Path) -> None:
    """Refuse paths that FLARE's simulator would tear apart: it divides its commands at blanks.

    Raises:
        ConfigError: the path of the run folder, of temporary files or of Python has one of these characters.
    """
    places = {"--out": str(out.resolve()), "TMPDIR": tempfile.gettempdir(), "Python": sys.executable}
    for what, path in places.items():
        if re.search(r"[\s'\"\\#]", path):
            raise ConfigError(
                f"FLARE's simulator cannot work with the path {path} ({what}), which has a blank, a quote, "
                "# or a backslash; choose another place, or --env local, which gives the same model"
            )


def simulate(out: Path, processes: int) -> None:
    """Run the job of a run folder in FLARE's simulator; its output goes to flare.log of the folder.

    Args:
        processes: of the sites, at most one for each.

    Raises:
        FederationError: it failed; the message is its first error. Or the process of a site ended before the
            first round, or hung, and again when the simulator was started once more; names the site.
        InUse: the simulator of an earlier run in this folder still works, as after `kill -9`.
    """
    # It would stand still for as long, and be taken for lost.
    hold(out / LOCK, TAKEOVER).close()
    sites: list[str] = read_json(out / "job.json", "sites")["sites"]
    watched = sites if processes >= len(sites) else []  # sites that share processes lose them all the time
    start = (out / LOG).stat().st_size if (out / LOG).exists() else 0
    code, lost = _run(out, processes, watched)
    if lost:
        log.warning("%s; it is started again", lost)
        code, lost = _run(out, processes, watched)
    if lost:
        raise FederationError(f"{lost}, twice; {_why(out, start, code)}")
    status = Record(out).run
    if status.get("status") != "finished":
        raise FederationError(status.get("error") or _why(out, start, code))


def _run(out: Path, processes: int, watched: Sequence[str]) -> tuple[int | None, Lost | None]:
    """Run the simulator; return its exit code, or the site whose loss at the start has ended it."""
    command = [sys.executable, "-m", "suture.flare.simulate", str(out), str(processes)]
    folder = _emptied(out / ".messages")
    own = {"SUTURE_SITES": str((out / "sites").resolve()), "SUTURE_MESSAGES": str(folder.resolve())}
    environment = keeping_memory({**os.environ, **own})
    with (out / LOG).open("ab") as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if lost := watch_start(process, out, watched):
                end(process)
                return None, lost
            return process.wait(), None
        except BaseException:
            # The simulator ends its own children when it is interrupted.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _emptied(folder: Path) -> Path:
    """Make the folder of the messages under way anew; one that was killed may have left some."""
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    return folder


def _why(out: Path, start: int, code: int | None) -> str:
    """Return why the simulator ended, where the server recorded no reason.

    Args:
        start: length of flare.log before the simulator was started.
        code: its exit code; None where Suture has ended it.
    """
    with (out / LOG).open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    if code is not None and (code in (-signal.SIGKILL, 128 + signal.SIGKILL) or _KILLED.search(text)):
        why = "it was killed, as the system does when memory is full; try fewer --workers"
    else:
        why = first_logged(text) or ("" if code is None else f"it ended with code {code}")
    more = f"{out / LOG} and the logs in {out / 'flare'} say more"
    return f"FLARE's simulator: {why}; {more}" if why else more


def first_logged(text: str) -> str | None:
    """Return the first error in a log of FLARE, with the exception that it caught; None without one."""
    lines = _COLOUR.sub("", text).splitlines()
    for number, line in enumerate(lines):
        if logged := _ERROR.match(line):
            raised = _raised(lines[number + 1 :])
            return printable(f"{logged[1]}: {raised}" if raised else logged[1])
        if line.startswith("Traceback (most recent call last)"):
            return printable(_raised(lines[number + 1 :]) or line)
    return None


def _raised(lines: list[str]) -> str | None:
    """Return the last exception of the lines before the next entry of a log."""
    found = None
    for line in lines:
        if _ENTRY.match(line):
            break
        if _RAISED.fullmatch(line):
            found = _OWN.sub("", line)
    return found


def with_first_error(out: Path, message: str) -> str:
    """Return, in one line, the earliest error that a site of this run has recorded, then the message."""
    patterns = ("sites/*/state/*/errors.jsonl", "flare/**/suture/errors.jsonl")
    paths = [path for pattern in patterns for path in out.glob(pattern)]
    first = first_recorded(paths, str(Record(out).run.get("started", "")))
    return f"{first} ({message})" if first else message
