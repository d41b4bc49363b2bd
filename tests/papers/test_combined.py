"""Parts of several methods in one job: the same bytes as the methods alone, and what does not go together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from federated import LOCAL, federated, same
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.execution.job import load_job, settings_of, with_settings
from suture.learning.training import LocalRound
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture_papers.combined import Combined
from suture_papers.drift.fedprox import FedProx, Proximal
from suture_papers.missing_labels.condist import ConDist, Distillation
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fedpu import FedPU, PositiveUnlabelled
from suture_papers.missing_labels.fedrs import FedRS, Restricted
from suture_papers.missing_labels.fedvls import FedVLS, LogitSuppression, VacantDistillation
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels
from suture_papers.missing_labels.fssl import FSSL, ReceivedLabels
from suture_papers.rare_classes.fedlc import Calibrated
from suture_papers.rare_classes.focal import Focal
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused

EASY = Thresholds(positive=0.51, negative=0.49, best=0.3)
"""A model is soon as sure as this."""

ABSENT = {"rows": "all", "unknown": "negative"}
RECEIVED = {"received_labels": ReceivedLabels(thresholds=EASY)}
BOTH: tuple[LabelType, ...] = ("multilabel", "multiclass")
ONE_LABEL: tuple[LabelType, ...] = ("multiclass",)

# A method, the part of it that is named, what Combined is told besides, and the types of labels.
ALONE: tuple[tuple[Any, dict[str, Any], dict[str, Any], tuple[LabelType, ...]], ...] = (
    (FedAvg, {}, ABSENT, BOTH),
    (FedProx, {"proximal": Proximal(0.5)}, ABSENT, BOTH),
    (FedRS, {"restricted": Restricted()}, ABSENT, BOTH),
    (ConDist, {"distil": Distillation(first=0.5)}, {}, BOTH),
    (FSSL, RECEIVED, {}, BOTH),
    (FSSL, RECEIVED | {"softmax": "balanced"}, {}, ONE_LABEL),
    (FixMatch, {"pseudo_labels": PseudoLabels(thresholds=EASY)}, {}, BOTH),
    *(
        (SurgicalAggregation, {"class_weights": rule}, {"label_view": "own", "weights": "equal"}, BOTH)
        for rule in ("none", "known")
    ),
    (VanillaFL, {"class_weights": "known"}, ABSENT | {"weights": "equal"}, BOTH),
    (FedVLS, {"suppression": LogitSuppression(), "vacant": VacantDistillation()}, ABSENT, ONE_LABEL),
    (FedPU, {"positive_unlabelled": PositiveUnlabelled()}, ABSENT, ONE_LABEL),
)


@pytest.mark.complete
@pytest.mark.parametrize(("kind", "part", "more", "types"), ALONE)
def test_one_part_is_its_method_bit_for_bit(
    kind: Any, part: dict[str, Any], more: dict[str, Any], types: tuple[LabelType, ...]
) -> None:
    for label_type in types:
        combined = federated(Combined(local=LOCAL, **part, **more), label_type)
        assert same(combined, federated(kind(local=LOCAL, **part), label_type))


@pytest.mark.complete
def test_two_terms_are_both_there() -> None:
    parts: dict[str, Any] = {"proximal": Proximal(0.5), "distil": Distillation(first=0.5)}
    both = federated(Combined(local=LOCAL, **parts))
    for name, part in parts.items():
        assert not same(both, federated(Combined(local=LOCAL, **{name: part})))


@pytest.mark.parametrize("loss", [{}, {"focal": Focal()}, {"calibrated": Calibrated()}])
def test_with_confident_labels_the_softmax_of_any_loss_is_over_all_classes(loss: dict[str, Any]) -> None:
    """A row of others' classes has a gradient of labelled images; without such labels it has none."""
    logits, y = torch.zeros(1, 3, requires_grad=True), torch.eye(3)
    known = torch.tensor([[True, True, False]])
    for more, moves in (({}, False), ({"received_labels": ReceivedLabels()}, True)):
        method = Combined(local=LOCAL, **loss, **more)
        with Trial(method, SMALL, "multiclass") as trial:
            payload = trial.payload("alpha")
            site = trial.context("alpha", payload)
            site = replace(site, samples={"train": replace(site.samples["train"], y=y)})
            of_round = method.supervised.of(site, payload, LocalRound(LOCAL, "average", 1, 1))
        for of in (of_round, partial(method.loss, label_type="multiclass")):
            (slope,) = torch.autograd.grad(of(logits, y[:1], known), logits)
            assert (slope[0, 2] != 0) == moves


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"distil": Distillation(), "unknown": "negative"}, ["Distillation", "method.unknown=masked"]),
        ({"distil": Distillation(), "label_view": "own"}, ["Distillation", "method.label_view=all"]),
        ({"focal": Focal(), "calibrated": Calibrated()}, ["Focal", "Calibrated"]),
        ({"focal": Focal(), "restricted": Restricted()}, ["Focal", "Restricted"]),
    ],
)
def test_what_does_not_go_together_is_refused(parts: dict[str, Any], named: list[str]) -> None:
    with refused(*named, by=ConfigError):
        Combined(**parts)


def test_a_setting_of_a_part_adds_the_part() -> None:
    words = ["method=combined", "method.distil.last=0.5", "method.weights=equal"]
    job = with_settings(load_job("demo"), words)
    given: Any = job.method
    plain = Combined(local=given.local, batch_norm=given.batch_norm, weights="equal")
    assert given == replace(plain, distil=Distillation(last=0.5))
    settings = settings_of(job)
    assert (settings["method.distil.last"], settings["method.proximal"]) == (0.5, None)
    for wrong, named in (
        ("method.distil.lst=1", "'method.distil.last'"),
        ("method.unknown=negative", "method.unknown=masked"),
    ):
        with refused(named, by=ConfigError):
            with_settings(job, [wrong])
