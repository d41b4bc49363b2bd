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

from figures import Figure, Options, Target
from harness import in_turns

from parts.sites import random_site
from suture.core.labels import LabelSet
from suture.data.batch import Augmentation
from suture.learning.training import LocalTraining, SiteContext, predict
from suture.methods.base import Method, Phase, RoundContext, local_round
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.models.classifier import split_state
from suture.models.priors import PriorSpec, load_prior
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed
from suture_papers.fedmas.fedmas import FedMAS

LABELS = LabelSet(tuple(f"Class {i}" for i in range(8)), "multiclass")
IMAGES = 512
LOCAL = LocalTraining(lr=1e-3, batch_size=64)
SAME, PLAIN = (FedMAS(local=LOCAL, prior_view=view) for view in ("same", "plain"))
AUGMENTATION = Augmentation(flip=0.5, vertical_flip=0.5, rotation=10.0)
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


def epoch(site: SiteContext, method: Method, folder: Path) -> Callable[[], object]:
    """A round of one epoch, in a process that remembers nothing but what lies in a cache folder."""
    shared, head = split_state(site.model.state_dict())
    task = TaskData("train", 1, 0, labels=LABELS.names, shared=shared, head=head)
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
            held = load_prior(prior)
            spec = replace(model, projection=held.width)
            site = random_site(spec, LABELS, IMAGES, AUGMENTATION, prior=held)
            found = in_turns(options.repeats, works(site, Path(folder)))
        for view, parts in PARTS.items():
            sums = tuple(map(sum, zip(*(found[part].cpu for part in parts), strict=True)))
            row = (f"a round, {name}, {view}", "s of CPU", found[view].cpu, "sum of its parts", sums)
            rows.append(Figure("fedmas", *row, (Target("ratio", "≤", 1.05),)))
    return rows
