"""Processes that are forked from one which has imported what they need.

To import torch takes 1.5 s of a core: it is done once, and its memory is shared. The server is spawned, and
forks before it has computed anything, because the threads with which torch computes do not survive a fork.
A server belongs to one run. That of multiprocessing has the environment of its first use and keeps its memory
until the program ends; a start waits for its imports; and once it was killed, no process of it can be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import psutil

from suture.core.processes import wait_for_end, without_interrupts

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
                self._forked = [_found(pid) for pid in self._control.recv()]

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


def _found(pid: int) -> psutil.Process | None:
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
