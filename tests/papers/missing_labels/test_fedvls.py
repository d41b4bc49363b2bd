"""FedVLS: the numbers by hand, what it reduces to, and a slow transcription."""

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
from suture.federation.server.checks import check_label_type
from suture.methods.fedavg import FedAvg
from suture_papers.missing_labels.fedvls import FedVLS, LogitSuppression, VacantDistillation, suppress
from suture_synthetic import trial

NONE: Any = None
EVERY = [True] * 4


def loss_of(weight: float, counts: Tensor, z: Tensor, y: Tensor) -> float:
    """The supervised loss at a site whose training images have these counts."""
    site = site_of("multiclass", EVERY, torch.eye(4).repeat_interleave(counts, dim=0))
    loss = LogitSuppression(weight).of(site, NONE, ROUND)
    return loss(z, y, torch.ones_like(y).bool()).item()


def test_the_example() -> None:
    """pi = (.75, .25, 0, 0): CE .115671, KL .2732085, and of two images S = -.001520."""
    counts, z = torch.tensor([3, 1, 0, 0]), torch.tensor([[1.0, 0, 2, -1], [0, 1, 0, 0]])
    y = torch.eye(4)[:2]
    assert loss_of(0, counts, z[:1], y[:1]) == pytest.approx(0.115671, abs=1e-6)
    assert 0.005 * suppress(z, y, counts / 4).item() == pytest.approx(-0.001520, abs=1e-6)
    assert loss_of(0.005, counts, z, y) - loss_of(0, counts, z, y) == pytest.approx(-0.001520, abs=1e-6)
    site = site_of("multiclass", EVERY, torch.eye(4)[[0, 0, 0, 1]])
    step = step_of(z[:1], torch.tensor([[0.0, 0, 1, 0]]), y[:1], torch.ones(1, 4).bool())
    divergence = VacantDistillation().begin(site, ROUND)(step)
    assert divergence.item() == pytest.approx(0.2732085, abs=1e-6)


def test_the_image_of_a_class_enters_its_sum_as_one() -> None:
    """One image of each class: ln((1 + e^a) / 2), a = 2 - ln .5 + ln .5 for class 0, and -1 for class 1."""
    y, prior = torch.eye(2), torch.tensor([0.5, 0.5])
    z = torch.tensor([[5.0, -1], [2, 7]])
    expected = 0.5 * math.log((1 + math.exp(2)) / 2) + 0.5 * math.log((1 + math.exp(-1)) / 2)
    assert suppress(z, y, prior).item() == pytest.approx(expected, abs=1e-6)


def full(monkeypatch: Any) -> None:
    """Sites that annotate every class, and have images of each."""
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    for site in trial.SITES:
        assert (trial._samples(site, "multiclass")[1]["train"].y.sum(dim=0) > 0).all()


@pytest.mark.complete
def test_with_images_of_every_class_nothing_is_distilled(monkeypatch: Any) -> None:
    """And without suppression it is FedAvg with balanced softmax: e does not show beside a share."""
    full(monkeypatch)
    one = federated(FedVLS(local=LOCAL), "multiclass")
    assert same(one, federated(FedVLS(local=LOCAL, vacant=VacantDistillation(weight=0)), "multiclass"))
    plain = federated(FedVLS(local=LOCAL, suppression=LogitSuppression(weight=0)), "multiclass")
    assert same(plain, federated(FedAvg(local=LOCAL, softmax="balanced"), "multiclass"))
    assert not same(one, plain)


@pytest.mark.complete
def test_both_parts_have_an_effect() -> None:
    method = FedVLS(local=LOCAL)
    one = federated(method, "multiclass")
    assert not same(one, federated(replace(method, vacant=VacantDistillation(weight=0)), "multiclass"))
    other = replace(method, suppression=LogitSuppression(weight=0))
    assert not same(one, federated(other, "multiclass"))


def slow(z: Tensor, received: Tensor, y: Tensor, counts: Tensor, s: float, weight: float) -> float:
    """The equations of the module, image by image and class by class."""
    n, m = z.shape
    prior = [float(c) / max(int(counts.sum()), 1) for c in counts]
    labelled = [i for i in range(n) if any(y[i] == 1)]
    loss = 0.0
    for i in labelled:
        adjusted = [float(z[i, c]) + math.log(prior[c] + 1e-9) for c in range(m)]
        loss += math.log(sum(map(math.exp, adjusted))) - adjusted[int(y[i].argmax())]
    loss /= max(len(labelled), 1)
    for c in range(m):
        total = 0.0
        for i in labelled:
            a = 0.0 if y[i, c] == 1 else float(z[i, c]) - math.log(prior[c] + 1e-9) + math.log(1 / m + 1e-9)
            total += math.exp(a)
        if labelled:
            loss += s * prior[c] * (math.log(total) - math.log(len(labelled)))
    vacant = [c for c in range(m) if counts[c] == 0]
    for i in range(n):
        q, p = ({c: math.exp(float(x[i, c])) for c in vacant} for x in (received, z))
        for c in vacant:
            share = q[c] / sum(q.values())
            loss += weight * share * math.log(share / (p[c] / sum(p.values()))) / n
    return loss


@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 40]), min_size=4, max_size=4),
    s=st.sampled_from([0.0, 0.005, 1.0]),
)
def test_it_is_the_slow_transcription(seed: int, counts: list[int], s: float) -> None:
    g = torch.Generator().manual_seed(seed)
    z, received = (2 * torch.randn(6, 4, generator=g).double() for _ in range(2))
    has = torch.tensor(counts)
    # An image of a class that the site has no image of in training is one without a label here.
    y = torch.eye(4).double()[torch.randint(0, 4, (6,), generator=g)] * (has > 0)
    train = torch.cat([torch.eye(4).double().repeat_interleave(has, dim=0), y[y.sum(dim=1) == 0]])
    site, known = site_of("multiclass", EVERY, train), torch.ones(6, 4).bool()
    supervised = LogitSuppression(s).of(site, NONE, ROUND)(z, y, known)
    distilled = VacantDistillation(0.7).begin(site, ROUND)(step_of(z, received, y, known))
    expected = slow(z, received, y, has, s, 0.7)
    assert (supervised + distilled).item() == pytest.approx(expected, abs=1e-10)


def test_a_batch_without_labels_has_no_supervised_loss() -> None:
    z = torch.randn(3, 4, requires_grad=True)
    site = site_of("multiclass", EVERY, torch.zeros(5, 4))
    loss = LogitSuppression().of(site, NONE, ROUND)(z, torch.zeros(3, 4), torch.ones(3, 4).bool())
    (gradient,) = torch.autograd.grad(loss, z)
    assert (loss.item(), gradient.abs().sum().item()) == (0, 0)


def test_what_it_is_not_defined_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedVLS .*several labels an image"):
        check_label_type(FedVLS(), "multilabel")
    with pytest.raises(ConfigError, match=r"LogitSuppression .*set method\.softmax"):
        FedVLS(softmax="balanced")
    with pytest.raises(ConfigError, match="VacantDistillation keeps what the received model knows"):
        FedVLS(label_view="own")
