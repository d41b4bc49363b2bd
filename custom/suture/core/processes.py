"""The start and the end of processes: none is left by Ctrl-C, and one that was killed has ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

_LOOK = 0.005
"""Seconds between two looks."""


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that what it starts is known, and does not reach that."""
    waiting: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    ours = handler is not None and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is started inherits it
    if ours:  # another thread, as of a library, may receive the signal: this one then runs its handler
        signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if waiting:
        signal.raise_signal(signal.SIGINT)


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
