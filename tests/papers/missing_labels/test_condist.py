"""ConDist: the numbers by hand, what it reduces to, and a slow transcription."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from federated import LOCAL, ROUND, federated, same
from one_step import equal, site_of, step_of
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.learning.training import fit
from suture.methods.composed import _Training
from suture.methods.fedavg import FedAvg
from suture_papers.missing_labels.condist import ConDist, Distillation, log_probabilities
from suture_synthetic import trial
from suture_synthetic.method_checks import SMALL

CONSTANT = {"first": 1.0, "last": 1.0}
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


def test_the_multilabel_example() -> None:
    """z = (1, -2), z' = (2, 0), T = 2: .608548 and .813262; squares at T = 1."""
    z, received = torch.tensor([[1.0, -2]]), torch.tensor([[2.0, 0]])
    value = Distillation(**CONSTANT).begin(site_of("multilabel", [False, False]), ROUND)
    for c, expected in enumerate((0.608548, 0.813262)):
        one = Distillation(**CONSTANT).begin(site_of("multilabel", [c == 1, c == 0]), ROUND)
        known = torch.tensor([[c == 1, c == 0]])
        alone = one(step_of(z, received, torch.zeros(1, 2), known))
        assert alone.item() == pytest.approx(expected, abs=1e-6)
    step = step_of(z, received, torch.zeros(1, 2), torch.zeros(1, 2).bool())
    assert value(step).item() == pytest.approx(0.710905, abs=1e-6)
    squares = Distillation(temperature=1, distance="mse", **CONSTANT)
    value = squares.begin(site_of("multilabel", [False, False]), ROUND)
    assert value(step).item() == pytest.approx(0.083714, abs=1e-6)


def test_the_softmax_example() -> None:
    """z = (2, 1, 0, -1), I = {0}, T = 2: given U it is (.506471, .307190, .186320).

    An image that the site has labelled, or that the received model takes for class 0, does not count.
    """
    z, known = torch.tensor([[2.0, 1, 0, -1]] * 3), torch.tensor([[True, False, False, False]] * 3)
    received = torch.tensor([[0.0, 9, 0, 0], [0, 1, 0, -1], [5, 1, 0, -1]])  # the last: class 0, it seems
    y = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    value = Distillation(**CONSTANT).begin(site_of("multiclass", [True, False, False, False]), ROUND)
    q = (0.506471, 0.307190, 0.186320)
    unknown = torch.tensor([False, True, True, True])
    p = log_probabilities(z[:1] / 2, unknown, "multiclass").exp()
    assert p[0].tolist() == pytest.approx(q, abs=1e-6)
    expected = -sum(p * math.log(p) for p in q)  # z' is z there, but for class 0
    assert value(step_of(z, received, y, known)).item() == pytest.approx(expected, abs=1e-5)


def test_dice_by_hand() -> None:
    """p = .5, p' = .5: 1 - .5 / 1.00001 = .500005. Where both are all but 0, it is 1 and not 0."""
    value = Distillation(distance="dice", **CONSTANT).begin(site_of("multilabel", [False]), ROUND)
    zero = torch.zeros(1, 1)
    assert value(step_of(zero, zero, zero, zero.bool())).item() == pytest.approx(0.500005, abs=1e-7)
    none = zero - 80
    assert value(step_of(none, none, zero, zero.bool())).item() == pytest.approx(1.0, abs=1e-6)


def test_the_weight_rises_along_a_straight_line() -> None:
    """Five rounds: .01, .2575, .505, .7525, 1; a phase of one round has the first."""
    weights = [Distillation().weight(r, 5) for r in range(1, 6)]
    assert weights == pytest.approx([0.01, 0.2575, 0.505, 0.7525, 1])
    assert Distillation().weight(1, 1) == 0.01
    value = Distillation().begin(
        site_of("multilabel", [False]), replace(ROUND, phase_round=2, phase_rounds=5)
    )
    zero = torch.zeros(1, 1)
    assert value(step_of(zero, zero, zero, zero.bool())).item() == pytest.approx(0.2575 * math.log(2))


@pytest.mark.complete
@BOTH
def test_without_weight_it_is_fedavg_of_known_labels(label_type: LabelType) -> None:
    fedavg = FedAvg(local=LOCAL, rows="owners", unknown="masked")
    none = federated(ConDist(local=LOCAL, distil=Distillation(first=0, last=0)), label_type)
    assert same(none, federated(fedavg, label_type))
    assert not same(none, federated(ConDist(local=LOCAL), label_type))


