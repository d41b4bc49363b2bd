"""Processes: how many cores they may use, how they are forked, and how they end.

- The cores that this process may use, which may be fewer than the machine has.
- A server (`ForkServer`) forks processes from one which has imported what they need: to import torch takes
  1.5 s of a core, and memory, once. It is spawned, and forks before it has computed anything, because the
  threads with which torch computes do not survive a fork. A server belongs to one run. That of
  multiprocessing has the environment of its first use and keeps its memory until the program ends; a start
  waits for its imports; and once it was killed, no process of it can be killed.
- The C library's allocator, set to use freed memory again. glibc takes each large block from the kernel and
  returns it when it is freed, so that every activation of a network is written to fresh pages, which the
  kernel clears first: up to half of the time of an evaluation.
- No process is left by Ctrl-C, and one that was killed has ended.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import psutil

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Of a container: microseconds of a core, or "max", in each period of microseconds (Linux, cgroup v2)."""


def usable_cores() -> int:
    """Return the number of cores of this process, at least 1: its affinity, and what a container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # another system, or no limit
        return cores


_KEPT = 2**30
"""Bytes: larger blocks, and free memory beyond this at the end of the heap, still go back to the kernel."""

_OLD_MOST = 2**25
"""Bytes: the largest threshold of older versions of glibc on 64 bits (mallopt(3))."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""

_THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": str(_KEPT), "MALLOC_TRIM_THRESHOLD_": str(_KEPT)}


def keep_memory() -> bool:
    """Set the allocator of this process; return whether it was set, as only that of glibc can be.

    It holds for the main thread, and for others as far as they share its arena. Where a variable of the
    environment sets a threshold, that stays.
    """
    if _THRESHOLDS.keys() & os.environ.keys():
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  another library's mallopt has other numbers, or does nothing
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):  # of another C library, or of a system without one
        return False
    kept = mallopt(_MMAP_THRESHOLD, _KEPT) or mallopt(_MMAP_THRESHOLD, _OLD_MOST)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _KEPT))


def keeping_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is to use its memory again; what is set there stays.

    All its threads share one arena: a site of FLARE computes in a thread, and blocks of 64 MiB or more would
    come from the kernel in any other arena. Other C libraries ignore the variables.
    """
    return {"MALLOC_ARENA_MAX": "1", **_THRESHOLDS, **environment}


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


Work = Callable[[Connection], object]
"""What a process does with its end of its line. It is pickled: a function of a module."""

_CONTEXT = multiprocessing.get_context("spawn")


class ForkServer:
    """Begins to import at once, and forks its processes when it has.

    Args:
        work: of each process, which ends when it returns; its module is what is imported.
        number: of processes.

    Attributes:
        lines: to the processes. One is at its end when its process has ended.
    """

    def __init__(self, work: Work, number: int) -> None:
        pairs = [_CONTEXT.Pipe() for _ in range(number)]
        self._control, control = _CONTEXT.Pipe()
        self.lines: list[Connection] = [near for near, _ in pairs]
        far = [far for _, far in pairs]
        self._server = _CONTEXT.Process(target=_serve, args=(work, far, control), daemon=True)
        resource_tracker.ensure_running()  # by the start, it would let interrupts through again
        with without_interrupts():
            self._server.start()
        for end in (*far, control):
            end.close()
        self._forked: list[psutil.Process | None] | None = None  # None for one that has ended

    def wait(self) -> None:
        """Wait until the processes are forked; where the server has ended before, there are none."""
        if self._forked is None:
            self._forked = []
            with suppress(EOFError, OSError):
                self._forked = [_find_server(pid) for pid in self._control.recv()]

    def exit_code(self, index: int) -> int | None:
        """Wait for the end of a process; return its exit code, or that of the server if it has ended."""
        self.wait()
        try:
            self._control.send(index)
            code: int = self._control.recv()
        except (EOFError, OSError):
            self._server.join()
            return self._server.exitcode
        return code

    def kill(self, index: int) -> None:
        """Kill a process and wait for its end."""
        self.wait()
        if self._forked:
            if process := self._forked[index]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.exit_code(index)
        self.lines[index].close()

    def close(self) -> None:
        """Kill all processes, and the server, and wait for their end."""
        if self._forked is not None or self._control.poll():
            for index in range(len(self.lines)):
                self.kill(index)
        self._server.kill()
        self._server.join()
        for line in (*self.lines, self._control):
            line.close()  # a process that was forked at this moment ends by this
        wait_for_end(filter(None, self._forked or []))


def _find_server(pid: int) -> psutil.Process | None:
    """A process; None where it has ended and, as its parent was killed, nobody waits to be told."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


# In the process of the server
def _serve(work: Work, lines: Sequence[Connection], control: Connection) -> None:
    """Fork a process for each line, and tell how those end that are asked about, until nobody asks."""
    pids = [_fork(work, line, [*lines, control]) for line in lines]
    for line in lines:
        line.close()
    codes: dict[int, int] = {}
    with suppress(EOFError, OSError):
        control.send(pids)
        while True:
            index = control.recv()
            if index not in codes:  # until then its number is given to no other process
                codes[index] = os.waitstatus_to_exitcode(os.waitpid(pids[index], 0)[1])
            control.send(codes[index])


def _fork(work: Work, line: Connection, every: Sequence[Connection]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for other in every:
            if other is not line:
                other.close()
        work(line)
        code = 0
    except BaseException:  # noqa: BLE001 - nobody else would tell it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
