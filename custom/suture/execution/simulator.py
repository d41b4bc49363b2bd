"""FLARE's simulator in a process of its own, and the first real error of a run that failed.

FLARE 2.9.0: its simulator divides the commands of its processes at blanks, and leaves global state behind.
Where: nvflare/private/fed/app/simulator/simulator_runner.py: do_one_task
Expires with: test_flares_simulator_divides_its_commands_at_blanks

`StartupMonitor` sees which site has lost its process, or its connection.

FLARE 2.9.0: it does not start the process of a site again when it ends, or when its connection was reset,
and its server goes on waiting for the site.
Where: nvflare/private/fed/app/simulator/simulator_runner.py: do_one_task
Expires with: test_flares_simulator_does_not_start_the_process_of_a_site_again

Whether the processes of a site stand still is seen from outside.
"""

from __future__ import annotations

import json
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from suture.core.errors import ConfigError, FederationError
from suture.core.escaping import printable
from suture.core.files import (
    MAKING,
    atomic_write,
    hold,
    make_folder,
    open_regular,
    read_json,
    read_regular,
    whole_lines,
)
from suture.core.processes import keeping_memory, wait_for_end, without_interrupts
from suture.federation.server.record import SERVER_LOCK, SERVER_TAKEOVER, Record
from suture.federation.site.abstention import first_recorded

log = logging.getLogger(__name__)

SIMULATOR = ""
"""Name, beside those of the sites, of the processes that are not a site's."""

_CPU = 0.05
"""Seconds of a core from one look to the next; a site that waits for tasks takes 0.005 in a second."""

_BYTES = 2**16
"""Read and written from one look to the next; a site that waits reads 1,400 in a second."""

_WORKER = "nvflare.private.fed.app.simulator.simulator_worker"


@dataclass
class Activity:
    """What the processes of one party have done until now.

    Attributes:
        pids: of the processes.
        cpu: seconds of a core.
        transferred: bytes, read from and written to whatever is a file.
        busy: whether a thread of theirs has, or waits for, a core, a disk or swapped memory; or a process
            makes a file that several share, or waits until another one has made it.
    """

    pids: set[int] = field(default_factory=set)
    cpu: float = 0.0
    transferred: int = 0
    busy: bool = False

    def add(self, process: psutil.Process) -> None:
        """Count one more process.

        Raises:
            psutil.Error: it has ended.
        """
        with process.oneshot():
            self.pids.add(process.pid)
            times = process.cpu_times()
            self.cpu += times.user + times.system
            with suppress(AttributeError, psutil.AccessDenied):  # another system has no such counters
                counted = process.io_counters()
                self.transferred += counted.read_chars + counted.write_chars
        self.busy = self.busy or not _states(process).isdisjoint("RD") or _makes(process)


def look(pid: int) -> dict[str, Activity]:
    """Return the activity of FLARE's simulator, as `SIMULATOR`, and of each site that has a process."""
    owners: dict[int, str] = {}
    activities: dict[str, Activity] = {SIMULATOR: Activity()}
    with suppress(psutil.NoSuchProcess):  # it ended just now, as the caller will see
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:  # a parent before its children
            with suppress(psutil.Error):
                owner = _site(process) or owners.get(process.ppid(), SIMULATOR)
                owners[process.pid] = owner
                activities.setdefault(owner, Activity()).add(process)
    return activities


class Standstill:
    """Counts for how many looks in a row the processes of each party have stood still.

    Looks are counted rather than seconds, so that a machine that was suspended counts none. One in which a
    thread runs is not enough to end it: those of a site that waits do so now and then. A process that
    imports on a crowded machine, or waits for a disk, is in this state at almost every look.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, Activity] = {}
        self._looks: dict[str, int] = {}

    def note(self, seen: Mapping[str, Activity]) -> Mapping[str, int]:
        """Return the looks in a row in which each party has stood still, this one included."""
        self._looks = {
            name: 0 if _works(self._last.get(name), now) else self._looks.get(name, 0) + 1
            for name, now in seen.items()
        }
        self._last = seen
        return self._looks


def _works(before: Activity | None, now: Activity) -> bool:
    return (
        before is None
        or now.pids != before.pids
        or now.cpu - before.cpu > _CPU
        or now.transferred - before.transferred > _BYTES
        or (now.busy and before.busy)
    )


def _site(process: psutil.Process) -> str | None:
    """Return the site for which FLARE's simulator has started a process; None for another one."""
    words = process.cmdline()
    return words[words.index("--client") + 1] if _WORKER in words and "--client" in words else None


