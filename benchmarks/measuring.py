"""How the parts measure: works in turns, processes of their own, and memory while something runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")


@dataclass(frozen=True)
class Options:
    """What every part is told.

    Attributes:
        quick: the smallest settings, to try the command.
        flwr: the interpreter of an environment that has flwr[simulation].
    """

    quick: bool
    flwr: Path

    @property
    def repeats(self) -> int:
        """How often a figure and its anchor are measured, in turns."""
        return 2 if self.quick else 8

    @property
    def runs(self) -> int:
        """The same of what takes long, as a federation in processes of its own, or a large network."""
        return 1 if self.quick else 5


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat, by the clock and of the processor, of all threads of the process."""

    clock: tuple[float, ...]
    cpu: tuple[float, ...]

    def times(self, factor: float) -> Times:
        """In another unit, or divided by the number of things that a repeat does."""
        return Times(tuple(s * factor for s in self.clock), tuple(s * factor for s in self.cpu))

    def per(self, count: float) -> Times:
        """How many a second where a repeat does `count` of them."""
        return Times(tuple(count / s for s in self.clock), tuple(count / s for s in self.cpu))


def in_turns(repeats: int, works: Mapping[str, Callable[[], Callable[[], object]]]) -> dict[str, Times]:
    """Time pieces of work in turns, so that what else the machine does weighs on all of them.

    Args:
        works: each prepares what is then timed. Every second time they are taken in the opposite order; the
            first time warms up and is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name in list(works)[:: 1 if repeat % 2 else -1]:
            work = works[name]()
            clock, cpu = time.perf_counter(), time.process_time()
            work()
            if repeat:
                found[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    return {name: Times(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def apart(work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
    """Call a function of a module in a process of its own, which has done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given, **named).result()


@contextmanager
def every(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Look again and again, in a thread, until the block ends; what looking raises is raised then."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            look()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
        looking.result()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none where it has ended."""
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def tree_memory(pid: int) -> float:
    """Proportional set sizes of a process and all below it in MB: what they share counts once."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss / 1e6
    return total


def tree_cpu(pid: int) -> dict[int, float]:
    """CPU seconds of a process and of each below it, without their children, by number; no zombie's."""
    found = {}
    for process in tree(pid):
        with suppress(psutil.Error):
            if seconds := sum(process.cpu_times()[:2]):
                found[process.pid] = float(seconds)
    return found
