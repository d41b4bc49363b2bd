"""FedRS: restricted logits by hand, where it is FedAvg, and the losses written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from federated import LOCAL, ROUND, at_site, federated, moved, objective_of, random_batch, same
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet, LabelType
from suture.learning.training import SiteContext
from suture.methods.composed import CrossEntropy
from suture.methods.fedavg import FedAvg
from suture_papers.missing_labels.fedrs import FedRS, Restricted, Restricting
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

THREE = ("A", "B", "C")


def site_of(label_type: LabelType, counts: tuple[int, ...], identified: tuple[bool, ...]) -> SiteContext:
    """A site that annotates some of three classes, with so many training images of each."""
    site, _ = at_site(FedAvg(local=LOCAL), label_type)
    site.model.labels = LabelSet(THREE, label_type)
    y = torch.cat([torch.eye(3)[[c] * n] for c, n in enumerate(counts)])
    y[:, ~torch.tensor(identified)] = torch.nan
    train = replace(site.samples["train"], y=y)
    return replace(site, samples={"train": train}, identified=torch.tensor(identified))


def loss_of(restricted: Restricted, site: SiteContext, logits: Tensor, y: list[float]) -> Tensor:
    _, received = at_site(FedAvg(local=LOCAL))
    loss = Restricting(restricted, CrossEntropy()).of(site, received, ROUND)
    return loss(logits, torch.tensor([y], dtype=torch.float64), torch.ones(1, len(y), dtype=torch.bool))


@pytest.mark.parametrize(
    ("restricted", "expected"),
    [
        (Restricted(0.5), 0.680270),  # logits (2, 1, 1.5)
        (Restricted(0.5, graded=True), 0.616875),  # logits (2, .6, 1.5)
    ],
)
@pytest.mark.parametrize("annotated", [False, True])
def test_the_softmax_by_hand(restricted: Restricted, expected: float, annotated: bool) -> None:
    """Class C has no image, whether the site annotates it or not; z = (2, 1, 3), y = A."""
    site = site_of("multiclass", (10, 2, 0), (True, True, annotated))
    z = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    assert loss_of(restricted, site, z, [1, 0, 0]).item() == pytest.approx(expected, abs=1e-6)


def test_several_labels_by_hand() -> None:
    """z = 3, y = 0, not annotated: ln(1 + e^1.5) and .5 sigma(1.5), in place of 3.048587 and .952574.

    An annotated class without a positive is not restricted: that it is absent is known.
    """
    site = site_of("multilabel", (10, 0, 0), (True, True, False))
    z = torch.tensor([[0.0, 3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    loss_of(Restricted(0.5), site, z, [0, 0, 0]).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert (3 * z.grad[0]).tolist() == pytest.approx([0.5, 0.952574, 0.408787], abs=1e-6)
    apart = torch.tensor([[-1e9, -1e9, 3.0]], dtype=torch.float64)
    assert 3 * loss_of(Restricted(0.5), site, apart, [0, 0, 0]).item() == pytest.approx(1.701413, abs=1e-6)


@pytest.mark.parametrize(
    ("label_type", "graded", "settings"),
    [
        ("multilabel", False, {"class_weights": "known"}),
        ("multilabel", True, {"class_weights": "none", "rows": "owners"}),
        ("multiclass", False, {"softmax": "balanced"}),
        ("multiclass", True, {}),
    ],
)
def test_without_a_restriction_it_is_fedavg(
    label_type: LabelType, graded: bool, settings: dict[str, Any]
) -> None:
    """Class weights included: they are of the loss, and a_c of its logits."""
    plain = federated(FedAvg(local=LOCAL, **settings), label_type)
    free = FedRS(local=LOCAL, restricted=Restricted(1.0, graded=graded), **settings)
    assert same(federated(free, label_type), plain)
    restricted = FedRS(local=LOCAL, restricted=Restricted(0.5, graded=graded), **settings)
    assert not same(federated(restricted, label_type), plain)


def graded_share(site: SiteContext, c: int) -> float:
    counts = [float(torch.nan_to_num(column).sum()) for column in site.samples["train"].y.T]
    return counts[c] / max(counts)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_loss_is_that_of_equation_8(label_type: LabelType, graded: bool) -> None:
    """Image by image and class by class; with several labels, with the class weights that the server sent."""
    method = FedRS(local=LOCAL, restricted=Restricted(0.3, graded=graded))
    site, task = at_site(method, label_type)
    objective = objective_of(method, site, task)
    moved(site.model)
    site.model.eval()
    batch = random_batch(9, len(task.labels), label_type)
    z = site.model(batch.inputs).tolist()
    assert site.identified is not None
    a = []
    for c in range(len(task.labels)):
        has = graded_share(site, c) > 0 if label_type == "multiclass" else bool(site.identified[c])
        a.append(0.3 + 0.7 * graded_share(site, c) if graded else (1.0 if has else 0.3))
    assert min(a) < 1 == max(a)
    total, counted = 0.0, 0
    for row, labels in zip(z, batch.y.tolist(), strict=True):
        if label_type == "multiclass":
            if sum(labels):
                exponentials = [math.exp(factor * score) for factor, score in zip(a, row, strict=True)]
                total -= math.log(exponentials[labels.index(1)] / sum(exponentials))
                counted += 1
            continue
        for c, label in enumerate(labels):
            p = 1 / (1 + math.exp(-a[c] * row[c]))
            w = task.channels["positive_weight"][c].item()
            total -= w * label * math.log(p) + (1 - label) * math.log(1 - p)
            counted += 1
    assert objective(batch).item() == pytest.approx(total / counted, abs=1e-10)


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_restriction_is_of_training_alone(label_type: LabelType) -> None:
    answers = []
    for method in (FedRS(local=LOCAL, restricted=Restricted(0.1)), FedAvg(local=LOCAL)):
        with Trial(method, SMALL, label_type) as trial:
            answers.append(trial.update("alpha"))
    restricted, plain = answers
    assert restricted.metrics is not None
    assert restricted.metrics == plain.metrics
    assert restricted.train_loss != plain.train_loss


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"label_view": "own"}, r"Restricted restricts how .*; set method\.label_view=all"),
        ({"unknown": "masked"}, r"Restricted restricts how .*; set method\.unknown=negative"),
    ],
)
def test_where_there_is_nothing_to_restrict_it_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedRS(**settings)


def test_factors_outside_of_0_and_1_are_refused() -> None:
    for alpha in (-0.1, 1.1):
        with pytest.raises(ValueError, match="equal to"):
            Restricted(alpha)
