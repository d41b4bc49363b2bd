"""FSSL: the examples by hand with another model that labels, what it reduces to, and a slow transcription."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from federated import LOCAL, ROUND, federated, same
from one_step import equal, site_of, step_of
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.data.batch import WEAK, Augmentation, Batch
from suture.learning.training import fit
from suture.methods.composed import SECOND, SECOND_OF, _Training
from suture.methods.fedavg import FedAvg
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fssl import FSSL, ReceivedLabels
from suture_synthetic import trial
from suture_synthetic.method_checks import SMALL

EASY = Thresholds(positive=0.501, negative=0.499, best=0.26)
"""Thresholds that a model of random weights passes, too."""
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


def test_the_multilabel_example() -> None:
    """The received model gives (.9, .5, .002), the strong view's logits are (1, 0, -2): .440190 / 3.

    What the model itself answers for the weak view does not matter.
    """
    received = torch.logit(torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.002]]))
    known = torch.tensor([[True] * 3, [False] * 3])
    rows, strong = torch.tensor([1]), torch.tensor([[1.0, 0, -2]])
    value = ReceivedLabels().begin(site_of("multilabel", [True, True, True]), ROUND)
    for z in (torch.zeros(2, 3), torch.full((2, 3), 9.0)):
        loss = value(step_of(z, received, torch.zeros(2, 3), known, rows, strong))
        assert loss.item() == pytest.approx(0.146730, abs=1e-6)


def test_the_single_label_example() -> None:
    """Two unlabelled images; the received model gives one .97 for class 2, and the other at most .9."""
    received = torch.tensor([[0.5, 0.3, 0.2], [0.01, 0.02, 0.97], [0.9, 0.05, 0.05]]).log()
    y, known = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]), torch.tensor([[True, True, False]] * 3)
    term, site = ReceivedLabels(), site_of("multiclass", [True, True, False])
    rows = term.seen_again(Batch({}, y, known), "multiclass")
    assert rows.tolist() == [1, 2]
    step = step_of(torch.zeros(3, 3), received, y, known, rows, torch.tensor([[0.0, 1, 2]] * 2))
    assert term.begin(site, ROUND)(step).item() == pytest.approx(0.203803, abs=1e-6)


@pytest.mark.complete
@BOTH
def test_without_weight_it_is_fedavg_of_known_labels(label_type: LabelType) -> None:
    """With one label an image, what FedAvg teaches as absent is true: a labelled image has no other class."""
    unknown: Any = "masked" if label_type == "multilabel" else "negative"
    fedavg = federated(FedAvg(local=LOCAL, rows="owners", unknown=unknown), label_type)
    term = ReceivedLabels(weight=0, thresholds=EASY)
    assert same(federated(FSSL(local=LOCAL, received_labels=term), label_type), fedavg)
    assert not same(federated(FSSL(local=LOCAL, received_labels=replace(term, weight=1)), label_type), fedavg)


@pytest.mark.complete
@BOTH
def test_where_all_is_known_it_is_fedavg(label_type: LabelType, monkeypatch: Any) -> None:
    """Under the job's augmentation, here none. No second view is drawn: it would move batch norm."""
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    seen_as_they_are = ReceivedLabels(thresholds=EASY, weak=Augmentation())
    one = federated(FSSL(local=LOCAL, received_labels=seen_as_they_are), label_type)
    assert same(one, federated(FedAvg(local=LOCAL), label_type))


def squashed(logits: Tensor, label_type: LabelType) -> list[float]:
    """The probabilities of one image."""
    e = [math.exp(float(x)) for x in logits]
    return [x / (1 + x) if label_type == "multilabel" else x / sum(e) for x in e]


def slow(model: Any, received: Any, batch: Batch, label_type: LabelType) -> float:
    """Labels of the weak view; pseudo-labels of the received model for the strong one; with w_c = 1."""
    weak, rows = batch.inputs["image"], batch.inputs[SECOND_OF].tolist()
    n, classes = len(batch), range(batch.y.shape[1])
    with torch.no_grad():
        taught = received({"image": weak})
        both = model({"image": torch.cat([weak, batch.inputs[SECOND]])})
    supervised, labels, pseudo, unknown = 0.0, 0, 0.0, 0
    for i in range(n):
        known = [c for c in classes if batch.known[i, c]]
        p = squashed(both[i], label_type)
        if label_type == "multilabel":
            for c in known:
                labels += 1
                supervised -= math.log(p[c] if batch.y[i, c] == 1 else 1 - p[c])
        elif any(batch.y[i, c] == 1 for c in known):
            labels += 1
            supervised -= math.log(sum(p[c] * float(batch.y[i, c]) for c in known))
    for place, i in enumerate(rows):
        q, p = squashed(taught[i], label_type), squashed(both[n + place], label_type)
        if label_type == "multilabel":
            for c in classes:
                if batch.known[i, c]:
                    continue
                unknown += 1
                if q[c] >= EASY.positive:
                    pseudo -= math.log(p[c])
                elif q[c] <= EASY.negative:
                    pseudo -= math.log(1 - p[c])
        else:
            assert not any(batch.y[i] == 1)
            unknown += 1
            if max(q) >= EASY.best:
                pseudo -= math.log(p[q.index(max(q))])
    assert pseudo > 0
    assert not torch.equal(weak[rows], batch.inputs[SECOND])
    return supervised / max(labels, 1) + 0.7 * pseudo / unknown


@BOTH
@pytest.mark.parametrize("site", ["alpha", "beta", "gamma"])
def test_it_is_the_slow_transcription(label_type: LabelType, site: str) -> None:
    """Of whole steps, in double precision, after a few that part the model from the received one."""
    method = FSSL(
        local=LOCAL, received_labels=ReceivedLabels(weight=0.7, thresholds=EASY), class_weights="none"
    )
    with trial.Trial(method, SMALL, label_type) as federation:
        payload = federation.payload(site)
        context = replace(federation.context(site, payload), augmentation=WEAK)
        training = _Training(method.supervised, method.terms, context, payload, ROUND)
        before = copy.deepcopy(context.model.state_dict())
        fit(
            context,
            training.objective,
            ROUND,
            batches=lambda s, n: training.batches(LOCAL, s, n),
        )
        received, model = training._received, context.model
        assert equal(before, received.state_dict())  # it rests, and so does its batch norm
        assert not equal(before, model.state_dict())
        for network in (received, model):
            network.double()
        shuffle, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        for one in training.batches(LOCAL, shuffle, noise):
            doubled = {k: v.double() if k != SECOND_OF else v for k, v in one.inputs.items()}
            batch = Batch(doubled, one.y.double(), one.known)
            expected = slow(copy.deepcopy(model), received, batch, label_type)
            assert training.objective(model, batch).item() == pytest.approx(expected, abs=1e-10)


def test_the_validation_loss_is_of_all_classes_too() -> None:
    """z = (1, 0, 0), class 0 of the annotated 0 and 1: ln(1 + 2/e), not ln(1 + 1/e)."""
    z, y, known = (
        torch.tensor([[1.0, 0, 0]]),
        torch.tensor([[1.0, 0, 0]]),
        torch.tensor([[True, True, False]]),
    )
    assert FSSL().loss(z, y, known, "multiclass").item() == pytest.approx(math.log(1 + 2 / math.e))


@pytest.mark.parametrize("other", [{"unknown": "negative"}, {"label_view": "own"}])
def test_labels_that_it_cannot_use_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ReceivedLabels gives pseudo-labels for what the site does not"):
        FSSL(**other)
