"""What a figure may depend on: a line for the head of each benchmark's table."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from suture.core.environment import versions


def machine() -> str:
    """Processor, cores, torch threads, load, and versions; every process measured has one thread."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    used = versions()
    return (
        f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}; "
        f"one torch thread a process; python {used['python']}, torch {used['torch build']}, "
        f"nvflare {used['nvflare']}, suture {used['suture']}"
    )
