"""What the processes below another one do, seen from outside: whether those of a site stand still."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from suture.core.files import MAKING

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
