"""The focal loss: by hand, where it is FedAvg, and Eq. 4 written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federated import LOCAL, at_site, federated, moved, objective_of, random_batch, same
from suture.core.errors import ConfigError
from suture.methods.fedavg import FedAvg
from suture_papers.rare_classes.focal import Focal, FocalFedAvg, focal_ce

ALL_KNOWN = torch.ones(2, 2, dtype=torch.bool)
FIRST = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)


def test_the_focal_loss_by_hand() -> None:
    """p_y = .5 and .9, gamma = 2: (.25 x .693147 + .01 x .105361) / 2 = .087170."""
    logits = torch.tensor([[0.0, 0.0], [math.log(9), 0.0]], dtype=torch.float64)
    assert focal_ce(logits, FIRST, ALL_KNOWN, 2.0).item() == pytest.approx(0.087170, abs=1e-6)
    assert focal_ce(logits, FIRST, ALL_KNOWN, 0.0).item() == pytest.approx(0.399254, abs=1e-6)


@pytest.mark.complete
def test_with_gamma_0_it_is_fedavg() -> None:
    plain = federated(FedAvg(local=LOCAL), "multiclass")
    assert same(federated(FocalFedAvg(local=LOCAL, focal=Focal(0)), "multiclass"), plain)
    assert not same(federated(FocalFedAvg(local=LOCAL), "multiclass"), plain)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_loss_is_equation_4(gamma: float) -> None:
    """Image by image; the images of none of the classes are left out."""
    method = FocalFedAvg(local=LOCAL, focal=Focal(gamma))
    site, task = at_site(method, "multiclass")
    objective = objective_of(method, site, task)
    moved(site.model)
    site.model.eval()
    batch = random_batch(12, len(task.labels), "multiclass")
    total, images = 0.0, 0
    for row, labels in zip(site.model(batch.inputs).tolist(), batch.y.tolist(), strict=True):
        if sum(labels):
            p = math.exp(row[labels.index(1)]) / sum(math.exp(score) for score in row)
            total += -((1 - p) ** gamma) * math.log(p)
            images += 1
    assert images < len(batch)
    assert objective(batch).item() == pytest.approx(total / images, abs=1e-10)


@given(st.floats(-200, 200, width=32), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 5.0]))
def test_the_gradient_is_a_number_however_sure_the_model_is(score: float, gamma: float) -> None:
    """At p = 1 in single precision, a power below 1 would have an infinite slope."""
    logits = torch.tensor([[score, 0.0], [0.0, score]], requires_grad=True)
    loss = focal_ce(logits, FIRST.float(), ALL_KNOWN, gamma)
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(loss.item())
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_a_batch_without_a_label_teaches_nothing() -> None:
    logits = torch.zeros(2, 2, requires_grad=True)
    focal_ce(logits, torch.zeros(2, 2), ALL_KNOWN, 0.5).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0], [0, 0]]


def test_what_it_is_not_defined_for_is_refused() -> None:
    assert FocalFedAvg().labels.types == ("multiclass",)
    with pytest.raises(ConfigError, match=r"method\.softmax=balanced: .*; set method\.softmax=plain"):
        FocalFedAvg(softmax="balanced")
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Focal(-1.0)
