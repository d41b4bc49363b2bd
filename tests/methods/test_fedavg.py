"""FedAvg by numbers of images, by owners, and with balanced softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rounds import context_of, train_round
from suture.core.labels import LabelSet
from suture.federation.server.global_model import initial
from suture.learning.losses import balanced_ce
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.fedavg import FedAvg
from suture.protocol.messages import TaskData, Update

CTX = RoundContext(1, Phase("main", 1), 0)
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")
LOCAL = LocalTraining(lr=1e-2, batch_size=64)


def bench_of(tiny: Any) -> tuple[SiteContext, TaskData]:
    site = tiny(FedAvg(local=LOCAL)).sites()["alpha"]
    model = initial(site.plan, EVERY)
    task = TaskData(
        "train",
        1,
        0,
        labels=EVERY,
        shared=dict(model.shared),
        head=dict(model.head),
        channels={"positive_weight": torch.ones(len(EVERY))},
    )
    return context_of(site, task), task


def test_sites_count_with_their_images() -> None:
    """(1 x 3 + 99 x 5) / 100 = 4.98."""
    before = GlobalModel(("A",), {"w": torch.zeros(1)}, {"head.bias": torch.zeros(1)})
    updates = [
        Update(
            1,
            ("A",),
            {"w": torch.tensor([x])},
            {"head.bias": torch.tensor([x])},
            torch.tensor([n]).double(),
            n,
        )
        for x, n in ((3.0, 1.0), (5.0, 99.0))
    ]
    after = FedAvg().aggregate(before, updates, CTX)
    assert after.shared["w"].item() == pytest.approx(4.98)
    assert after.head["head.bias"].item() == pytest.approx(4.98)


def test_rows_of_all_or_of_their_owners(tiny: Any) -> None:
    context, task = bench_of(tiny)
    every, _ = train_round(FedAvg(local=LOCAL), context, task, CTX)
    owners, _ = train_round(FedAvg(local=LOCAL, rows="owners"), context, task, CTX)
    assert every.weight == owners.weight == 15
    assert every.class_weights.tolist() == [15] * 4
    assert owners.class_weights.tolist() == [0, 0, 15, 15]


def test_class_weights_reach_the_loss(tiny: Any) -> None:
    """One step on the whole of the data: the weights of positives change what is sent."""
    context, task = bench_of(tiny)
    heavy = replace(task, channels={"positive_weight": torch.full((4,), 50.0)})
    plain, _ = train_round(FedAvg(local=LOCAL), context, task, CTX)
    weighted, _ = train_round(FedAvg(local=LOCAL), context, heavy, CTX)
    assert plain.train_loss is not None
    assert weighted.train_loss is not None
    assert weighted.train_loss > 5 * plain.train_loss


def test_balanced_softmax_takes_the_sites_own_counts(tiny: Any) -> None:
    context, task = bench_of(tiny)
    context.model.labels = LabelSet(EVERY, "multiclass")
    train = context.samples["train"]
    y = torch.eye(4)[torch.tensor([0] * 12 + [1] * 3)]
    one = replace(context, samples={"train": replace(train, y=y)})
    with torch.no_grad():
        logits = context.model.train()({"image": context.prepare(train.inputs["image"])})
    expected = balanced_ce(logits, y, torch.ones(15, 4, dtype=torch.bool), torch.tensor([12.0, 3, 0, 0]))
    context, task = bench_of(tiny)
    context.model.labels = LabelSet(EVERY, "multiclass")
    one = replace(context, samples={"train": replace(train, y=y)})
    done, _ = train_round(FedAvg(local=LOCAL, softmax="balanced"), one, task, CTX)
    assert done.train_loss == pytest.approx(float(expected), rel=1e-5)
