"""What a run costs before its first and after its last round: `python benchmarks/start_cost.py`.

The demo as `suture run` does it, from the start of the command to its end: in one process, with a process for
each site, and in FLARE's simulator. `start` ends as round 1 begins, `rounds` with the last commit. CPU
seconds count all processes of the command, each as it was last seen; memory is the largest sum of their
proportional set sizes. The ways take turns, so that they meet the same load, and must give models of the same
bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from machine import machine
from rich.console import Console
from rich.table import Table

WAYS = {
    "one process": ("--env", "local"),
    "a process for each site": ("--env", "local", "--workers", "3"),
    "FLARE's simulator": ("--env", "sim"),
}
_TICK = 0.02  # seconds between two looks at the events
_COUNTED = 10  # ticks between two looks at the processors' time: of a process that is killed, none is told
_WEIGHED = 100  # ticks between two looks at the memory, which hold the processes up


@dataclass(frozen=True)
class Cost:
    """Seconds of a run's phases, its CPU seconds and its memory in MiB."""

    start: float
    rounds: float
    end: float
    total: float
    cpu: float
    memory: float


def run(out: Path, rounds: int, words: tuple[str, ...]) -> Cost:
    """Run the demo and time its phases."""
    command = [
        sys.executable,
        "-m",
        "suture",
        "run",
        "demo",
        "--rounds",
        str(rounds),
        *words,
        "--out",
        str(out),
    ]
    began, events = time.monotonic(), out / "events.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    marks, memory, tick = [began], 0.0, 0
    used: dict[int, float] = {}
    while process.poll() is None:
        time.sleep(_TICK)
        text = events.read_text() if events.exists() else ""
        if len(marks) == 1 and '"event": "round"' in text:
            marks.append(time.monotonic())
        if len(marks) == 2 and text.count('"event": "committed"') == rounds:
            marks.append(time.monotonic())
        tick += 1
        if not tick % _COUNTED:
            used |= {one.pid: seconds for one in _tree(process.pid) if (seconds := _cpu(one))}
        if not tick % _WEIGHED:
            memory = max(memory, _memory(process.pid))
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    marks.append(time.monotonic())
    start, last, end = (after - at for at, after in pairwise(marks))
    return Cost(start, last, end, marks[-1] - began, sum(used.values()), memory)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none where it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu(process: psutil.Process) -> float:
    """Seconds of a process without its children."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _memory(pid: int) -> float:
    """Proportional set sizes of a process and its children: what they share counts once."""
    total = 0
    for process in _tree(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[Cost]] = {way: [] for way in WAYS}
    models = set()
    for _ in range(args.repeat):
        for way, words in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(run(Path(folder) / "r", args.rounds, words))
                model = (Path(folder) / "r" / "model" / "model.safetensors").read_bytes()
                models.add(hashlib.sha256(model).hexdigest())
    if len(models) > 1:
        raise SystemExit(f"the models differ: {sorted(models)}")
    heads = ("start s", "rounds s", "end s", "total s", "CPU s", "memory MiB", "rounds, of one process")
    table = Table("demo", *heads, title=f"{args.rounds} rounds, medians of {args.repeat}; {machine()}")
    alone = [cost.rounds for cost in found["one process"]]
    for way, costs in found.items():
        medians = (f"{statistics.median(column):.1f}" for column in zip(*map(astuple, costs), strict=True))
        ratios = [cost.rounds / one for cost, one in zip(costs, alone, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        table.add_row(way, *medians, spread)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
