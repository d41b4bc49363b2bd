"""The abort of a job, as the work in a thread sees it: a site stops within one step or batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from suture.core.errors import Aborted

_ABORTED: ContextVar[Callable[[], bool]] = ContextVar("suture_aborted", default=lambda: False)


@contextmanager
def abortable(aborted: Callable[[], bool]) -> Iterator[None]:
    """Let the work of this thread end as soon as `aborted` says so; see `check_abort`."""
    token = _ABORTED.set(aborted)
    try:
        yield
    finally:
        _ABORTED.reset(token)


def check_abort() -> None:
    """End the work of an aborted job.

    `suture.core.devices.moved` calls this for every batch, whoever trains, evaluates or extracts features;
    only what computes for long without moving a batch has to call it too.

    Raises:
        Aborted: the job was aborted.
    """
    if _ABORTED.get()():
        raise Aborted("the job was aborted")
