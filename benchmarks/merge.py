"""Merging many sites and classes: `python benchmarks/merge.py`.

Time of the weighted mean against a Python loop over classes, and the server's peak memory while it takes
updates in, keeps them (128 MiB in memory, the others on disk) and folds them, for more and more sites. The
memory is read from Linux's /proc.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from suture.federation.server.collector import UpdateCollector
from suture.methods.averaging import WeightedMean
from suture.protocol.check import Expectation
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update, ones
from suture.protocol.packing import pack

CLASSES, FEATURES, OWNED, SHARED = 1000, 1024, 300, 10_000
NAMES = tuple(f"Class {i:04d}" for i in range(CLASSES))
# glibc keeps freed blocks that it may use again, so resident memory also grows with how scattered they are;
# with this it hands each one of 64 KiB or more back, and what is left is what the server holds.
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
EGRESS = Egress(
    {"w": ((SHARED,), "torch.float32")},
    {"head.weight": ((FEATURES,), "torch.float32"), "head.bias": ((), "torch.float32")},
)


def update(seed: int) -> Update:
    """A site that knows 300 of the 1,000 classes."""
    g = torch.Generator().manual_seed(seed)
    labels = tuple(NAMES[i] for i in torch.randperm(CLASSES, generator=g)[:OWNED].tolist())
    head = {
        "head.weight": torch.randn(OWNED, FEATURES, generator=g),
        "head.bias": torch.randn(OWNED, generator=g),
    }
    return Update(1, labels, {"w": torch.randn(SHARED, generator=g)}, head, ones(labels))


def vectorised(updates: Iterable[Update]) -> dict[str, Tensor]:
    """The product's mean."""
    head = {"head.weight": torch.zeros(CLASSES, FEATURES), "head.bias": torch.zeros(CLASSES)}
    mean = WeightedMean(NAMES, {"w": torch.zeros(SHARED)}, head)
    for one in updates:
        mean.add(one)
    return mean.shared() | mean.head()


def by_class(updates: Iterable[Update]) -> dict[str, Tensor]:
    """The algorithm as the paper prints it: for each class, the mean over the clients that have it."""
    held = list(updates)
    rows = [{name: i for i, name in enumerate(one.labels)} for one in held]
    merged = {
        "w": torch.stack([one.shared["w"].double() for one in held]).mean(0).float(),
        "head.weight": torch.zeros(CLASSES, FEATURES),
        "head.bias": torch.zeros(CLASSES),
    }
    for c, name in enumerate(NAMES):
        owners = [(one, where[name]) for one, where in zip(held, rows, strict=True) if name in where]
        for key in ("head.weight", "head.bias"):
            if owners:
                merged[key][c] = torch.stack([one.head[key][i].double() for one, i in owners]).mean(0)
    return merged


def memory(line: str) -> float:
    """A line of this process's memory in MiB: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) / 1024 for text in status if text.startswith(f"{line}:"))


def serve(sites: int, spool: Path) -> None:
    """Takes in, spools and folds the updates of a round; prints what that added to resident memory."""
    torch.set_num_threads(1)
    collector = UpdateCollector(spool, lambda *_, **__: None)
    vectorised([update(0)])  # what the first call allocates for good is not counted
    names = {f"site-{i:02d}": update(i).labels for i in range(sites)}
    collector.open(
        {s: (Payload("train"), Expectation("train", 1, 0, "", own, own, EGRESS)) for s, own in names.items()}
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    for i, site in enumerate(names):
        collector.receive(site, pack(update(i)))
    collector.close({})
    if len(collector.accepted()) != sites:
        raise SystemExit(f"{len(collector.accepted())} of {sites} updates were accepted")
    vectorised(one for _, one in collector.updates())
    print(f"{memory('VmHWM') - before:.1f}")


def added(sites: int, environment: dict[str, str]) -> str:
    """What `serve` prints, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(sites), str(Path(folder) / "spool")]
        done = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout.strip()


def timed() -> Table:
    """The two ways of merging, alternated.

    Raises:
        AssertionError: their results differ.
    """
    updates = [update(seed) for seed in range(64)]
    times: dict[str, list[float]] = {"vectorised": [], "loop over classes": []}
    results = {}
    for _ in range(5):
        for name, aggregate in zip(times, (vectorised, by_class), strict=True):
            began = time.perf_counter()
            results[name] = aggregate(updates)
            times[name].append(time.perf_counter() - began)
    torch.testing.assert_close(*results.values(), rtol=1e-6, atol=1e-6)
    table = Table("merge", "seconds", "range", box=None)
    for name, found in times.items():
        table.add_row(name, f"{statistics.median(found):.3f}", f"{min(found):.3f}-{max(found):.3f}")
    return table


def main() -> None:
    """Prints two tables."""
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), Path(sys.argv[2]))
        return
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print(machine())
    console.print(
        f"\n64 sites x {OWNED} of {CLASSES} classes x {FEATURES} features; median of 5, equal to 1e-6"
    )
    console.print(timed())
    console.print(f"\nan update is {pack(update(0)).nbytes / 2**20:.1f} MiB")
    table = Table("sites", "memory added at the peak, MiB", "same, large blocks given back at once", box=None)
    for sites in (4, 64, 256):
        table.add_row(str(sites), added(sites, {}), added(sites, _GIVEN_BACK))
    console.print(table)


if __name__ == "__main__":
    main()
