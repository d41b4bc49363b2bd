"""The end of processes that this one has killed and that may not be its children."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

_LOOK = 0.005
"""Seconds between two looks."""


def wait_for_end(processes: Iterable[psutil.Process], seconds: float = 10) -> None:
    """Wait until processes have ended, some seconds at most.

    One whose parent has not asked for its exit code has ended, too: an orphan's new parent may take its time.
    """
    left, until = list(processes), time.monotonic() + seconds
    while (left := [one for one in left if _runs(one)]) and time.monotonic() < until:
        time.sleep(_LOOK)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