@pytest.mark.complete
@BOTH
def test_where_all_is_known_it_is_fedavg(label_type: LabelType, monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    one = federated(ConDist(local=LOCAL, distil=Distillation(**CONSTANT)), label_type)
    assert same(one, federated(FedAvg(local=LOCAL), label_type))


def slow(
    z: Tensor, received: Tensor, y: Tensor, own: list[bool], label_type: LabelType, how: Distillation
) -> float:
    """The equations of the module, image by image and class by class."""
    others = [c for c, mine in enumerate(own) if not mine]
    p, q = [], []
    for i in range(len(z)):
        if label_type == "multiclass":
            likeliest = max(range(len(own)), key=lambda c: float(received[i, c]))
            if any(y[i, c] == 1 and own[c] for c in range(len(own))) or own[likeliest]:
                continue
        for logits, into in ((z[i], p), (received[i], q)):
            e = [math.exp(float(x) / how.temperature) for x in logits]
            if label_type == "multilabel":
                into.append([e[c] / (1 + e[c]) for c in others])
            else:
                s = [x / sum(e) for x in e]
                into.append([s[c] / (sum(s[o] for o in others) + 1e-5) for c in others])
    images, classes = range(len(p)), range(len(others))
    if not p or not others:
        return 0.0
    if how.distance == "dice":
        each = []
        for c in classes:
            both = sum(p[i][c] * q[i][c] for i in images)
            sizes = sum(p[i][c] + q[i][c] for i in images)
            each.append(1 - 2 * both / (sizes + 1e-5))
        return sum(each) / len(others)
    total = 0.0
    for i in images:
        for c in classes:
            if how.distance == "mse":
                total += (p[i][c] - q[i][c]) ** 2
            else:
                total -= q[i][c] * math.log(p[i][c])
                if label_type == "multilabel":
                    total -= (1 - q[i][c]) * math.log(1 - p[i][c])
    by_class = label_type == "multilabel" or how.distance == "mse"
    return total / len(p) / (len(others) if by_class else 1)


@given(
    seed=st.integers(0, 10**6),
    label_type=st.sampled_from(["multilabel", "multiclass"]),
    kind=st.sampled_from(["cross_entropy", "mse", "dice"]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    own=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_it_is_the_slow_transcription(
    seed: int, label_type: LabelType, kind: Any, temperature: float, own: list[bool]
) -> None:
    g = torch.Generator().manual_seed(seed)
    z, received = (2 * torch.randn(6, 4, generator=g).double() for _ in range(2))
    known = torch.tensor(own).expand(6, 4)
    y = torch.eye(4).double()[torch.randint(0, 4, (6,), generator=g)] * known
    how = Distillation(temperature=temperature, first=0.3, last=0.3, distance=kind)
    value = how.begin(site_of(label_type, own), ROUND)(step_of(z, received, y, known))
    assert value.item() == pytest.approx(0.3 * slow(z, received, y, own, label_type, how), abs=1e-10)


@BOTH
def test_the_received_model_has_no_gradient_and_known_classes_hardly_any(label_type: LabelType) -> None:
    z, received = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    known = torch.tensor([[True, False, False]] * 5)
    value = Distillation(**CONSTANT).begin(site_of(label_type, known[0]), ROUND)
    value(step_of(z, received, torch.zeros(5, 3), known)).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert received.grad is None
    # e of the conditional probability lets a little through: 1e-5 of a share of 1.
    assert z.grad[:, 0].abs().max() <= (0 if label_type == "multilabel" else 1e-5)


def test_the_received_model_stays_as_it_was() -> None:
    """Its batch norm, too, moves neither its running statistics nor with the batch."""
    method = ConDist(local=LOCAL)
    with trial.Trial(method, SMALL, "multilabel") as federation:
        payload = federation.payload("alpha")
        site = federation.context("alpha", payload)
        before = copy.deepcopy(site.model.state_dict())
        training = _Training(method.supervised, method.terms, site, payload, ROUND)
        fit(site, training.objective, ROUND)
    received = training._received
    assert not received.training
    assert equal(before, received.state_dict())
    assert any("running_mean" in name for name in before)
    assert not equal(before, site.model.state_dict())


@pytest.mark.parametrize("other", [{"unknown": "negative"}, {"label_view": "own"}])
def test_what_it_cannot_distil_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="Distillation learns from the received model what the site does not"
    ):
        ConDist(**other)
