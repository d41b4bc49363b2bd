"""The C library's allocator, set to use freed memory again rather than to give it back to the kernel.

glibc takes each large block from the kernel and returns it when it is freed, so that every activation of a
network is written to fresh pages. The kernel clears these first: up to half of the time of an evaluation.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

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
