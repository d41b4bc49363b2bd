"""A local epoch of Fed-MAS against plain training of the same model on the same augmented batches.

python benchmarks/fedmas_epoch.py

Beyond plain training Fed-MAS measures the received model once (an evaluation), and its prior reads each
image: once in the life of a cache where it reads plain images, once an epoch where it reads augmented ones.
Seconds are the processor's, of one thread, which other programs on the machine disturb less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.allocator import keep_memory
from suture.core.labels import LabelSet
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples
from suture.data.table import Split
from suture.learning.training import LocalTraining, SiteContext, predict
from suture.methods.base import Method, Phase, RoundContext, local_round
from suture.methods.fedavg import FedAvg
from suture.methods.fedmas import FedMAS
from suture.models import ModelSpec, build
from suture.models.classifier import split_state
from suture.models.priors import PriorSpec, load_prior
from suture.protocol.messages import Payload
from suture.protocol.packing import Packed

LABELS = LabelSet(tuple(f"Class {i}" for i in range(8)), "multiclass")
IMAGES, REPEATS = 512, 5
LOCAL = LocalTraining(lr=1e-3, batch_size=64)
SAME, PLAIN = (FedMAS(local=LOCAL, prior_view=view) for view in ("same", "plain"))
CTX = RoundContext(1, Phase("main", 1), 0)


def site_of(model: ModelSpec, prior: PriorSpec) -> SiteContext:
    """A site of random images, one class each."""
    g = torch.Generator().manual_seed(0)
    shape = (IMAGES, 3 if model.color else 1, model.size, model.size)
    image = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    y = torch.nn.functional.one_hot(torch.randint(0, 8, (IMAGES,), generator=g), 8).float()
    samples: dict[Split, Samples] = {"train": Samples({"image": image}, y, tuple(map(str, range(IMAGES))))}
    held = load_prior(prior)
    network = build(replace(model, projection=held.width), LABELS, 1, pretrained=False)
    augmentation = Augmentation(flip=0.5, vertical_flip=0.5, rotation=10.0)
    return SiteContext(
        "site", network, samples, model.preprocessing, augmentation, torch.device("cpu"), prior=held
    )


def epoch(site: SiteContext, method: Method, folder: Path) -> Callable[[], object]:
    """A round of one epoch, in a process that remembers nothing but what lies in a cache folder."""
    shared, head = split_state(site.model.state_dict())
    task = Payload("train", 1, 0, labels=LABELS.names, shared=shared, head=head)
    own = replace(site, cache={}, cache_dir=folder)
    return lambda: method.train(own, task, local_round(method, own, Packed({}, {}), CTX))


def seconds(work: Callable[[], object]) -> float:
    """The processor's, for one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measured(site: SiteContext, folder: Path) -> dict[str, float]:
    """Seconds of each part, all of them once and one after the other."""
    prior, train = site.prior, site.samples["train"]
    assert prior is not None
    cold = folder / f"cold-{time.monotonic_ns()}"
    return {
        "plain training": seconds(epoch(site, FedAvg(local=LOCAL, softmax="balanced"), folder)),
        "evaluation": seconds(lambda: predict(site, train)),
        "prior, one pass": seconds(lambda: [prior.features(b.inputs["image"]) for b in train.batches(64)]),
        "same, warm": seconds(epoch(site, SAME, folder / "warm")),
        "plain, cold": seconds(epoch(site, PLAIN, cold)),
        "plain, warm": seconds(epoch(site, PLAIN, cold)),
    }


def main() -> None:
    """Prints medians, and what is left when all parts that are to be expected are taken off."""
    torch.set_num_threads(1)
    keep_memory()  # as in the processes that Suture starts
    table = Table("model, prior", box=None)
    rows: list[list[str | float]] = []
    for model, prior in (
        (ModelSpec("cnn", size=64), PriorSpec("phantoms")),
        (ModelSpec("resnet_small", size=64, color=True), PriorSpec("efficientnet_lite0", size=96)),
    ):
        site = site_of(model, prior)
        with tempfile.TemporaryDirectory() as folder:
            epoch(site, SAME, Path(folder) / "warm")()
            found = [measured(site, Path(folder)) for _ in range(REPEATS)]
        each = {name: statistics.median(times[name] for times in found) for name in found[0]}
        base = each["plain training"] + each["evaluation"]
        expected = base + each["prior, one pass"]
        ratios = (each["same, warm"] / expected, each["plain, cold"] / expected, each["plain, warm"] / base)
        where = site.prior.preprocessing.size if site.prior else 0
        rows.append([f"{model.name}, {prior.name} at {where} px", *each.values(), *ratios])
        names = list(each)
    for name in (*(f"{n}, s" for n in names), "same / parts", "cold / parts", "warm / parts"):
        table.add_column(name)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row))
    console = Console(width=200)
    console.print(machine())
    console.print(table)


if __name__ == "__main__":
    main()
