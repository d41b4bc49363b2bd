"""Mask first, then reduce."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from suture.learning.steps import masked_bce, masked_ce, masked_loss, probabilities


def test_everything_unknown_is_zero_with_a_gradient_of_zero() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    loss = masked_bce(logits, torch.full((3, 2), float("nan")), torch.zeros(3, 2, dtype=torch.bool))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum().item() == 0


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_what_stands_at_an_unknown_entry_changes_nothing(seed: int, share: float) -> None:
    g = torch.Generator().manual_seed(seed)
    known = torch.rand(4, 3, generator=g) < share
    y = torch.randint(0, 2, (4, 3), generator=g).float()
    results = []
    for labels in (y, torch.where(known, y, 1 - y), torch.where(known, y, float("nan"))):
        logits = torch.linspace(-2, 2, 12).view(4, 3).requires_grad_()
        masked_bce(logits, labels, known).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert bool((logits.grad[~known] == 0).all())
        results.append(logits.grad)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_cross_entropy_leaves_out_rows_of_no_known_class() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0], [1.0, 2.0, 3.0]])
    known = torch.tensor([[True, True, False], [True, True, False]])
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # the second row: none of my classes
    assert masked_ce(logits, y, known).item() == pytest.approx(math.log(2), abs=1e-6)
    assert masked_ce(logits, torch.zeros(2, 3), known).item() == 0


def test_cross_entropy_sends_no_gradient_to_an_unknown_class() -> None:
    known = torch.tensor([[True, True, False], [True, True, True]])
    grads = []
    for unknown in (0.0, 1.0, float("nan")):
        logits = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 0.0]], requires_grad=True)
        masked_ce(logits, torch.tensor([[1.0, 0.0, unknown], [0.0, 0.0, 1.0]]), known).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        grads.append(logits.grad)
    assert grads[0][0, 2].item() == 0
    # (softmax - y) / 2 rows; the second row's softmax is a third each
    torch.testing.assert_close(grads[0][1], torch.tensor([1 / 6, 1 / 6, -1 / 3]))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_the_loss_is_that_of_the_task() -> None:
    logits, y = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[1.0, 0.0]])
    known = torch.ones(1, 2, dtype=torch.bool)
    # -ln .5 and -ln(1 - .75), each class by itself; -ln(1 / 4), against the other
    expected = (math.log(2) + math.log(4)) / 2
    assert masked_loss(logits, y, known, "multilabel").item() == pytest.approx(expected, abs=1e-6)
    assert masked_loss(logits, y, known, "multiclass").item() == pytest.approx(math.log(4), abs=1e-6)
    first = torch.tensor([[True, False]])  # a class alone has nothing to compete with
    assert masked_loss(logits, y, first, "multilabel").item() == pytest.approx(math.log(2), abs=1e-6)
    assert masked_loss(logits, y, first, "multiclass").item() == 0


def test_probabilities_are_those_of_the_task() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [math.log(9), math.log(9)]])
    torch.testing.assert_close(probabilities(logits, "multilabel"), torch.tensor([[0.5, 0.75], [0.9, 0.9]]))
    torch.testing.assert_close(probabilities(logits, "multiclass"), torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
