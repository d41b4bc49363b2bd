"""The fuzzer: gives mutated inputs to the readers of untrusted input, and collects what is no typed error.

A target makes one case from a seed and reads it. Reading must succeed or raise a typed error with a short,
printable message, within `SECONDS` and `MEMORY`; a warning counts as an error, because it could flood a log.
"""

from __future__ import annotations

import logging
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from suture.core.errors import SutureError

SECONDS = 10.0
"""Longest time of a case."""

MEMORY = 256 * 2**20
"""Largest growth of the process by a case, in bytes."""

MESSAGE = 4_000
"""Largest number of characters of a message."""


@dataclass(frozen=True)
class Target:
    """A reader of untrusted input.

    Attributes:
        make: a case, from random numbers.
        read: reads it, and checks what it has read.
    """

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], object]


@dataclass(frozen=True)
class Finding:
    """A case that did not end as it must.

    Attributes:
        where: the innermost line of the package, for telling findings apart.
    """

    target: str
    seed: int
    error: str
    where: str

    def __str__(self) -> str:
        return f"{self.target} {self.seed}: {self.error} ({self.where})"


class Slow(Exception):
    """A case takes too long."""


class Unfit(Exception):
    """A typed error whose message is no message."""


def fuzz(target: Target, seeds: Iterable[int]) -> Iterator[Finding]:
    """Run a target on the cases of some seeds."""
    with _bounded():
        for seed in seeds:
            if error := _fault(target, seed):
                yield Finding(target.name, seed, f"{type(error).__name__}: {error!s:.200}", _where(error))


def case(target: Target, seed: int) -> Any:
    """The case of a seed."""
    return target.make(Random(f"{target.name} {seed}"))


def _fault(target: Target, seed: int) -> BaseException | None:
    with warnings.catch_warnings(action="ignore"):
        made, before = case(target, seed), peak()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    unfit = None
    try:
        target.read(made)
    except SutureError as error:
        unfit = _unfit(str(error), error)
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (grown := peak() - before) > MEMORY:
        return MemoryError(f"{grown >> 20} MiB")
    return unfit


def _unfit(text: str, error: SutureError) -> BaseException | None:
    if not text or len(text) > MESSAGE:
        return Unfit(f"a message of {len(text)} characters: {text[:100]}").with_traceback(error.__traceback__)
    if not all(line.isprintable() for line in text.split("\n")):
        return Unfit(f"a message that is not printable: {text[:500]!r}").with_traceback(error.__traceback__)
    return None


def peak() -> int:
    """The most memory that the process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/suture/" in f.filename]
    return f"{frames[-1].filename.rpartition('/suture/')[2]} {frames[-1].name}" if frames else "?"


@contextmanager
def _bounded() -> Iterator[None]:
    def late(*_: object) -> None:
        raise Slow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGALRM, before)
