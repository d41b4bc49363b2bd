"""Images a second of each backbone against bare PyTorch: `python benchmarks/backbones.py`.

On one thread; images per second of CPU time, medians of repeats that alternate between the three columns,
each of which has a process of its own. Suture computes as a site does: its training loop, its batch of
evaluation, uint8 images. Bare PyTorch has the same weights, float images at hand, channels last in memory and
the same setting of the allocator; it trains in the same batches, and its evaluation has the best of three.
`plain` is PyTorch as one would first write it: contiguous images, the C library's own thresholds, and an
evaluation in batches of 256, or in one of all images (there are 40 of 224 px).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.allocator import keep_memory
from suture.core.labels import LabelSet
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples
from suture.data.table import Split
from suture.learning.losses import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, predict
from suture.models import ModelSpec, build

CASES = (
    ("cnn", 64, 1024),
    ("resnet_small", 64, 512),
    ("efficientnet_lite0", 96, 128),
    ("resnet18", 224, 40),
    ("densenet121", 224, 40),
)
"""Backbone, side of its images, and their number."""

LABELS = LabelSet(tuple("abcdefghijklmn"))
WAYS = ("suture", "bare", "plain")
Work = Callable[[], object]


def site_of(name: str, size: int, images: int) -> SiteContext:
    """A site with random images and labels."""
    torch.manual_seed(1)
    spec = ModelSpec(name, size=size)
    shape = (images, 3 if spec.color else 1, size, size)
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    y = torch.randint(0, 2, (images, len(LABELS))).float()
    samples = Samples({"image": image}, y, tuple(map(str, range(images))))
    model = build(spec, LABELS, 1, pretrained=False)
    splits: dict[Split, Samples] = {"train": samples, "test": samples}
    return SiteContext("site", model, splits, spec.preprocessing, Augmentation(), torch.device("cpu"))


def of_suture(site: SiteContext, batch: int) -> dict[str, Work]:
    """A site's evaluation and an epoch of its training."""
    local = LocalTraining(lr=1e-4, batch_size=batch)
    return {
        "evaluation": lambda: predict(site, site.samples["test"]),
        "training": lambda: fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1)),
    }


def of_torch(
    site: SiteContext, batch: int, order: torch.memory_format, sizes: tuple[int, ...]
) -> dict[str, Work]:
    """The same by hand; an evaluation in batches of each size."""
    model, samples = site.model, site.samples["train"]
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
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model({"image": x}), samples.y[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return {f"evaluation {size}": lambda size=size: evaluate(size) for size in sizes} | {"training": train}


def serve(way: str, name: str, size: int, images: int) -> None:
    """Do each piece of work that is asked for on a line, and answer with its seconds of CPU time."""
    torch.set_num_threads(1)
    site, batch = site_of(name, size, images), 16 if size > 64 else 64
    if way != "plain":
        keep_memory()
    if way == "suture":
        works = of_suture(site, batch)
    elif way == "bare":
        works = of_torch(site, batch, torch.channels_last, (16, 32, 256))
    else:
        works = of_torch(site, batch, torch.contiguous_format, (256,))
    print(*works, sep=",", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        works[line.strip()]()
        print(time.process_time() - began, flush=True)


def measured(name: str, size: int, images: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the median images a second of each way and work; the first round warms up."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    servers, works = {}, {}
    for way in WAYS:
        command = [sys.executable, __file__, "--serve", way, name, str(size), str(images)]
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert server.stdin
        assert server.stdout
        servers[way] = (server.stdin, server.stdout)
        works[way] = server.stdout.readline().strip().split(",")
    taken: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 1):
        for way, (ask, answer) in servers.items():
            for work in works[way]:
                ask.write(f"{work}\n")
                seconds = float(answer.readline())
                if repeat:
                    taken.setdefault((way, work), []).append(images / seconds)
    for ask, _ in servers.values():
        ask.close()
    return {way: {work: statistics.median(taken[way, work]) for work in works[way]} for way in WAYS}


def main() -> None:
    """Prints a row for each backbone and each of evaluation and training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", nargs=4, metavar=("WAY", "NAME", "SIZE", "IMAGES"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        way, name, size, images = chosen.serve
        serve(way, name, int(size), int(images))
        return
    table = Table("backbone", "pixels", "work", "suture", "bare", "plain", "of bare", "of plain", box=None)
    for name, side, images in CASES:
        found = measured(name, side, images, chosen.repeats)
        for work in ("evaluation", "training"):
            best = {way: max(v for key, v in of.items() if key.startswith(work)) for way, of in found.items()}
            speed = [f"{best[way]:.1f}" for way in WAYS]
            ratios = [f"{best['suture'] / best[way]:.2f}" for way in WAYS[1:]]
            table.add_row(name, str(side), work, *speed, *ratios)
    console = Console(width=110)
    console.print(f"{machine()}\n\nimages per second of CPU time, median of {chosen.repeats}")
    console.print(table)


if __name__ == "__main__":
    main()
