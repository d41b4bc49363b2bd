"""The start and the end of processes: none is left by Ctrl-C, and one that was killed has ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

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


@contextmanager
def python_child(
    module: str, *arguments: str, stdin: int | IO[bytes], more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module as a process whose output is read, and which is killed at the end of the block.

    Args:
        more: variables of its environment, besides those of this process.
    """
    # Found where this process finds it, and never in the working folder (-P), whose files may have any name.
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(more or {})}
    child: subprocess.Popen[bytes] | None = None
    try:
        with without_interrupts():
            # In a session of its own, because Ctrl-C is for the process that waits for it.
            child = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=subprocess.PIPE, start_new_session=True
            )
        yield child
    finally:
        if child is not None:
            with suppress(BrokenPipeError), child:  # of what it has not read
                child.kill()


def limit_memory(more: int) -> None:
    """Let this process take some bytes more than it has; beyond that it has a `MemoryError`, or is ended.

    Darwin counts otherwise, and does not hold to it.
    """
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + more)
    _limit(resource.RLIMIT_CORE, 0)  # what it holds may be of patients


def limit_seconds(more: int) -> None:
    """Let this process compute some seconds more than it has; it is ended by SIGXCPU then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + more)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


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
