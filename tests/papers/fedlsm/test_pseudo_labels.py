"""FedLSM's entropy, pseudo-labels and losses: by hand, and against its equations written out in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from suture_papers.fedlsm.mean_teacher import KINDS, Targets, Thresholds, mix

MULTI, SINGLE = KINDS["multilabel"], KINDS["multiclass"]
LIMITS = Thresholds(positive=0.85, negative=0.005, best=0.95)
T, F = True, False


def mask(rows: Sequence[Sequence[bool]]) -> Tensor:
    return torch.tensor(rows)


def test_entropy_of_several_labels_is_that_of_the_unknown_ones() -> None:
    p = torch.tensor([[0.9, 0.5, 0.25], [0.5, 0.1, 0.0]])
    known = mask([[T, F, F], [T, F, F]])
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    tenth = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9)) / math.log(2)
    assert MULTI.entropy(p, known, "paper").tolist() == pytest.approx([(1 + quarter) / 2, tenth / 2])


def test_where_nothing_is_unknown_every_class_counts() -> None:
    p = torch.tensor([[0.5, 0.5]])
    assert MULTI.entropy(p, mask([[T, T]]), "paper").item() == pytest.approx(1)


def test_entropy_of_the_program_lacks_a_term() -> None:
    p = torch.tensor([[0.9, 0.5, 0.25]])
    expected = -(0.5 * math.log(0.5) + 0.25 * math.log(0.25)) / 3
    assert MULTI.entropy(p, mask([[T, F, F]]), "program").item() == pytest.approx(expected)


def test_entropy_of_a_single_label() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    assert SINGLE.entropy(p, mask([[T, F, F]] * 2), "paper").tolist() == pytest.approx([1.5 * math.log(2), 0])


def test_pseudo_labels_of_several_labels() -> None:
    p = torch.tensor([[0.99, 0.85, 0.005, 0.5]])
    targets = MULTI.targets(p, torch.zeros(1, 4), mask([[T, F, F, F]]), LIMITS, "paper")
    assert targets.sure.tolist() == [[T, T, T, F]]
    assert targets.made.tolist() == [[F, T, T, F]]
    assert targets.y[0, :3].tolist() == [0, 1, 0]  # the label goes before what the teacher thinks
    assert targets.positives().tolist() == [[F, T, F, F]]


def test_pseudo_labels_of_a_single_label() -> None:
    """Labelled; unlabelled and sure; unlabelled and unsure; sure of a class that it is known not to be."""
    p = torch.tensor([[0.0, 0.97, 0.03], [0.01, 0.96, 0.03], [0.1, 0.5, 0.4], [0.96, 0.02, 0.02]])
    y = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    known = mask([[T, F, F]] * 4)
    targets = SINGLE.targets(p, y, known, LIMITS, "paper")
    assert targets.sure[:, 0].tolist() == [T, T, F, F]
    assert targets.made[:, 0].tolist() == [F, T, F, F]
    assert targets.y[:2].tolist() == [[1, 0, 0], [0, 1, 0]]
    program = SINGLE.targets(p, y, known, LIMITS, "program")
    assert program.made[:, 0].tolist() == [F, T, F, T]
    assert program.y[3].tolist() == [1, 0, 0]


def test_what_the_program_does_with_mixtures() -> None:
    p, known = torch.tensor([[0.5, 0.99, 0.6]]), mask([[T, F, F]])
    several = MULTI.targets(p, torch.ones(1, 3), known, LIMITS, "program", mixing=True)
    assert several.sure.tolist() == [[F, T, F]]
    assert several.y[0, 0] == 1
    p, y = torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    single = SINGLE.targets(p, y, mask([[T, F, F]] * 2), LIMITS, "program", mixing=True)
    assert single.sure[:, 0].tolist() == [T, F]


def test_a_mixture_is_taught_what_both_images_are() -> None:
    one = Targets(torch.tensor([[1.0, 0.0]]), mask([[T, T]]), mask([[F, F]]))
    other = Targets(torch.tensor([[0.0, 1.0]]), mask([[T, F]]), mask([[T, F]]))
    mixed = mix(one, other, 0.75)
    assert mixed.y.tolist() == [[0.75, 0.25]]
    assert mixed.sure.tolist() == [[T, F]]


def test_loss_of_several_labels_by_hand() -> None:
    """Two images, two classes: a positive of weight 3, a negative, a pseudo-positive, an unsure entry."""
    targets = Targets(torch.tensor([[1.0, 0.0], [0.3, 1.0]]), mask([[T, T], [F, T]]), mask([[F, F], [F, T]]))
    losses = MULTI.losses(torch.zeros(2, 2), targets.y, torch.tensor([3.0, 1.0]))
    total = torch.sum(losses * MULTI.weights(targets))
    assert float(total) == pytest.approx((3 + 1 + 1) * math.log(2) / 4)


def test_loss_of_a_single_label_by_hand() -> None:
    """Two labelled, one pseudo-labelled and two unsure images, of three classes all alike to the student."""
    targets = Targets(
        torch.eye(3)[[0, 1, 2, 0, 0]],
        mask([[x] * 3 for x in (T, T, T, F, F)]),
        mask([[x] * 3 for x in (F, F, T, F, F)]),
    )
    losses = SINGLE.losses(torch.zeros(5, 3), targets.y, None)
    total = torch.sum(losses * SINGLE.weights(targets))
    assert float(total) == pytest.approx((2 / 2 + 1 / 3) * math.log(3))


def entry(y: float, s: float, w: float) -> float:
    return -w * y * math.log(1 / (1 + math.exp(-s))) - (1 - y) * math.log(1 - 1 / (1 + math.exp(-s)))


def slow_multi(p: Any, s: Any, y: Any, known: Any, w: Any, limits: Thresholds) -> float:
    """L_I + L_U of Eq. 5, entry by entry."""
    total = 0.0
    for i in range(len(p)):
        for c in range(len(p[i])):
            if known[i][c]:
                total += entry(y[i][c], s[i][c], w[c])
            elif p[i][c] >= limits.positive:
                total += entry(1.0, s[i][c], w[c])
            elif p[i][c] <= limits.negative:
                total += entry(0.0, s[i][c], w[c])
    return total / (len(p) * len(p[0]))


def slow_single(p: Any, s: Any, y: Any, known: Any, limits: Thresholds) -> float:
    """L_I as cross-entropy of the labelled images, L_U as in Eq. 4 over the others."""
    labelled, others = [], []
    for i in range(len(p)):
        normaliser = math.log(sum(math.exp(v) for v in s[i]))
        log_p = [v - normaliser for v in s[i]]
        right = [c for c in range(len(p[i])) if known[i][c] and y[i][c] == 1]
        if right:
            labelled.append(-log_p[right[0]])
            continue
        unknown = [c for c in range(len(p[i])) if not known[i][c]]
        best = max(unknown, key=lambda c: p[i][c]) if unknown else None
        sure = best is not None and p[i][best] >= limits.best
        others.append(-log_p[best] if best is not None and sure else 0.0)
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    return mean(labelled) + mean(others)


@given(st.integers(0, 10**6))
def test_losses_are_those_of_the_equations(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    n, c = 7, 4
    s = torch.randn(n, c, generator=g, dtype=torch.float64) * 2
    known = torch.rand(c, generator=g).lt(0.5).expand(n, c)
    w = torch.rand(c, generator=g, dtype=torch.float64) * 5 + 0.1
    limits = Thresholds(0.7, 0.3, 0.5)

    p = torch.rand(n, c, generator=g, dtype=torch.float64)
    y = torch.rand(n, c, generator=g).lt(0.4).double()
    targets = MULTI.targets(p, y, known, limits, "paper")
    fast = torch.sum(MULTI.losses(s, targets.y, w) * MULTI.weights(targets))
    slow = slow_multi(p.tolist(), s.tolist(), y.tolist(), known.tolist(), w.tolist(), limits)
    assert float(fast) == pytest.approx(slow, rel=1e-6, abs=1e-7)

    p = torch.softmax(torch.randn(n, c, generator=g, dtype=torch.float64) * 2, dim=1)
    y = torch.eye(c, dtype=torch.float64)[torch.randint(0, c, (n,), generator=g)] * known
    targets = SINGLE.targets(p, y, known, limits, "paper")
    fast = torch.sum(SINGLE.losses(s, targets.y, None) * SINGLE.weights(targets))
    slow = slow_single(p.tolist(), s.tolist(), y.tolist(), known.tolist(), limits)
    assert float(fast) == pytest.approx(slow, rel=1e-6, abs=1e-7)


@given(st.integers(0, 10**6))
def test_entropy_lies_where_it_should(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    known = torch.rand(5, 6, generator=g).lt(0.5)
    p = torch.rand(5, 6, generator=g)
    several = MULTI.entropy(p, known, "paper")
    assert bool(((several >= 0) & (several <= 1 + 1e-6)).all())
    single = SINGLE.entropy(p / p.sum(dim=1, keepdim=True), known, "paper")
    assert bool(((single >= 0) & (single <= math.log(6) + 1e-6)).all())
