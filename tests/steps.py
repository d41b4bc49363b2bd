"""A clock that a busy machine does not make faster: the lines of Python that some work takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


def steps(work: Callable[[], _T]) -> tuple[_T, int]:
    """What the work returns, and how many lines it took; each turn of a loop counts, also within one line."""
    taken, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal taken
        taken += event == "line"
        return trace

    sys.settrace(trace)
    try:
        return work(), taken
    finally:
        sys.settrace(before)
