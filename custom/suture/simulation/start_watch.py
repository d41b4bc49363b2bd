"""The start of FLARE's simulator: which site has lost its process, or its connection.

FLARE 2.9.0: it does not start the process of a site again when it ends, or when its connection was reset,
and its server goes on waiting for the site.
Where: nvflare/private/fed/app/simulator/simulator_runner.py: do_one_task
Expires with: test_flares_simulator_does_not_start_the_process_of_a_site_again

What the processes below another one do, seen from outside: whether those of a site stand still.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from suture.core.files import MAKING, whole_lines
from suture.core.plain import read_regular
from suture.core.processes import wait_for_end

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
    found: dict[str, Activity] = {SIMULATOR: Activity()}
    with suppress(psutil.NoSuchProcess):  # it ended just now, as the caller will see
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:  # a parent before its children
            with suppress(psutil.Error):
                owner = _site(process) or owners.get(process.ppid(), SIMULATOR)
                owners[process.pid] = owner
                found.setdefault(owner, Activity()).add(process)
    return found


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


PATIENCE = 20.0
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

    def lost(self, seen: Seen, now: float) -> Lost | None:
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
        if site is not None and now - self._absent[site] >= PATIENCE:
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
        if lost := calls.lost(seen, time.monotonic()):
            return lost
        time.sleep(_WATCH_LOOK)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the simulator and all processes that it has started, whichever session they are in."""
    everything: dict[int, psutil.Process] = {}
    while new := {one.pid: one for one in _below(process) if one.pid not in everything}:
        everything |= new
        for one in new.values():
            with suppress(psutil.NoSuchProcess):
                one.suspend()  # so that it starts no other
    for one in everything.values():
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    wait_for_end(everything.values())


def _below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a process while it lives, those of its session also when it has ended, and all below them."""
    found = []
    itself = process.pid if process.poll() is None else None
    for number in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if number == itself or os.getsid(number) == process.pid:
                one = psutil.Process(number)
                found += [one, *one.children(recursive=True)]
    return found


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
