"""Losses for rare classes, of FedLC, of FocalFedAvg and of LDAM-FL: by hand, and written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from federated import LOCAL, ROUND, at_site, moved, objective_of, random_batch
from one_step import site_of
from suture.core.labels import LabelSet
from suture.learning.steps import masked_ce
from suture.learning.training import Loss
from suture.methods.composed import Supervised
from suture.models import build
from suture.protocol.messages import TaskData
from suture_papers.rare_classes.fedlc import Calibrated, calibration, ce_against_others
from suture_papers.rare_classes.focal import Focal, FocalFedAvg, focal_ce
from suture_papers.rare_classes.ldam import LDAM, LabelDistributionMargin, effective_weights, margins
from suture_synthetic.method_checks import SMALL


def loss_of(part: Supervised, counts: list[int], phase_round: int = 1) -> Loss:
    """The part's loss at a site with these images, in a round of ten."""
    y = torch.eye(len(counts)).repeat_interleave(torch.tensor(counts), dim=0)
    site = site_of("multiclass", [True] * len(counts), y)
    nothing: Any = TaskData
    return part.of(site, nothing, replace(ROUND, phase_round=phase_round, phase_rounds=10))


# FedLC


def test_fedlc_by_hand() -> None:
    """n = (16, 1, 0) at tau .5 takes .25, .5 and 50 from the logits (1, 2, 0)."""
    offsets = calibration(torch.tensor([16, 1, 0]), 0.5)
    torch.testing.assert_close(offsets, torch.tensor([0.25, 0.5, 50.0], dtype=torch.float64))
    z, known = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    for truth, keep, paper in ((0, 1.136871, 0.75), (1, 0.386871, -0.75)):
        y = torch.eye(3, dtype=torch.float64)[[truth]]
        assert masked_ce(z - offsets, y, known).item() == pytest.approx(keep, abs=1e-6)
        assert ce_against_others(z - offsets, y, known).item() == pytest.approx(paper, abs=1e-6)


def slow_fedlc(z: Tensor, y: Tensor, known: Tensor, counts: list[int], tau: float, keep: bool) -> float:
    """The paper's equation, image by image and class by class."""
    total, images = 0.0, 0
    for i in range(len(z)):
        seen = [c for c in range(len(counts)) if known[i, c]]
        truth = [c for c in seen if y[i, c] == 1]
        others = [c for c in seen if keep or c not in truth]
        if not truth or (len(seen) < 2 and not keep):
            continue
        a = {c: float(z[i, c]) - tau * max(counts[c], 1e-8) ** -0.25 for c in seen}
        total += -math.log(math.exp(a[truth[0]]) / sum(math.exp(a[c]) for c in others))
        images += 1
    return total / max(images, 1)


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any),
    st.floats(0, 2),
    st.sampled_from(("keep", "paper")),
    st.sampled_from((1.0, 0.7)),
    st.integers(0, 99),
)
def test_the_loss_of_fedlc_is_the_papers(
    counts: list[int], tau: float, denominator: Literal["keep", "paper"], share: float, seed: int
) -> None:
    part = Calibrated(tau=tau, denominator=denominator)
    g = torch.Generator().manual_seed(seed)
    y = torch.eye(len(counts), dtype=torch.float64)[[c for c, n in enumerate(counts) for _ in range(n)]]
    z, known = (
        torch.randn(y.shape, generator=g, dtype=torch.float64),
        torch.rand(y.shape, generator=g) < share,
    )
    expected = slow_fedlc(z, y, known, counts, tau, denominator == "keep")
    assert loss_of(part, counts)(z, y, known).item() == pytest.approx(expected, abs=1e-10)


def test_large_logits_of_the_papers_denominator_stay_finite() -> None:
    """An exponential of 1,000 would overflow."""
    z = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    value = ce_against_others(z, torch.eye(3)[[1]], torch.ones(1, 3, dtype=torch.bool))
    assert value.item() == 2000
    value.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad.tolist() == [[1, -1, 0]]


@pytest.mark.parametrize("known", [[[True, False, False]], [[False, True, True]]])
def test_a_row_of_one_known_class_or_of_none_teaches_nothing(known: list[list[bool]]) -> None:
    z = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    value = ce_against_others(z, torch.tensor([[1.0, 0, 0]]), torch.tensor(known))
    (gradient,) = torch.autograd.grad(value, z)
    assert (value.item(), gradient.tolist()) == (0, [[0, 0, 0]])


# The focal loss

ALL_KNOWN = torch.ones(2, 2, dtype=torch.bool)
FIRST = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)


def test_the_focal_loss_by_hand() -> None:
    """p_y = .5 and .9, gamma = 2: (.25 x .693147 + .01 x .105361) / 2 = .087170."""
    logits = torch.tensor([[0.0, 0.0], [math.log(9), 0.0]], dtype=torch.float64)
    assert focal_ce(logits, FIRST, ALL_KNOWN, 2.0).item() == pytest.approx(0.087170, abs=1e-6)
    assert focal_ce(logits, FIRST, ALL_KNOWN, 0.0).item() == pytest.approx(0.399254, abs=1e-6)


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


