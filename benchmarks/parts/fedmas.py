"""A local epoch of Fed-MAS against plain training of the same model on the same augmented batches.

Beyond plain training Fed-MAS measures the received model once (an evaluation), and its prior reads each
image: once in the life of a cache where it reads plain images, once an epoch where it reads augmented ones.
Seconds are the processor's, of one thread, which other programs on the machine disturb less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from figures import Figure, Options, Target, in_turns

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
IMAGES = 512
LOCAL = LocalTraining(lr=1e-3, batch_size=64)
SAME, PLAIN = (FedMAS(local=LOCAL, prior_view=view) for view in ("same", "plain"))
CTX = RoundContext(1, Phase("main", 1), 0)
CASES = {
    "gray": (ModelSpec("cnn", size=64), PriorSpec("phantoms")),
    "colour": (
        ModelSpec("resnet_small", size=64, color=True),
        PriorSpec("efficientnet_lite0", size=96),
    ),
}
PARTS = {
    "same view": ("training", "evaluation", "prior"),
    "plain view, cold": ("training", "evaluation", "prior"),
    "plain view, warm": ("training", "evaluation"),
}
"""Of a round of Fed-MAS: plain training, an evaluation and, unless it is cached, a pass of the prior."""


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


def works(site: SiteContext, folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """The rounds of Fed-MAS and their parts; a cold round finds an empty cache."""
    prior, train = site.prior, site.samples["train"]
    assert prior is not None
    epoch(site, SAME, folder / "same")()
    epoch(site, PLAIN, folder / "plain")()
    plain_training = FedAvg(local=LOCAL, softmax="balanced")
    return {
        "training": lambda: epoch(site, plain_training, folder),
        "evaluation": lambda: partial(predict, site, train),
        "prior": lambda: lambda: [prior.features(b.inputs["image"]) for b in train.batches(64)],
        "same view": lambda: epoch(site, SAME, folder / "same"),
        "plain view, cold": lambda: epoch(site, PLAIN, folder / f"cold-{time.monotonic_ns()}"),
        "plain view, warm": lambda: epoch(site, PLAIN, folder / "plain"),
    }


def figures(options: Options) -> list[Figure]:
    """A round with either view, beside the sum of its parts."""
    rows = []
    for name, (model, prior) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = in_turns(options.repeats, works(site_of(model, prior), Path(folder)))
        for view, parts in PARTS.items():
            sums = tuple(map(sum, zip(*(found[part].cpu for part in parts), strict=True)))
            row = (f"a round, {name}, {view}", "s of CPU", tuple(found[view].cpu), "sum of its parts", sums)
            rows.append(Figure("fedmas", *row, (Target("ratio", "≤", 1.05),)))
    return rows
