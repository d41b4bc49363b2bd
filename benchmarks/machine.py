"""What a figure may depend on: a line for the head of each benchmark's table."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from suture.core.cores import usable_cores
from suture.core.environment import versions

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit of this checkout, and whether it was changed since."""
    git = ("git", "-C", str(ROOT))
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        )
        changes = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {name.stdout.strip()}{', changed' if changes.stdout else ''}"


def machine() -> str:
    """Processor, cores, torch threads, load, versions and commit; every process measured has one thread."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    used = versions()
    return (
        f"{cpu}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}; "
        f"one torch thread a process; python {used['python']}, torch {used['torch build']}, "
        f"nvflare {used['nvflare']}, suture {used['suture']}, {commit()}"
    )
