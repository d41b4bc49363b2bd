"""Work in a process of its own, which may be killed at one of its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def forked(work: Callable[[], object]) -> int:
    """Do work in a process of its own; return its number."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def killing(step: int) -> Callable[[Function], Function]:
    """Return a wrapper of functions: the process is killed before or after one of their calls.

    Args:
        step: counts both moments of each call of any wrapped function, from 1.
    """
    left = [step]

    def counted(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            for moment in range(2):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not moment:
                    value = function(*args, **kwargs)
            return value

        return call

    return counted
