"""Training against a bare PyTorch loop, and how it is fed: `python benchmarks/training_throughput.py`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from suture.core.labels import LabelSet
from suture.data.augmentation import MILD, augment
from suture.data.batch import Batch, Samples, parts
from suture.data.prefetch import ahead
from suture.learning.losses import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known
from suture.models import ModelSpec, build
from suture.simulation.phantom import FINDINGS
from suture.simulation.phantom_scans import HOSPITALS, PhantomSpec, generate

REPEATS = 8
Step = Callable[[SiteContext, LocalTraining, int], None]
SPEC = ModelSpec("cnn", size=64)


def ours(site: SiteContext, local: LocalTraining, round_: int) -> None:
    """The training loop of a site."""
    fit(site, on_known(masked_bce), LocalRound(local, "average", 1, round_))


def bare(site: SiteContext, local: LocalTraining, round_: int) -> None:
    """What one would write by hand."""
    model, samples = site.model, site.samples["train"]
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=local.lr)
    shuffle, noise = torch.Generator().manual_seed(round_), torch.Generator().manual_seed(round_)
    for rows in torch.split(torch.randperm(len(samples), generator=shuffle), local.batch_size):
        image = augment(site.prepare(samples.inputs["image"].index_select(0, rows)), noise, MILD)
        y = samples.y[rows]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model({"image": image}), y)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def site_of(samples: Samples, prefetch: int = 2) -> SiteContext:
    """A site with the small network."""
    model = build(SPEC, LabelSet(FINDINGS), 1, pretrained=False)
    cpu, data = torch.device("cpu"), {"train": samples}
    return SiteContext("site", model, data, SPEC.preprocessing, MILD, cpu, prefetch=prefetch)  # type: ignore[arg-type]


def throughput(samples: Samples) -> Table:
    """Alternates the two loops; medians. CPU seconds are those of both threads."""
    columns = ("batch", "suture images/s", "bare images/s", "ratio", "its range", "ratio of CPU seconds")
    table = Table(*columns, box=None)
    clocks = (time.perf_counter, time.process_time)
    for size in (16, 32, 64):
        local, site = LocalTraining(lr=1e-3, batch_size=size), site_of(samples)
        times: dict[Step, list[list[float]]] = {ours: [], bare: []}
        for repeat in range(REPEATS + 1):
            # Whoever goes first takes turns, so that neither always follows the other.
            for step in (ours, bare) if repeat % 2 else (bare, ours):
                began = [clock() for clock in clocks]
                step(site, local, repeat)
                if repeat:  # the first one warms up
                    times[step].append([clock() - at for clock, at in zip(clocks, began, strict=True)])
        # Ratios of neighbours: what else the machine does weighs on both.
        wall, cpu = (
            [b[i] / a[i] for a, b in zip(times[ours], times[bare], strict=True)] for i in range(len(clocks))
        )
        speed = [f"{len(samples) / statistics.median(t[0] for t in found):.0f}" for found in times.values()]
        spread = f"{min(wall):.2f}-{max(wall):.2f}"
        table.add_row(
            str(size), *speed, f"{statistics.median(wall):.3f}", spread, f"{statistics.median(cpu):.3f}"
        )
    return table


def feeding(folder: Path) -> Table:
    """CPU time of both threads for each gray image of 224 px that leaves a memory map, without the model."""
    n, size, rng = 2048, 224, np.random.default_rng(1)
    np.save(folder / "images.npy", rng.integers(0, 256, (n, 1, size, size), dtype=np.uint8))
    images = torch.from_numpy(np.load(folder / "images.npy", mmap_mode="c"))
    samples = Samples({"image": images}, torch.zeros(n, len(FINDINGS)), tuple(map(str, range(n))))
    prepare = replace(SPEC, size=size).preprocessing
    table = Table("gather and hand over, batch 64", "CPU us an image", box=None)

    def microseconds(use: Callable[[Batch], Any], prefetch: int) -> str:
        found = []
        for repeat in range(REPEATS):
            order = torch.randperm(n, generator=torch.Generator().manual_seed(repeat))
            began = time.process_time()
            for batch in ahead(map(samples.batch, parts(order, 64)), prefetch):
                use(batch)
            found.append((time.process_time() - began) / n * 1e6)
        return f"{statistics.median(found):.1f} ({min(found):.1f}-{max(found):.1f})"

    for prefetch in (0, 2, 4):
        table.add_row(f"prefetch {prefetch}", microseconds(lambda batch: batch.to("cpu"), prefetch))
    table.add_row(
        "prefetch 2, normalised on the CPU", microseconds(lambda batch: prepare(batch.inputs["image"]), 2)
    )
    return table


class Slow(Samples):
    """Samples on a disk that takes its time."""

    seconds = 0.0

    def batch(self, rows: Tensor) -> Batch:
        """The batch of the given rows, later."""
        time.sleep(self.seconds)
        return super().batch(rows)


def hidden(samples: Samples) -> Table:
    """Steps whose batches take 0.8 of a step to read, read ahead or not."""
    local, slow = LocalTraining(lr=1e-3, batch_size=64), Slow(**vars(samples))
    table = Table("reading", "prefetch", "wall seconds an epoch", "ratio to no waiting", box=None)
    times: dict[tuple[bool, int], list[float]] = {(False, 0): [], (True, 0): [], (True, 2): []}
    for repeat in range(REPEATS + 1):
        for (late, prefetch), found in times.items():
            wait = 0.8 * statistics.median(times[False, 0]) / (len(samples) / 64) if repeat else 0.0
            Slow.seconds = wait if late else 0.0
            began = time.perf_counter()
            ours(site_of(slow, prefetch), local, repeat)
            if repeat or not late:
                found.append(time.perf_counter() - began)
    least = statistics.median(times[False, 0])
    for (late, prefetch), found in times.items():
        seconds = statistics.median(found)
        table.add_row(
            "slow" if late else "at once", str(prefetch), f"{seconds:.2f}", f"{seconds / least:.2f}"
        )
    return table


def host_reads(samples: Samples) -> str:
    """Numbers that Python reads back in a step; the optimiser's counter, on the CPU anywhere, is left out."""

    def reads(epochs: int) -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            ours(site_of(samples), LocalTraining(lr=1e-3, batch_size=64, epochs=epochs), 1)
        events = found.events()
        return (
            sum(e.name == "aten::_local_scalar_dense" and not in_optimiser(e) for e in events),
            sum(e.name.startswith("Optimizer.step") for e in events),
        )

    (one, steps), (two, more) = reads(1), reads(2)
    return f"host reads of {more - steps} more steps: {two - one} (profiler)"


def in_optimiser(event: Any) -> bool:
    """Whether an event of the profiler is part of an optimiser's step."""
    return event is not None and (event.name.startswith("Optimizer.step") or in_optimiser(event.cpu_parent))


def main() -> None:
    """Prints all tables."""
    torch.set_num_threads(1)
    images, y, patients = generate(HOSPITALS[0].scanner, 960, PhantomSpec(), seed=1)
    samples = Samples({"image": torch.from_numpy(images)[:, None]}, torch.from_numpy(y), patients)
    console = Console(width=110)
    console.print(f"{machine()}\n\nsmall CNN, 64 px, {len(samples)} images, median of {REPEATS}")
    console.print(throughput(samples))
    with tempfile.TemporaryDirectory() as folder:
        console.print("\n", feeding(Path(folder)))
    console.print("\n", hidden(samples))
    console.print(f"\n{host_reads(samples)}")


if __name__ == "__main__":
    main()
