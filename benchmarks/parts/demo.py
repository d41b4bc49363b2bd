"""The demo as `suture run` does it, from the start of the command to its end, in three ways that take turns.

`start` ends as round 1 begins, `rounds` with the last commit. CPU seconds count all processes of the command,
each as it was last seen: of one that is killed nobody is told more. Memory is the largest sum of their
proportional set sizes. `suture demo` has a process for each site. The models of all ways must have the same
bytes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from figures import Figure, Options, Target
from harness import every, tree_cpu, tree_memory

WAYS = {
    "one process": ("--env", "local"),
    "3 workers": ("--env", "local", "--workers", "3"),
    "FLARE's simulator": ("--env", "sim"),
}
TARGETS = {
    ("start", "3 workers"): Target("figure", "≤", 8),
    ("total", "3 workers"): Target("figure", "≤", 40),
    ("rounds", "3 workers"): Target("ratio", "≥", 1.7),
}
UNITS = {"start": "s", "rounds": "rounds/s", "end": "s", "total": "s", "CPU": "s", "memory": "MB"}
_TICK = 0.02  # seconds between two looks at the events
_COUNTED = 0.2  # and at the processors' time
_WEIGHED = 2  # and at the memory, which hold the processes up


def run(out: Path, rounds: int, words: tuple[str, ...]) -> dict[str, float]:
    """Run the demo; return a figure for each of `UNITS`."""
    command = [*(sys.executable, "-m", "suture", "run", "demo", "--rounds", str(rounds)), *words]
    began, events = time.monotonic(), out / "events.jsonl"
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    marks, memory, used = [began], [0.0], dict[int, float]()
    with (
        every(_COUNTED, lambda: used.update(tree_cpu(process.pid))),
        every(_WEIGHED, lambda: memory.append(tree_memory(process.pid))),
    ):
        while process.poll() is None:
            time.sleep(_TICK)
            text = events.read_text() if events.exists() else ""
            if len(marks) == 1 and '"event": "round"' in text:
                marks.append(time.monotonic())
            if len(marks) == 2 and text.count('"event": "committed"') == rounds:
                marks.append(time.monotonic())
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
    marks.append(time.monotonic())
    start, last, end = (after - at for at, after in pairwise(marks))
    values = (start, rounds / last, end, marks[-1] - began, sum(used.values()), max(memory))
    return dict(zip(UNITS, values, strict=True))


def figures(options: Options) -> list[Figure]:
    """The phases of the demo, beside those of one process."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    models = set()
    for _ in range(1 if options.quick else 3):
        for way, words in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(run(Path(folder) / "r", 2 if options.quick else 15, words))
                model = (Path(folder) / "r" / "model" / "model.safetensors").read_bytes()
                models.add(hashlib.sha256(model).hexdigest())
    if len(models) > 1:
        raise RuntimeError(f"the models differ: {sorted(models)}")
    one, *others = WAYS
    return [
        Figure(
            *("demo", f"{what}, {way}", unit, tuple(each[what] for each in found[way])),
            *(one, tuple(each[what] for each in found[one])),
            targets=(TARGETS[what, way],) if (what, way) in TARGETS else (),
        )
        for way in others
        for what, unit in UNITS.items()
    ]
