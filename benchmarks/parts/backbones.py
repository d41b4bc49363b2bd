"""Images a second of CPU time of each backbone, in training and evaluation, against bare PyTorch.

Suture computes as a site does: its training loop, its batch of evaluation, uint8 images. Bare PyTorch has
the same weights, float images at hand, channels last in memory and the same setting of the allocator; it
trains in the same batches, and its evaluation has the best of three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from figures import Figure, Options
from harness import in_turns

from parts.sites import bare_step, random_site
from suture.core.labels import LabelSet
from suture.learning.steps import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, predict
from suture.models import ModelSpec

CASES = (
    ("cnn", 64, 1024),
    ("resnet_small", 64, 512),
    ("efficientnet_lite0", 96, 128),
    ("resnet18", 224, 40),
    ("densenet121", 224, 40),
)
"""Backbone, side of its images, and their number."""

LABELS = LabelSet(tuple("abcdefghijklmn"))
SIZES = (16, 32, 256)
"""Of the batches of bare PyTorch's evaluation."""


def of_suture(site: SiteContext, batch: int) -> dict[str, Callable[[], object]]:
    """A site's evaluation and an epoch of its training."""
    local = LocalTraining(lr=1e-4, batch_size=batch)
    return {
        "training": lambda: fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1)),
        "evaluation": lambda: predict(site, site.samples["test"]),
    }


def of_torch(site: SiteContext, batch: int) -> dict[str, Callable[[], object]]:
    """The same by hand; an evaluation in batches of each of `SIZES`."""
    model, samples, order = site.model, site.samples["train"], torch.channels_last
    for module in model.modules():
        module._forward_pre_hooks.clear()
    images = site.prepare(samples.inputs["image"]).contiguous(memory_format=order)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

    @torch.no_grad()
    def evaluate(size: int) -> None:
        model.eval()
        for part in torch.split(images, size):
            model({"image": part})

    def train() -> None:
        model.train()
        for rows in torch.split(torch.randperm(len(images)), batch):
            x = images[rows].contiguous(memory_format=order)
            bare_step(model, optimiser, x, samples.y[rows])

    return {f"evaluation {size}": partial(evaluate, size) for size in SIZES} | {"training": train}


def measured(name: str, side: int, images: int, repeats: int) -> list[Figure]:
    """A row of each work of a site, beside the fastest of bare PyTorch whose name begins like its own."""
    batch = 16 if side > 64 else 64
    ours, theirs = (random_site(ModelSpec(name, size=side), LABELS, images) for _ in range(2))
    own, bare = of_suture(ours, batch), of_torch(theirs, batch)
    both = {f"suture {work}": do for work, do in own.items()} | bare
    times = in_turns(repeats, {work: partial(lambda do: do, do) for work, do in both.items()})
    speed = {work: found.per(images).cpu for work, found in times.items()}
    figures = []
    for work in own:
        best = max((speed[key] for key in bare if key.startswith(work)), key=statistics.median)
        row = (f"{name}, {side} px, {work}", "images/s of CPU", speed[f"suture {work}"], "bare PyTorch", best)
        figures.append(Figure("backbones", *row))
    return figures


def figures(options: Options) -> list[Figure]:
    """Two rows of each backbone."""
    found = []
    for name, side, images in CASES:
        found += measured(name, side, images // 4 if options.quick else images, options.runs)
    return found