def _makes(process: psutil.Process) -> bool:
    """Whether a process makes, or waits for, a file that several share; see `only_maker`."""
    return any(file.path.endswith(MAKING) for file in process.open_files())


def _states(process: psutil.Process) -> set[str]:
    """Return the states of the threads of a process, as Linux abbreviates them; elsewhere, its own."""
    states = set()
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.add(stat.read_text(errors="replace").rpartition(")")[2].split()[0])
    return states or {"R" if process.status() == psutil.STATUS_RUNNING else "S"}


ABSENCE = 20.0
"""Seconds that a site may be without a process, while another one has or had one, before it is lost."""

STILL = 20
"""Looks, about a second apart, that a site may stand still before it has fetched its first task."""

UNANSWERED = 75
"""Looks that a site may stand still with its first task: longer than it waits for the lock of its folder."""

LONGEST = 600.0
"""Seconds from the first look that a site, or the simulator, may work without its first task, and .."""

_EACH = 30.0
""".. how many more for each site: its imports take 5 s of a core."""

_WATCH_LOOK = 1.0

_ENDED = ("finished", "failed", "interrupted")


@dataclass(frozen=True)
class Lost:
    """A site without which a run would not begin, and what is the matter with its process.

    Attributes:
        site: None where the simulator has started no process at all.
    """

    site: str | None
    how: Literal["ended", "did not fetch a task", "did not answer its first task", "did not start"]

    def __str__(self) -> str:
        if self.site is None:
            return "FLARE's simulator did not start a client process"
        return f"{self.site}: its process in FLARE's simulator {self.how} before the first round"


@dataclass(frozen=True)
class Seen:
    """What one look has shown.

    Attributes:
        still: how many looks in a row the simulator, and each site that has a process, has stood still.
        fetched, answered: the sites that have fetched, and answered, their first task.
    """

    still: Mapping[str, int]
    fetched: Collection[str] = ()
    answered: Collection[str] = ()


class StartupMonitor:
    """Says which site has no process although the simulator has begun to start them, or one that hangs.

    How long a process takes is its own affair as long as it works: it may import on a crowded machine, or
    read its images for an hour. One that stands still while the simulator does, too, waits for something
    that will not come.

    Args:
        sites: each of which has a process for the whole run; none where they share processes.
    """

    def __init__(self, sites: Collection[str]) -> None:
        self._sites = sorted(sites)
        self._since: float | None = None
        self._begun = False
        self._absent: dict[str, float] = {}

    def find_lost(self, seen: Seen, now: float) -> Lost | None:
        """Return what is lost.

        Args:
            now: seconds, on any clock.
        """
        self._since = now if self._since is None else self._since
        late = now - self._since >= LONGEST + _EACH * len(self._sites)
        self._begun = self._begun or len(seen.still) > 1
        if not self._begun:
            return Lost(None, "did not start") if late or seen.still[SIMULATOR] >= STILL else None
        self._absent = {site: self._absent.get(site, now) for site in self._sites if site not in seen.still}
        site = min(self._absent, key=lambda name: (self._absent[name], name), default=None)
        if site is not None and now - self._absent[site] >= ABSENCE:
            return Lost(site, "ended")
        for site in self._sites:
            still = min(seen.still.get(site, 0), seen.still[SIMULATOR])
            if site not in seen.fetched and (still >= STILL or late):
                return Lost(site, "did not fetch a task")
            if site not in seen.answered and still >= UNANSWERED:
                return Lost(site, "did not answer its first task")
        return None


