"""FLARE's simulator in a process of its own, and the first real error of a run that failed.

FLARE 2.9.0: its simulator divides the commands of its processes at blanks, and leaves global state behind.
Where: nvflare/private/fed/app/simulator/simulator_runner.py: do_one_task
Expires with: test_flares_simulator_divides_its_commands_at_blanks
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import psutil

from suture.core.allocator import keeping_memory
from suture.core.errors import ConfigError, FederationError
from suture.core.files import atomic_write, hold, make_folder, read_json
from suture.core.plain import open_regular
from suture.core.printable import printable
from suture.core.processes import without_interrupts
from suture.federation.server.record import LOCK, TAKEOVER, Record
from suture.federation.site.abstention import first_recorded
from suture.simulation.start_watch import Lost, end, watch_start

log = logging.getLogger(__name__)

LOG = "flare.log"

MESSAGES = "SUTURE_MESSAGES"
"""Variable of the environment of the simulator's processes: the folder of the messages under way."""

_OVER = ".over"
"""File in that folder: the server's work is done."""

_LOOK = 0.05
"""Seconds between two looks at whether it is."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - ")
_ERROR = re.compile(rf"{_ENTRY.pattern}(?:\S+ - )?(?:ERROR|CRITICAL) - (.*)")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Mismatch|InUse|Aborted|Refused)\b(?:: .*)?")
_OWN = re.compile(r"suture\.core\.errors\.\w+: ")
_KILLED = re.compile(r"return code (?:-9|137)\b")


def check_paths(out: Path, option: str = "--out") -> None:
    """Refuse paths that FLARE's simulator would tear apart: it divides its commands at blanks.

    Raises:
        ConfigError: the path of the run folder, of temporary files or of Python has one of these characters.
    """
    places = {option: str(out.resolve()), "TMPDIR": tempfile.gettempdir(), "Python": sys.executable}
    for what, path in places.items():
        if re.search(r"[\s'\"\\#]", path):
            raise ConfigError(
                f"FLARE's simulator cannot work with the path {path} ({what}): it has a space, a quote, "
                "# or a backslash; choose another folder, or --env local, which gives the same model"
            )


_FIRST_PERSON, _NOBODY = 1000, 65534
"""Numbers of users: people's begin at the first, and the other is nobody's."""


def open_to_others() -> str:
    """Say that other users of this machine can join FLARE's simulator; empty where nobody else has a shell.

    Its server listens without TLS, and asks no site for a certificate.
    """
    users = {entry.pw_uid for entry in pwd.getpwall()}  # which lists no users of a directory service
    users |= {one.info["uids"].real for one in psutil.process_iter(["uids"]) if one.info["uids"]}
    others = []
    for user in users - {os.getuid(), _NOBODY}:
        with suppress(KeyError):
            entry = pwd.getpwuid(user)
            if user >= _FIRST_PERSON and not entry.pw_shell.endswith(("/nologin", "/false")):
                others.append(entry.pw_name)
    if not others:
        return ""
    return (
        f"FLARE's simulator has ports without TLS, and other users of this machine ({min(others)}) can join "
        "it: use --env local, which gives the same model, or --env poc"
    )


class Simulator:
    """FLARE's simulator of a run folder: one process, which starts the server and the sites.

    Attributes:
        log: what it has printed, in flare.log of the folder.
        before: length of the log before it was first started; None until then.
    """

    def __init__(self, out: Path) -> None:
        self.log = out / LOG
        self.before: int | None = None
        self._out = out
        self._process: subprocess.Popen[bytes] | None = None
        self._under_way = out / ".messages"
        self._messages, self._temporary = self._under_way, ""

    def start(self) -> None:
        """Start the process, which imports and waits for `run`.

        Raises:
            InUse: the simulator of an earlier run in this folder still works, as after `kill -9`.
        """
        # This one would stand still for as long, and be taken for lost.
        hold(self._out / LOCK, TAKEOVER).close()
        shutil.rmtree(self._under_way, ignore_errors=True)  # a process that was killed may have left some
        # A folder of its own, so that no process of another start can say that this one is over.
        self._messages = self._under_way / secrets.token_hex(4)
        make_folder(self._messages)
        self._temporary = tempfile.mkdtemp(prefix="flare-")  # of FLARE's, which leaves them where it is ended
        sites, messages = (self._out / "sites").resolve(), self._messages.resolve()
        own = {"SUTURE_SITES": str(sites), MESSAGES: str(messages), "TMPDIR": self._temporary}
        command = [sys.executable, "-m", "suture.flare.simulate", str(self._out)]
        with self.log.open("ab") as printed, without_interrupts():
            self.before = printed.tell() if self.before is None else self.before
            self._process = subprocess.Popen(
                command,
                env=keeping_memory({**os.environ, **own}),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, processes: int, watched: Sequence[str]) -> tuple[int | None, Lost | None]:
        """Run the job; return the exit code, None where it is not waited for, and what is lost at the start.

        When the server's work is done, FLARE takes 7 s to end. Nothing of it is needed then: it is ended.
        """
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin:  # flare.log says how it has ended
                process.stdin.write(f"{processes}\n".encode())
            lost = watch_start(process, self._out, watched)
            while not lost and process.poll() is None and not (self._messages / _OVER).exists():
                time.sleep(_LOOK)
            return process.poll(), lost
        finally:
            self.close()

    def close(self) -> None:
        """End the process, with all that it has started, and delete what it left under way."""
        if self._process is not None:
            end(self._process)
            self._process = None
        if self._temporary:
            shutil.rmtree(self._messages, ignore_errors=True)
            shutil.rmtree(self._temporary, ignore_errors=True)
            with suppress(OSError):  # another process has begun to use it
                self._under_way.rmdir()
            self._temporary = ""


def tell_over() -> None:
    """Tell who has started this simulator that the server's work is done; elsewhere, nothing."""
    if folder := os.environ.get(MESSAGES):
        atomic_write(Path(folder) / _OVER, b"")


