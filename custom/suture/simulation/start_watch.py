"""The processes that FLARE's simulator starts for its sites, and which site has lost its own.

FLARE does not start the process of a site again when it ends, or when its connection was reset, and its
server goes on waiting for the site.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from suture.core.files import whole_lines

PATIENCE = 20.0
"""Seconds that a site may be without a process, while another one has or had one, before it is lost."""

SILENCE = 40.0
"""Seconds from the first process that a site always has to fetch its first task."""

_SLOWER = 3.0
"""How many times as long as the first site another one may take to fetch its first task."""

_NOBODY = 120.0
"""Seconds from the first process that all sites have, if none fetches a task."""

_IMPORTS = 10.0
"""Seconds of a core for each site, whose imports take less than half; four times that if none is heard."""

_LOOK = 1.0
_WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
_ENDED = ("finished", "failed", "interrupted")


@dataclass(frozen=True)
class Lost:
    """A site without which a run would not begin, and what is the matter with its process."""

    site: str
    how: Literal["ended", "fetched no task"]


class RollCall:
    """Says which site has no process although the simulator has begun to start them, or one that is silent.

    How long a process takes is its own affair once it has fetched its first task: it may read its images for
    an hour. Before, it imports and connects, at the same time as all others: one that takes several times as
    long as the first has lost its connection.

    Args:
        sites: each of which has a process for the whole run.
    """

    def __init__(self, sites: Collection[str]) -> None:
        self._sites = sites
        self._begun: float | None = None
        self._heard: float | None = None
        self._absent: dict[str, float] = {}

    def lost(self, present: Collection[str], heard: Collection[str], now: float) -> Lost | None:
        """Return a site that has been without a process for `PATIENCE` seconds, or silent for too long.

        Args:
            present: the sites that have a process.
            heard: the sites that have fetched their first task.
            now: seconds, on any clock.
        """
        if self._begun is None:
            if not present:
                return None
            self._begun = now
        if self._heard is None and heard:
            self._heard = now
        self._absent = {site: self._absent.get(site, now) for site in self._sites if site not in present}
        site = min(self._absent, key=lambda name: (self._absent[name], name), default=None)
        if site is not None and now - self._absent[site] >= PATIENCE:
            return Lost(site, "ended")
        silent = [site for site in self._sites if site in present and site not in heard]
        return Lost(min(silent), "fetched no task") if silent and now - self._begun >= self._limit else None

    @property
    def _limit(self) -> float:
        """Seconds from the first process after which a site that was not heard is lost."""
        each = len(self._sites) / (os.cpu_count() or 1)
        if self._begun is not None and self._heard is not None:
            return max(SILENCE, _SLOWER * (self._heard - self._begun), _IMPORTS * each)
        return max(_NOBODY, 4 * _IMPORTS * each)


def watch_start(process: subprocess.Popen[bytes], out: Path, sites: Collection[str]) -> Lost | None:
    """Wait until the federation of a run folder has begun, or has ended; return a site that is lost before.

    Args:
        process: FLARE's simulator.
        sites: each of which has a process for the whole run.
    """
    calls, path = RollCall(sites), out / "events.jsonl"
    before = len(whole_lines(path))
    while process.poll() is None and not _ended(out):
        events = [json.loads(line) for line in whole_lines(path)[before:]]
        if any(event["event"] == "begin" for event in events):
            return None
        heard = {event["site"] for event in events if event["event"] == "fetched"}
        if lost := calls.lost(_present(process.pid), heard, time.monotonic()):
            return lost
        time.sleep(_LOOK)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the simulator and all processes that it has started, whichever session they are in."""
    try:
        everything = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        everything = []
    for one in everything:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(everything, timeout=10)


def _present(pid: int) -> set[str]:
    """Return the sites whose processes live below a process."""
    found = set()
    try:
        for child in psutil.Process(pid).children(recursive=True):
            words = _words(child)
            if _WORKER in words and "--client" in words:
                found.add(words[words.index("--client") + 1])
    except psutil.NoSuchProcess:
        pass  # it ended just now, as its caller will see
    return found


def _words(process: psutil.Process) -> list[str]:
    """Return the command line of a process; nothing of one that has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _ended(out: Path) -> bool:
    """Whether the run has a final status, so that its processes end of themselves."""
    try:
        return json.loads((out / "run.json").read_text()).get("status") in _ENDED
    except (OSError, ValueError):
        return False