def watch_start(process: subprocess.Popen[bytes], out: Path, sites: Collection[str]) -> Lost | None:
    """Wait until the federation of a run folder has begun, or has ended; return what is lost before.

    Args:
        process: FLARE's simulator.
        sites: each of which has a process for the whole run; none where they share processes.
    """
    calls, still, path, earlier = StartupMonitor(sites), Standstill(), out / "events.jsonl", _end(out)
    before = len(whole_lines(path))
    while process.poll() is None and _end(out) in (None, earlier):
        events = [json.loads(line) for line in whole_lines(path)[before:]]
        if any(event["event"] == "begin" for event in events):
            return None
        seen = Seen(still.note(look(process.pid)), _those(events, "fetched"), _those(events, "answer"))
        if lost := calls.find_lost(seen, time.monotonic()):
            return lost
        time.sleep(_WATCH_LOOK)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the simulator and all processes that it has started, whichever session they are in."""
    everything: dict[int, psutil.Process] = {}
    while new := {child.pid: child for child in _below(process) if child.pid not in everything}:
        everything |= new
        for child in new.values():
            with suppress(psutil.NoSuchProcess):
                child.suspend()  # so that it starts no other
    for child in everything.values():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    wait_for_end(everything.values())


def _below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a process while it lives, those of its session also when it has ended, and all below them."""
    processes = []
    itself = process.pid if process.poll() is None else None
    for number in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if number == itself or os.getsid(number) == process.pid:
                one = psutil.Process(number)
                processes += [one, *one.children(recursive=True)]
    return processes


def _those(events: list[dict[str, Any]], kind: str) -> set[str]:
    """Return the sites that have events of a kind."""
    return {event["site"] for event in events if event["event"] == kind}


def _end(out: Path) -> tuple[object, ...] | None:
    """Return the final status of the run, with its error and time; None while it has none.

    With one, the simulator's processes end of themselves: unless an earlier job of the run has left it.
    """
    try:
        run = json.loads(read_regular(out / "run.json"))
    except (OSError, ValueError):
        return None
    return (run["status"], run.get("error"), run.get("finished")) if run.get("status") in _ENDED else None


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
                "# or a backslash. Choose another folder, or --env local, which gives the same model"
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
        hold(self._out / SERVER_LOCK, SERVER_TAKEOVER).close()
        shutil.rmtree(self._under_way, ignore_errors=True)  # a process that was killed may have left some
        # A folder of its own, so that no process of another start can say that this one is over.
        self._messages = self._under_way / secrets.token_hex(4)
        make_folder(self._messages)
        self._temporary = tempfile.mkdtemp(prefix="flare-")  # of FLARE's, which leaves them where it is ended
        sites, messages = (self._out / "sites").resolve(), self._messages.resolve()
        environment = {"SUTURE_SITES": str(sites), MESSAGES: str(messages), "TMPDIR": self._temporary}
        command = [sys.executable, "-m", "suture.flare.simulate", str(self._out)]
        with self.log.open("ab") as printed, without_interrupts():
            self.before = printed.tell() if self.before is None else self.before
            self._process = subprocess.Popen(
                command,
                env=keeping_memory({**os.environ, **environment}),
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
            raised = _find_raised(lines[number + 1 :])
            return printable(f"{logged[1]}: {raised}" if raised else logged[1])
        if line.startswith("Traceback (most recent call last)"):
            return printable(_find_raised(lines[number + 1 :]) or line)
    return None


def _find_raised(lines: list[str]) -> str | None:
    """Return the last exception of the lines before the next entry of a log."""
    raised = None
    for line in lines:
        if _ENTRY.match(line):
            break
        if _RAISED.fullmatch(line):
            raised = _OWN.sub("", line)
    return raised


def with_first_error(out: Path, message: str) -> str:
    """Return, in one line, the earliest error that a site of this run has recorded, then the message."""
    patterns = ("sites/*/state/**/errors.jsonl", "flare/**/suture/errors.jsonl")
    paths = [path for pattern in patterns for path in out.glob(pattern)]
    first = first_recorded(paths, str(Record(out).run.get("started", "")))
    return f"{first} ({message})" if first else message
