"""The processes that FLARE's simulator starts for its sites, and which site has lost its own.

FLARE does not start the process of a site again when it ends, and its server goes on waiting for the site.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

import psutil

PATIENCE = 20.0
"""Seconds that a site may be without a process, while another one has or had one, before it is lost."""

_LOOK = 1.0
_WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
_ENDED = ("finished", "failed", "interrupted")


class RollCall:
    """Says which site has no process although the simulator has begun to start them.

    How long a process takes is its own affair: one that imports, or reads its images, is there.

    Args:
        sites: each of which has a process for the whole run.
    """

    def __init__(self, sites: Collection[str]) -> None:
        self._sites = sites
        self._begun = False
        self._absent: dict[str, float] = {}

    def lost(self, present: Collection[str], now: float) -> str | None:
        """Return a site that has been without a process for `PATIENCE` seconds, the one for longest.

        Args:
            present: the sites that have a process.
            now: seconds, on any clock.
        """
        self._begun = self._begun or bool(present)
        if self._begun:
            self._absent = {site: self._absent.get(site, now) for site in self._sites if site not in present}
        site = min(self._absent, key=lambda name: (self._absent[name], name), default=None)
        return site if site is not None and now - self._absent[site] >= PATIENCE else None


def watch_start(process: subprocess.Popen[bytes], out: Path, sites: Collection[str]) -> str | None:
    """Wait until the federation of a run folder has begun, or has ended; return a site that is lost before.

    Args:
        process: FLARE's simulator.
        sites: each of which has a process for the whole run.
    """
    calls, events = RollCall(sites), out / "events.jsonl"
    before = events.stat().st_size if events.exists() else 0
    while process.poll() is None and not _begun(events, before) and not _ended(out):
        if lost := calls.lost(_present(process.pid), time.monotonic()):
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


def _begun(events: Path, before: int) -> bool:
    """Whether the server has recorded, after the first bytes of its events, that all sites are heard."""
    if not events.exists():
        return False
    with events.open("rb") as file:
        file.seek(before)
        return any(b'"event": "begin"' in line for line in file)


def _ended(out: Path) -> bool:
    """Whether the run has a final status, so that its processes end of themselves."""
    try:
        return json.loads((out / "run.json").read_text()).get("status") in _ENDED
    except (OSError, ValueError):
        return False
