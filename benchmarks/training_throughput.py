"""Training at a site against a bare PyTorch loop: `python benchmarks/training_throughput.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.labels import LabelSet
from suture.data.augmentation import MILD, augment
from suture.data.batch import Samples
from suture.learning.losses import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known
from suture.models import ModelSpec, build
from suture.simulation.phantom import FINDINGS
from suture.simulation.phantom_hospitals import HOSPITALS, PhantomSpec, generate

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
        image = augment(site.prepare(samples.inputs["image"][rows]), noise, MILD)
        y = samples.y[rows]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model({"image": image}), y)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def main() -> None:
    """Alternates the two and prints medians."""
    torch.set_num_threads(1)
    images, y, patients = generate(HOSPITALS[0].scanner, 960, PhantomSpec(), seed=1)
    samples = Samples({"image": torch.from_numpy(images)[:, None]}, torch.from_numpy(y), patients)
    table = Table("batch", "suture images/s", "bare images/s", "ratio", "range of ratios", box=None)
    for size in (16, 32, 64):
        local = LocalTraining(lr=1e-3, batch_size=size)
        model = build(SPEC, LabelSet(FINDINGS), 1, pretrained=False)
        site = SiteContext("site", model, {"train": samples}, SPEC.preprocessing, MILD, torch.device("cpu"))
        times: dict[Step, list[float]] = {ours: [], bare: []}
        for repeat in range(REPEATS + 1):
            # Whoever goes first takes turns, so that neither always follows the other.
            for step in (ours, bare) if repeat % 2 else (bare, ours):
                began = time.perf_counter()
                step(site, local, repeat)
                if repeat:  # the first one warms up
                    times[step].append(time.perf_counter() - began)
        # Ratios of neighbours: what else the machine does weighs on both.
        ratios = [b / a for a, b in zip(times[ours], times[bare], strict=True)]
        speed = [f"{len(samples) / statistics.median(found):.0f}" for found in times.values()]
        table.add_row(
            str(size), *speed, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}-{max(ratios):.3f}"
        )
    Console(width=110).print(f"{machine()}\n\nsmall CNN, 64 px, {len(samples)} images, median of {REPEATS}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
