"""Confident pseudo-labels: the examples by hand, and a slow transcription."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture_papers.missing_labels.confident import (
    Thresholds,
    multilabel_targets,
    pseudo_loss,
    unknown_entries,
)


def batch(y: list[list[float]], known: list[list[int]]) -> Batch:
    return Batch({}, torch.tensor(y), torch.tensor(known).bool())


def test_the_multilabel_example() -> None:
    """p .9 teaches 1, .5 nothing, .002 teaches 0: (.313262 + .126928) / 3."""
    p, z, unknown = torch.tensor([[0.9, 0.5, 0.002]]), torch.tensor([[1.0, 0, -2]]), torch.ones(1, 3).bool()
    targets, kept = multilabel_targets(p, unknown)
    assert targets[kept].tolist() == [1, 0]
    assert kept.tolist() == [[True, False, True]]
    assert pseudo_loss(p, z, unknown, "multilabel", Thresholds()).item() == pytest.approx(0.146730, abs=1e-6)


def test_the_single_label_example() -> None:
    """Of two unlabelled images one is sure, of class 2: .407606 / 2."""
    p = torch.tensor([[0.01, 0.02, 0.97], [0.9, 0.05, 0.05]])
    z = torch.tensor([[0.0, 1, 2], [0, 1, 2]])
    loss = pseudo_loss(p, z, torch.ones(2, 3).bool(), "multiclass", Thresholds())
    assert loss.item() == pytest.approx(0.203803, abs=1e-6)


def test_what_pseudo_labels_may_be_of() -> None:
    """Entries without a label; with one label an image, every class of an image of no known class."""
    some = batch([[1, 0, 0], [0, 0, 0]], [[1, 1, 0], [1, 1, 0]])
    assert unknown_entries(some, "multilabel").tolist() == [[False, False, True]] * 2
    assert unknown_entries(some, "multiclass").tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_where_all_is_known_there_is_no_loss_and_no_gradient(label_type: LabelType) -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    loss = pseudo_loss(torch.ones(2, 3), z, torch.zeros(2, 3).bool(), label_type, Thresholds())
    (gradient,) = torch.autograd.grad(loss, z)
    assert (loss.item(), gradient.abs().sum().item()) == (0, 0)


def slow(p: Tensor, z: Tensor, unknown: Tensor, label_type: LabelType, how: Thresholds) -> float:
    """The equations of the module, image by image and class by class."""
    total, count = 0.0, 0
    for i in range(len(p)):
        if label_type == "multilabel":
            for c in range(p.shape[1]):
                if not unknown[i, c]:
                    continue
                count += 1
                q = 1 / (1 + math.exp(-float(z[i, c])))
                if p[i, c] >= how.positive:
                    total -= math.log(q)
                elif p[i, c] <= how.negative:
                    total -= math.log(1 - q)
        elif any(unknown[i]):
            count += 1
            best = max((c for c in range(p.shape[1]) if unknown[i, c]), key=lambda c: float(p[i, c]))
            if p[i, best] >= how.best:
                total += math.log(sum(math.exp(float(x)) for x in z[i])) - float(z[i, best])
    return total / max(count, 1)


@given(seed=st.integers(0, 10**6), label_type=st.sampled_from(["multilabel", "multiclass"]))
def test_it_is_the_slow_transcription(seed: int, label_type: LabelType) -> None:
    g = torch.Generator().manual_seed(seed)
    p, z = torch.rand(6, 4, generator=g).double(), 3 * torch.randn(6, 4, generator=g).double()
    unknown, how = torch.rand(6, 4, generator=g) < 0.6, Thresholds(positive=0.6, negative=0.3, best=0.7)
    expected = slow(p, z, unknown, label_type, how)
    assert pseudo_loss(p, z, unknown, label_type, how).item() == pytest.approx(expected, abs=1e-10)


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"negative .* is not below positive"):
        Thresholds(positive=0.2, negative=0.3)
