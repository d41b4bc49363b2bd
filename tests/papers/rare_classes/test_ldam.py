"""LDAM-FL: margins, deferred weights, and the cosine head."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from federated import LOCAL, federated, same
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec, build
from suture.protocol.messages import TaskData
from suture_papers.rare_classes.ldam import LDAM, LabelDistributionMargin, effective_weights, margins
from suture_synthetic.trial import Trial

SMALL = ModelSpec("cnn", size=16)


@cache
def of_alpha() -> tuple[SiteContext, TaskData]:
    """A site and what it receives."""
    with Trial(LDAM(local=LOCAL), SMALL, "multiclass") as trial:
        return trial.context("alpha", trial.payload("alpha")), trial.payload("alpha")


def loss_of(part: LabelDistributionMargin, counts: list[int], phase_round: int, rounds: int) -> Loss:
    """The part's loss at a site with these images, in a round of a phase (from 1)."""
    site, payload = of_alpha()
    y = torch.eye(len(counts))[[c for c, n in enumerate(counts) for _ in range(n)]]
    site = replace(site, samples={"train": replace(site.samples["train"], y=y)})
    round_ = LocalRound(LOCAL, "average", 1, 1, phase_round=phase_round, phase_rounds=rounds)
    return part.of(site, payload, round_)


def test_the_numeric_example() -> None:
    """n = (16, 81, 0): margins .5, 1/3 and 0; cosines (.2, .5, -.1) cost 24.0 and 1.313352."""
    counts = torch.tensor([16, 81, 0]).double()
    expected = torch.tensor([0.5, 1 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(margins(counts, 0.5), expected)
    late = torch.tensor([1.669207, 0.330793, 0.0], dtype=torch.float64)
    torch.testing.assert_close(effective_weights(counts, 0.9999), late, atol=1e-6, rtol=0)
    s, known = torch.tensor([[0.2, 0.5, -0.1]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    y = torch.eye(3, dtype=torch.float64)
    early = loss_of(LabelDistributionMargin(), [16, 81, 0], 1, 10)
    assert early(30 * s, y[:1], known).item() == pytest.approx(24.0, abs=1e-6)
    assert early(30 * s, y[1:2], known).item() == pytest.approx(1.313352, abs=1e-6)
    both = (30 * s.repeat(2, 1), y[:2], known.repeat(2, 1))
    assert early(*both).item() == pytest.approx((24.0 + 1.313352) / 2, abs=1e-6)
    deferred = loss_of(LabelDistributionMargin(), [16, 81, 0], 9, 10)
    assert deferred(*both).item() == pytest.approx(20.247713, abs=1e-6)


@pytest.mark.parametrize(
    ("rounds", "late"),
    [(1, [1]), (2, [2]), (4, [4]), (5, [5]), (10, [9, 10]), (200, list(range(161, 201)))],
)
def test_the_switch_is_at_four_fifths_of_the_phase(rounds: int, late: list[int]) -> None:
    """r >= floor(.8 R) with r from 0; a phase of one round has floor(.8) = 0, and weighs from its start."""
    part = LabelDistributionMargin()
    round_ = LocalRound(LOCAL, "average", 1, 1, phase_rounds=rounds)
    found = [r for r in range(1, rounds + 1) if part.begins(replace(round_, phase_round=r))]
    assert found == late


def test_a_warm_up_of_one_round_does_not_begin_it() -> None:
    method = LDAM(local=replace(LOCAL, warmup_epochs=1))
    begun = {
        phase.name: method.margin.begins(
            LocalRound(LOCAL, "average", 1, 1, phase=phase.name, phase_rounds=phase.rounds)
        )
        for phase in method.phases(2)
    }
    assert begun == {"warm-up": False, "main": True}


def test_rounds_are_of_whole_numbers_where_a_share_is_none_of_the_computers() -> None:
    """.29 x 100 is 28.999... in binary."""
    round_ = LocalRound(LOCAL, "average", 1, 1, phase_rounds=100)
    part = LabelDistributionMargin(start=0.29)
    assert not part.begins(replace(round_, phase_round=29))
    assert part.begins(replace(round_, phase_round=30))


def test_without_deferral_all_classes_weigh_alike_to_the_end() -> None:
    z, y, known = torch.randn(6, 3), torch.eye(3).repeat(2, 1), torch.ones(6, 3, dtype=torch.bool)
    part = LabelDistributionMargin(start=1)
    first, last = (loss_of(part, [9, 3, 1], r, 10)(z, y, known) for r in (1, 10))
    assert torch.equal(first, last)
    assert not torch.equal(first, loss_of(LabelDistributionMargin(), [9, 3, 1], 10, 10)(z, y, known))


def written_out(
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
def test_the_loss_is_the_papers(
    counts: list[int], largest: float, beta: float, late: bool, share: float, seed: int
) -> None:
    part = LabelDistributionMargin(largest=largest, beta=beta)
    g = torch.Generator().manual_seed(seed)
    y = torch.eye(len(counts), dtype=torch.float64)[[c for c, n in enumerate(counts) for _ in range(n)]]
    logits = 30 * (2 * torch.rand(y.shape, generator=g, dtype=torch.float64) - 1)
    known = torch.rand(y.shape, generator=g) < share
    found = loss_of(part, counts, 10 if late else 1, 10)(logits, y, known).item()
    assert found == pytest.approx(written_out(logits, y, known, counts, part, late), abs=1e-10)


def test_rows_without_a_label_teach_nothing() -> None:
    z = torch.randn(2, 3, requires_grad=True)
    loss = loss_of(LabelDistributionMargin(), [9, 3, 0], 10, 10)(
        z, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    )
    (gradient,) = torch.autograd.grad(loss, z)
    assert (loss.item(), gradient.abs().sum().item()) == (0, 0)


@pytest.mark.complete
def test_without_margins_and_weights_it_is_fedavg_with_a_cosine_head() -> None:
    cosine = replace(SMALL, head="cosine")
    plain = LDAM(local=LOCAL, margin=LabelDistributionMargin(largest=0, start=1))
    one = federated(plain, "multiclass")
    assert "head.bias" not in one.head
    assert same(one, federated(FedAvg(local=LOCAL), "multiclass", model=cosine))


def test_it_trains_a_cosine_head_and_refuses_another() -> None:
    method = LDAM()
    assert method.adapted(SMALL).head == "cosine"
    with pytest.raises(ConfigError, match=r"model\.head=dot .*set model\.head=cosine"):
        Trial(method, replace(SMALL, head="dot"), "multiclass")
    model = build(method.adapted(SMALL), LabelSet(("A", "B"), "multiclass"), 1, pretrained=False)
    x = {"image": torch.randn(3, 1, 16, 16)}
    h, rows = model.eval().features(x), model.head.weight
    cosines = torch.nn.functional.cosine_similarity(h[:, None], rows[None], dim=2)
    torch.testing.assert_close(model(x), 30 * cosines)
