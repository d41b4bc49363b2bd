"""FedLC: calibrated logits, with and without the true class in the denominator."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from suture.core.errors import ConfigError
from suture.learning.losses import masked_ce
from suture.learning.training import LocalRound, LocalTraining, Loss, SiteContext
from suture.methods.composed import Supervised
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.models.classifier import Layout
from suture.protocol.messages import TaskData
from suture_papers.rare_classes.fedlc import Calibrated, FedLC, calibration, ce_against_others
from suture_papers.rare_classes.ldam import LDAM
from suture_synthetic.trial import Trial

SMALL = ModelSpec("cnn", size=16)


def test_the_numeric_example() -> None:
    """n = (16, 1, 0) at tau .5 takes .25, .5 and 50 from the logits (1, 2, 0)."""
    offsets = calibration(torch.tensor([16, 1, 0]), 0.5)
    torch.testing.assert_close(offsets, torch.tensor([0.25, 0.5, 50.0], dtype=torch.float64))
    z, known = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    for truth, keep, paper in ((0, 1.136871, 0.75), (1, 0.386871, -0.75)):
        y = torch.eye(3, dtype=torch.float64)[[truth]]
        assert masked_ce(z - offsets, y, known).item() == pytest.approx(keep, abs=1e-6)
        assert ce_against_others(z - offsets, y, known).item() == pytest.approx(paper, abs=1e-6)


@cache
def of_alpha() -> tuple[SiteContext, TaskData]:
    """A site and what it receives."""
    with Trial(FedLC(), SMALL, "multiclass") as trial:
        return trial.context("alpha", trial.payload("alpha")), trial.payload("alpha")


def loss_of(part: Supervised, y: Tensor) -> Loss:
    """The part's loss at a site with these training labels."""
    site, payload = of_alpha()
    site = replace(site, samples={"train": replace(site.samples["train"], y=y.float())})
    return part.of(site, payload, LocalRound(LocalTraining(), "average", 1, 1))


def written_out(z: Tensor, y: Tensor, known: Tensor, counts: list[int], tau: float, keep: bool) -> float:
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
def test_the_loss_is_the_papers(
    counts: list[int], tau: float, denominator: Literal["keep", "paper"], share: float, seed: int
) -> None:
    part = Calibrated(tau=tau, denominator=denominator)
    g = torch.Generator().manual_seed(seed)
    y = torch.eye(len(counts), dtype=torch.float64)[[c for c, n in enumerate(counts) for _ in range(n)]]
    z, known = (
        torch.randn(y.shape, generator=g, dtype=torch.float64),
        torch.rand(y.shape, generator=g) < share,
    )
    expected = written_out(z, y, known, counts, tau, denominator == "keep")
    assert loss_of(part, y)(z, y, known).item() == pytest.approx(expected, abs=1e-10)


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


@pytest.mark.complete
@pytest.mark.parametrize("more", [{}, {"rows": "owners"}, {"label_view": "own", "unknown": "masked"}])
def test_without_tau_it_is_fedavg(more: dict[str, Any]) -> None:
    local = LocalTraining(lr=1e-2, batch_size=8)
    one, two = FedLC(local=local, calibrated=Calibrated(tau=0), **more), FedAvg(local=local, **more)
    with (
        Trial(one, SMALL, "multiclass", rounds=2) as a,
        Trial(two, SMALL, "multiclass", rounds=2) as b,
    ):
        a.run()
        b.run()
        x, y = ({**t.server.model.shared, **t.server.model.head} for t in (a, b))
        assert all(torch.equal(x[name], y[name]) for name in y)


@pytest.mark.parametrize("kind", [FedLC, LDAM])
def test_another_softmax_is_refused(kind: type) -> None:
    with pytest.raises(ConfigError, match=r"set method\.softmax=plain"):
        kind(softmax="balanced")


@pytest.mark.parametrize("method", [FedLC(), LDAM()])
def test_several_labels_an_image_are_refused(method: FedLC | LDAM) -> None:
    assert method.labels.types == ("multiclass",)
    assert method.egress(Layout({}, {})).counts == ()
    title = method.about.title
    with (
        Trial(method, SMALL, "multilabel") as trial,
        pytest.raises(ConfigError, match=f"{title} does not support several labels an image"),
    ):
        trial.payload("alpha")
