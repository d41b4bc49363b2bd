"""A site's training against a bare PyTorch loop on the same batches, and what feeding it costs and hides."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figure, Options, Target
from harness import in_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parts.sites import bare_step
from suture.core.labels import LabelSet
from suture.data.batch import MILD, Batch, Samples, augment, parts
from suture.learning.steps import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, prefetch
from suture.models import ModelSpec, build
from suture_synthetic.phantom import FINDINGS
from suture_synthetic.phantom_scans import HOSPITALS, Order, PhantomSpec

SPEC = ModelSpec("cnn", size=64)


def ours(site: SiteContext, local: LocalTraining) -> None:
    """The training loop of a site."""
    fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1))


def bare(site: SiteContext, local: LocalTraining) -> None:
    """What one would write by hand."""
    model, samples = site.model, site.samples["train"]
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=local.lr)
    shuffle, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for rows in torch.split(torch.randperm(len(samples), generator=shuffle), local.batch_size):
        image = augment(site.prepare(samples.inputs["image"].index_select(0, rows)), noise, MILD)
        bare_step(model, optimiser, image, samples.y[rows])


def site_of(samples: Samples, prefetch: int = 2) -> SiteContext:
    """A site with the small network."""
    model = build(SPEC, LabelSet(FINDINGS), 1, pretrained=False)
    cpu, data = torch.device("cpu"), {"train": samples}
    return SiteContext("site", model, data, SPEC.preprocessing, MILD, cpu, prefetch=prefetch)  # type: ignore[arg-type]


def throughput(samples: Samples, repeats: int) -> list[Figure]:
    """Images a second of the two loops, by the clock and of the processor, of both threads."""
    rows = []
    for size in (16, 32, 64):
        local, site = LocalTraining(lr=1e-3, batch_size=size), site_of(samples)
        works = {step.__name__: partial(partial, step, site, local) for step in (ours, bare)}
        found = {name: times.per(len(samples)) for name, times in in_turns(repeats, works).items()}
        (clock, cpu), (bare_clock, bare_cpu) = ((found[name].clock, found[name].cpu) for name in works)
        name, least = f"training in batches of {size}", (Target("ratio", "≥", 0.97),)
        rows += [
            Figure("training", name, "images/s", clock, "bare PyTorch", bare_clock),
            Figure("training", name, "images/s of CPU", cpu, "bare PyTorch", bare_cpu, least),
        ]
    return rows


def feeding(folder: Path, repeats: int) -> list[Figure]:
    """CPU time of both threads for each gray image of 224 px that leaves a memory map, without the model."""
    n, size, rng = 2048, 224, np.random.default_rng(1)
    np.save(folder / "images.npy", rng.integers(0, 256, (n, 1, size, size), dtype=np.uint8))
    images = torch.from_numpy(np.load(folder / "images.npy", mmap_mode="c"))
    samples = Samples({"image": images}, torch.zeros(n, len(FINDINGS)), tuple(map(str, range(n))))
    prepare = replace(SPEC, size=size).preprocessing
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))

    def hand_over(batch: Batch) -> object:
        return batch.to("cpu")

    def normalise(batch: Batch) -> object:
        return prepare(batch.inputs["image"])

    def feed(use: Callable[[Batch], object], count: int) -> None:
        for batch in prefetch(map(samples.batch, parts(order, 64)), count):
            use(batch)

    def index() -> None:
        for rows in torch.split(order, 64):
            images.index_select(0, rows)

    works = {
        "alone": index,
        "to gather an image of 224 px": partial(feed, hand_over, 0),
        "through the thread that reads ahead": partial(feed, hand_over, 2),
        "and normalised on the CPU": partial(feed, normalise, 2),
    }
    found = in_turns(repeats, {name: partial(lambda work: work, work) for name, work in works.items()})
    us = {name: times.times(1e6 / n).cpu for name, times in found.items()}
    # Of gathering and handing over; where there is a GPU, it normalises.
    most = {name: (Target("figure", "≤", 60),) for name in list(works)[1:3]}
    return [
        Figure("training", name, "us of CPU", us[name], "index_select", us["alone"], most.get(name, ()))
        for name in list(works)[1:]
    ]


class Slow(Samples):
    """Samples on a disk that takes its time."""

    seconds = 0.0

    def batch(self, rows: Tensor) -> Batch:
        """The batch of the given rows, later."""
        time.sleep(self.seconds)
        return super().batch(rows)


def hidden(samples: Samples, repeats: int) -> list[Figure]:
    """Epochs whose batches take 0.8 of a step to read, read ahead or not."""
    local, slow = LocalTraining(lr=1e-3, batch_size=64), Slow(**vars(samples))
    steps = len(samples) / local.batch_size

    def prepare(wait: float, prefetch: int) -> Callable[[], object]:
        Slow.seconds = wait
        return partial(ours, site_of(slow, prefetch), local)

    at_once = partial(prepare, 0.0, 0)
    step = statistics.median(in_turns(2, {"": at_once})[""].clock) / steps
    works = {"at once": at_once} | {str(n): partial(prepare, 0.8 * step, n) for n in (0, 2)}
    found = {name: times.clock for name, times in in_turns(repeats, works).items()}
    return [
        Figure("training", f"an epoch, slow reader, prefetch {n}", "s", found[n], "no wait", found["at once"])
        for n in ("0", "2")
    ]


def host_reads(samples: Samples) -> Figure:
    """Numbers that Python reads back in a step; the optimiser's counter, on the CPU anywhere, is left out."""

    def reads(epochs: int) -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            ours(site_of(samples), LocalTraining(lr=1e-3, batch_size=64, epochs=epochs))
        events = found.events()
        return (
            sum(e.name == "aten::_local_scalar_dense" and not in_optimiser(e) for e in events),
            sum(e.name.startswith("Optimizer.step") for e in events),
        )

    (one, steps), (two, more) = reads(1), reads(2)
    each = ((two - one) / (more - steps),)
    return Figure("training", "host reads of a step", "reads", each, targets=(Target("figure", "≤", 0),))


def in_optimiser(event: Any) -> bool:
    """Whether an event of the profiler is part of an optimiser's step."""
    return event is not None and (event.name.startswith("Optimizer.step") or in_optimiser(event.cpu_parent))


def figures(options: Options) -> list[Figure]:
    """All of them, with a small CNN at 64 px."""
    n = 320 if options.quick else 960
    images, y, patients = Order(HOSPITALS[0].scanner, n, PhantomSpec(), seed=1).draw()
    samples = Samples({"image": torch.from_numpy(images)[:, None]}, torch.from_numpy(y), patients)
    with tempfile.TemporaryDirectory() as folder:
        fed = feeding(Path(folder), options.repeats)
    return [
        *throughput(samples, options.repeats),
        *fed,
        *hidden(samples, options.repeats),
        host_reads(samples),
    ]
