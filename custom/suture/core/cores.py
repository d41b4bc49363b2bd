"""How many cores this process may use, which may be fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

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
