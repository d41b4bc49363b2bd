"""Merging many sites and classes: `python benchmarks/merge.py`.

Time of the weighted mean against a Python loop over classes, and the server's peak memory while it folds
spooled updates of more and more sites.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from suture.mean import WeightedMean
from suture.messages import Update, ones
from suture.packing import load, pack, save, unpack

CLASSES, FEATURES, OWNED = 1000, 1024, 300
NAMES = tuple(f"Class {i:04d}" for i in range(CLASSES))


def update(seed: int) -> Update:
    """A site that knows 300 of the 1,000 classes."""
    g = torch.Generator().manual_seed(seed)
    own = torch.randperm(CLASSES, generator=g)[:OWNED].tolist()
    labels = tuple(NAMES[i] for i in own)
    head = {
        "head.weight": torch.randn(OWNED, FEATURES, generator=g),
        "head.bias": torch.randn(OWNED, generator=g),
    }
    return Update(1, labels, {"w": torch.randn(10_000, generator=g)}, head, ones(labels))


def empty() -> WeightedMean:
    """A mean over all classes."""
    head = {"head.weight": torch.zeros(CLASSES, FEATURES), "head.bias": torch.zeros(CLASSES)}
    return WeightedMean(NAMES, {"w": torch.zeros(10_000)}, head)


def vectorised(updates: list[Update]) -> dict[str, Tensor]:
    """The product's mean."""
    mean = empty()
    for one in updates:
        mean.add(one)
    return mean.head()


def by_class(updates: list[Update]) -> dict[str, Tensor]:
    """The algorithm as the paper prints it: for each class, for each client that has it."""
    merged = {"head.weight": torch.zeros(CLASSES, FEATURES), "head.bias": torch.zeros(CLASSES)}
    for c, name in enumerate(NAMES):
        owners = [(one, one.labels.index(name)) for one in updates if name in one.labels]
        for key, rows in merged.items():
            if owners:
                rows[c] = torch.stack([one.head[key][i].double() for one, i in owners]).mean(0)
    return merged


def spooled(folder: Path) -> Iterator[Update]:
    """Updates read back one at a time, as the server does."""
    for path in sorted(folder.iterdir()):
        message = unpack(load(path))
        if isinstance(message, Update):
            yield message


def fold(folder: Path) -> None:
    """Folds a spool and prints by how many MiB the resident memory grew at its peak."""
    import psutil

    process = psutil.Process()
    mean, base, peak = empty(), process.memory_info().rss, 0
    for one in spooled(folder):
        mean.add(one)
        peak = max(peak, process.memory_info().rss - base)
    print(f"{peak / 2**20:.1f}")


def main() -> None:
    """Prints two tables."""
    if len(sys.argv) > 1:
        fold(Path(sys.argv[1]))
        return
    torch.set_num_threads(1)
    updates = [update(seed) for seed in range(64)]
    times: dict[str, list[float]] = {}
    results = {}
    for _ in range(3):
        for name, merge in (("vectorised", vectorised), ("loop over classes", by_class)):
            began = time.perf_counter()
            results[name] = merge(updates)
            times.setdefault(name, []).append(time.perf_counter() - began)
    one, two = results.values()
    worst = max(float((one[k] - two[k]).abs().max()) for k in one)
    console = Console()
    console.print(
        f"64 sites x {OWNED} of {CLASSES} classes x {FEATURES} features, 1 torch thread, median of 3"
    )
    table = Table("merge", "seconds", box=None)
    for name, found in times.items():
        table.add_row(name, f"{statistics.median(found):.3f}")
    console.print(table)
    console.print(f"largest difference of the two: {worst:.1e}")
    memory = Table("sites", "memory while folding, MiB", box=None)
    for sites in (4, 16, 64):
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(sites):
                save(Path(folder) / f"{seed:03d}", pack(updates[seed]))
            done = subprocess.run(
                [sys.executable, __file__, folder], capture_output=True, text=True, check=True
            )
            memory.add_row(str(sites), done.stdout.strip())
    console.print(memory)


if __name__ == "__main__":
    main()