# LDAM


def test_ldam_by_hand() -> None:
    """n = (16, 81, 0): margins .5, 1/3 and 0; cosines (.2, .5, -.1) cost 24.0 and 1.313352."""
    counts = torch.tensor([16, 81, 0]).double()
    expected = torch.tensor([0.5, 1 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(margins(counts, 0.5), expected)
    late = torch.tensor([1.669207, 0.330793, 0.0], dtype=torch.float64)
    torch.testing.assert_close(effective_weights(counts, 0.9999), late, atol=1e-6, rtol=0)
    s, known = torch.tensor([[0.2, 0.5, -0.1]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    y = torch.eye(3, dtype=torch.float64)
    early = loss_of(LabelDistributionMargin(), [16, 81, 0])
    assert early(30 * s, y[:1], known).item() == pytest.approx(24.0, abs=1e-6)
    assert early(30 * s, y[1:2], known).item() == pytest.approx(1.313352, abs=1e-6)
    both = (30 * s.repeat(2, 1), y[:2], known.repeat(2, 1))
    assert early(*both).item() == pytest.approx((24.0 + 1.313352) / 2, abs=1e-6)
    deferred = loss_of(LabelDistributionMargin(), [16, 81, 0], 9)
    assert deferred(*both).item() == pytest.approx(20.247713, abs=1e-6)


@pytest.mark.parametrize(
    ("start", "rounds", "late"),
    [
        (0.8, 1, [1]),
        (0.8, 2, [2]),
        (0.8, 5, [5]),
        (0.8, 10, [9, 10]),
        (0.8, 200, list(range(161, 201))),
        (0.29, 100, list(range(30, 101))),  # .29 x 100 is 28.999... in binary
        (1, 10, []),
    ],
)
def test_the_switch_is_at_four_fifths_of_the_phase(start: float, rounds: int, late: list[int]) -> None:
    """r >= floor(.8 R) with r from 0; a phase of one round has floor(.8) = 0, and weighs from its start."""
    part, round_ = LabelDistributionMargin(start=start), replace(ROUND, phase_rounds=rounds)
    found = [r for r in range(1, rounds + 1) if part.begins(replace(round_, phase_round=r))]
    assert found == late


def test_a_warm_up_of_one_round_does_not_begin_it() -> None:
    method = LDAM(local=replace(LOCAL, warmup_epochs=1))
    rounds = {p.name: replace(ROUND, phase=p.name, phase_rounds=p.rounds) for p in method.phases(2)}
    begun = {name: method.margin.begins(round_) for name, round_ in rounds.items()}
    assert begun == {"warm-up": False, "main": True}


def slow_ldam(
    logits: Tensor, y: Tensor, known: Tensor, counts: list[int], part: LabelDistributionMargin, late: bool
) -> float:
    """The paper's loss, image by image and class by class."""
    here = [n for n in counts if n]
    most = max(n**-0.25 for n in here)
    m = [part.largest * n**-0.25 / most if n else 0.0 for n in counts]
    raw = [(1 - part.beta) / (1 - part.beta**n) if n else 0.0 for n in counts]
    w = [x / sum(raw) * len(here) if late else 1.0 for x in raw]
    total, divisor = 0.0, 0.0
    for i in range(len(logits)):
        seen = [c for c in range(len(counts)) if known[i, c]]
        truth = [c for c in seen if y[i, c] == 1]
        if not truth:
            continue
        (t,) = truth
        e = {c: math.exp(30 * (float(logits[i, c]) / 30 - (m[c] if c == t else 0))) for c in seen}
        total += w[t] * -math.log(e[t] / sum(e.values()))
        divisor += w[t]
    return total / divisor if divisor else 0.0


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any),
    st.floats(0, 1),
    st.floats(0, 0.99999),
    st.booleans(),
    st.sampled_from((1.0, 0.7)),
    st.integers(0, 99),
)
def test_the_loss_of_ldam_is_the_papers(
    counts: list[int], largest: float, beta: float, late: bool, share: float, seed: int
) -> None:
    part = LabelDistributionMargin(largest=largest, beta=beta)
    g = torch.Generator().manual_seed(seed)
    y = torch.eye(len(counts), dtype=torch.float64)[[c for c, n in enumerate(counts) for _ in range(n)]]
    logits = 30 * (2 * torch.rand(y.shape, generator=g, dtype=torch.float64) - 1)
    known = torch.rand(y.shape, generator=g) < share
    found = loss_of(part, counts, 10 if late else 1)(logits, y, known).item()
    assert found == pytest.approx(slow_ldam(logits, y, known, counts, part, late), abs=1e-10)


def test_it_trains_a_cosine_head() -> None:
    model = build(LDAM().adapted(SMALL), LabelSet(("A", "B"), "multiclass"), 1, pretrained=False)
    x = {"image": torch.randn(3, 1, 16, 16)}
    h, rows = model.eval().features(x), model.head.weight
    cosines = torch.nn.functional.cosine_similarity(h[:, None], rows[None], dim=2)
    torch.testing.assert_close(model(x), 30 * cosines)
