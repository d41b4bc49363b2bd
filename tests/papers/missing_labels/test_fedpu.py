"""FedPU: the numbers by hand, where it is FedAvg, and a slow transcription."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from federated import LOCAL, ROUND, federated, same
from one_step import site_of, step_of
from suture.core.errors import ConfigError
from suture.data.batch import Batch
from suture.methods.composed import Step
from suture.methods.fedavg import FedAvg
from suture.protocol.messages import TaskData
from suture_papers.missing_labels.fedpu import FedPU, PositiveUnlabelled, unlabelled_risk
from suture_synthetic import trial

P = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]], dtype=torch.float64)
"""Two labelled images, of classes 0 and 1, and two unlabelled ones; the site annotates classes 0 and 1."""
Y = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
OWN = [True, True, False]
NO_RECEIVED: Any = TaskData


def pu_step(z: Tensor, received: Tensor, y: Tensor, known: Tensor) -> Step:
    """A step whose batch has the numbers of the images that the term asks for."""
    step = step_of(z, received, y, known)
    inputs = {**step.batch.inputs, **PositiveUnlabelled().rows(step.batch)}
    return replace(step, batch=replace(step.batch, inputs=inputs))


def risk(pi: Tensor, rho: float) -> float:
    """That of `P` and `Y`."""
    images = PositiveUnlabelled().rows(Batch({}, Y, torch.ones(4, 3).bool()))
    return unlabelled_risk(P, Y, images, torch.tensor([0, 1]), torch.tensor([2]), pi, rho).item()


def loss_of(method: FedPU, step: Step, own: list[bool], y: Tensor) -> float:
    """CE(P) + lambda [...] of one step, at a site whose training labels are y."""
    site = site_of("multiclass", own, y)
    supervised = method.supervised.of(site, NO_RECEIVED, ROUND)
    value = sum(term.begin(site, ROUND)(step) for term in method.terms if term.active)
    return float(supervised(step.logits, step.batch.y, step.batch.known) + value)


def test_the_default_by_hand() -> None:
    """CE (.356675 + .510826) / 2 = .433750.

    Unlabelled: of class 0 (.223144 + .105361) / 2, of class 1 (.356675 + .105361) / 2, in the mean .197635.
    """
    step = pu_step(P.log(), P, Y, torch.ones(4, 3).bool())
    assert loss_of(FedPU(positive_unlabelled=PositiveUnlabelled(weight=0)), step, OWN, Y) == pytest.approx(
        0.433750, abs=1e-6
    )
    assert risk(torch.zeros(3), 0.0) == pytest.approx(0.197635, abs=5e-6)
    assert loss_of(FedPU(), step, OWN, Y) == pytest.approx(0.631385, abs=5e-6)


def test_priors_by_hand() -> None:
    """pi = (.5, .25), rho = .375: .631385 + .375 * .105361 - (.5 * 1.203973 + .25 * .916291) / 2."""
    pi = torch.tensor([0.5, 0.25, 0])
    assert 0.433750 + risk(pi, 0.375) == pytest.approx(0.255366, abs=5e-6)


def test_one_prior_is_that_of_each_class_and_of_rho() -> None:
    """prior = .25: .631385 + .25 * .105361 - .25 (1.203973 + .916291) / 2 = .392692."""
    step = pu_step(P.log(), P, Y, torch.ones(4, 3).bool())
    method = FedPU(positive_unlabelled=PositiveUnlabelled(prior=0.25))
    assert loss_of(method, step, OWN, Y) == pytest.approx(0.392692, abs=5e-6)


@pytest.mark.complete
def test_without_weight_it_is_fedavg() -> None:
    plain = federated(FedAvg(local=LOCAL), "multiclass")
    none = FedPU(local=LOCAL, positive_unlabelled=PositiveUnlabelled(weight=0, prior=0.2))
    assert same(federated(none, "multiclass"), plain)
    assert not same(federated(FedPU(local=LOCAL), "multiclass"), plain)


@pytest.mark.complete
def test_without_unlabelled_images_it_is_fedavg(monkeypatch: Any) -> None:
    """Bit for bit the cross-entropy of all classes, whatever the prior: it is a share of no image."""
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    one = FedPU(local=LOCAL, positive_unlabelled=PositiveUnlabelled(prior=0.2))
    assert same(federated(one, "multiclass"), federated(FedAvg(local=LOCAL), "multiclass"))


def slow(z: Tensor, y: Tensor, own: list[bool], weight: float, prior: float) -> float:
    """The equation of the module, image by image and class by class."""
    labelled, unlabelled, ce = [], [], 0.0
    for i in range(len(z)):
        e = [math.exp(float(x)) for x in z[i]]
        p = [x / sum(e) for x in e]
        truth = [c for c in range(len(p)) if y[i, c] == 1]
        if truth:
            ce -= math.log(p[truth[0]])
            labelled.append((p, truth[0]))
        else:
            unlabelled.append(p)
    if not unlabelled:
        return ce / len(labelled)

    def wrong(p: list[float], c: int) -> float:
        return -math.log(1 - p[c] + 1e-6)

    mine = [c for c, annotated in enumerate(own) if annotated]
    others = [c for c, annotated in enumerate(own) if not annotated]
    total = sum(wrong(p, c) for p in unlabelled for c in mine) / len(unlabelled) / len(mine)
    if labelled and others:
        total += prior * sum(wrong(p, c) for p, _ in labelled for c in others) / len(labelled) / len(others)
    if labelled:
        total -= sum(prior * wrong(p, c) for p, c in labelled) / len(labelled)
    return ce / max(len(labelled), 1) + weight * total


@given(
    seed=st.integers(0, 10**6),
    own=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
    prior=st.sampled_from([0.0, 0.2]),
    labels=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_it_is_the_slow_transcription(
    seed: int, own: list[bool], weight: float, prior: float, labels: list[int]
) -> None:
    """Also of batches without a labelled image, or without another one."""
    z = 2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double()
    known = torch.tensor(own).expand(6, 4)
    y = torch.eye(5).double()[labels][:, :4] * known
    method = FedPU(positive_unlabelled=PositiveUnlabelled(weight=weight, prior=prior))
    step = pu_step(z, z, y, torch.ones(6, 4).bool())
    expected = slow(z, y, own, weight, prior)
    assert loss_of(method, step, own, y) == pytest.approx(expected, abs=1e-10)


def test_an_unlabelled_image_moves_away_from_the_sites_classes() -> None:
    """Along the gradient its own classes become less likely, and no label of another class is needed."""
    z = torch.zeros(1, 3, requires_grad=True)
    site = site_of("multiclass", OWN, torch.zeros(1, 3))
    value = PositiveUnlabelled().begin(site, ROUND)
    value(pu_step(z, z, torch.zeros(1, 3), torch.ones(1, 3).bool())).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert [g > 0 for g in z.grad[0].tolist()] == OWN


def test_an_unknown_label_counts_as_none() -> None:
    """Whatever stands at a label that the site does not know of its own classes."""
    known = torch.tensor([[True, True, True], [False, False, True]])
    losses = [
        loss_of(
            FedPU(positive_unlabelled=PositiveUnlabelled(prior=0.3)),
            pu_step(P[:2].log(), P[:2], torch.tensor([[1.0, 0, 0], [hidden, 0, 0]]), known),
            OWN,
            torch.tensor([[1.0, 0, 0], [math.nan, math.nan, 0]]),
        )
        for hidden in (0.0, 1.0)
    ]
    assert losses[0] == losses[1]
    assert losses[0] > 0


def test_more_priors_than_images_are_refused() -> None:
    site = site_of("multiclass", OWN, Y)
    site.name = "alpha"
    with pytest.raises(ConfigError, match=r"alpha annotates 2 classes, .* lower it to 0.500 or less"):
        PositiveUnlabelled(prior=0.6).begin(site, ROUND)


@pytest.mark.parametrize("other", [{"unknown": "masked"}, {"label_view": "own"}])
def test_labels_that_it_cannot_use_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="PositiveUnlabelled compares the classes that the site annotates"):
        FedPU(**other)


def test_it_takes_one_label_an_image_alone() -> None:
    assert FedPU().labels.types == ("multiclass",)