def simulate(out: Path, processes: int, simulator: Simulator | None = None) -> None:
    """Run the job of a run folder in FLARE's simulator; its output goes to flare.log of the folder.

    Args:
        processes: of the sites, at most one for each.
        simulator: of the folder; it may be started already.

    Raises:
        FederationError: it failed; the message is its first error. Or the process of a site ended before the
            first round, or hung, and again when the simulator was started once more; names the site.
        InUse: the simulator of an earlier run in this folder still works, as after `kill -9`.
    """
    with closing(simulator or Simulator(out)) as simulator:
        sites: list[str] = read_json(out / "job.json", "sites")["sites"]
        own = processes >= len(sites)  # sites that share processes lose them all the time
        watched = sites if own else []
        code, lost = simulator.run(processes, watched)
        if lost:
            log.warning("%s; it starts again", lost)
            code, lost = simulator.run(processes, watched)
    if lost:
        raise FederationError(f"{lost}, twice; {_why(out, simulator, code)}")
    status = Record(out).run
    if status.get("status") != "finished":
        raise FederationError(status.get("error") or _why(out, simulator, code))


def _why(out: Path, simulator: Simulator, code: int | None) -> str:
    """Return why the simulator ended, where the server recorded no reason.

    Args:
        code: its exit code; None where Suture has ended it.
    """
    with open_regular(simulator.log) as file:
        file.seek(simulator.before or 0)
        text = file.read().decode(errors="replace")
    if code is not None and (code in (-signal.SIGKILL, 128 + signal.SIGKILL) or _KILLED.search(text)):
        why = "it was killed, probably because memory was full; try fewer --workers"
    else:
        why = first_logged(text) or ("" if code is None else f"it ended with code {code}")
    more = f"{simulator.log} and the logs in {out / 'flare'} have details"
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
    patterns = ("sites/*/state/**/errors.jsonl", "flare/**/suture/errors.jsonl")
    paths = [path for pattern in patterns for path in out.glob(pattern)]
    first = first_recorded(paths, str(Record(out).run.get("started", "")))
    return f"{first} ({message})" if first else message
