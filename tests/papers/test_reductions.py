"""Where a method is FedAvg, or another one, bit for bit: without its part, or where it has nothing to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from federated import LOCAL, federated, same
from suture.core.labels import LabelType
from suture.data.batch import Augmentation
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture_papers.ark.ark import Ark
from suture_papers.drift.fedprox import Proximal
from suture_papers.drift.moon import MOON, Contrastive
from suture_papers.missing_labels.condist import Distillation
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fedmlp import Tagging
from suture_papers.missing_labels.fedpu import PositiveUnlabelled
from suture_papers.missing_labels.fedrs import Restricted
from suture_papers.missing_labels.fedvls import FedVLS, LogitSuppression, VacantDistillation
from suture_papers.missing_labels.fixmatch import PseudoLabels
from suture_papers.missing_labels.fpsl import FPSL
from suture_papers.missing_labels.fssl import ReceivedLabels
from suture_papers.rare_classes.fedlc import Calibrated
from suture_papers.rare_classes.focal import Focal
from suture_papers.rare_classes.ldam import LabelDistributionMargin
from suture_synthetic import trial
from suture_synthetic.method_checks import SMALL

pytestmark = pytest.mark.complete

PLAIN = Augmentation()
EASY = Thresholds(positive=0.501, negative=0.499, best=0.26)
"""A model of random weights is as sure as this."""

MASKED = {"rows": "owners", "unknown": "masked"}
ABSENT = {"rows": "owners", "unknown": "negative"}
UNWEIGHTED = {"unknown": "masked", "class_weights": "none"}
MULTI, ONE = "multilabel", "multiclass"

Settings = dict[str, Any]
PROXIMAL, CONTRASTIVE = (
    ({"proximal": Proximal(0)}, {"proximal": Proximal(0.1)}),
    {"contrastive": Contrastive(mu=0)},
)
FREE, GRADED = ({"restricted": Restricted(1.0, graded=g)} for g in (False, True))
UNCALIBRATED = {"calibrated": Calibrated(tau=0)}
UNTAGGED = {"stage1": 0.0, "weak": PLAIN, "tagging": Tagging(negative=0.0, positive=0.0)}
UNDISTILLED = {"distil": Distillation(first=0, last=0)}
PSEUDO, PSEUDO_OFF = ({"pseudo_labels": PseudoLabels(weight=w, thresholds=EASY)} for w in (1, 0))
RECEIVED, RECEIVED_OFF = ({"received_labels": ReceivedLabels(weight=w, thresholds=EASY)} for w in (1, 0))

# A method, its part off and on, settings that it shares with FedAvg, and the type of labels.
WITHOUT: list[tuple[str, Settings, Settings, Settings, LabelType]] = [
    ("fedprox", *PROXIMAL, {}, "multilabel"),
    ("fedprox", *PROXIMAL, {"label_view": "own", "weights": "equal"}, "multilabel"),
    ("fedprox", *PROXIMAL, {"rows": "owners", "softmax": "balanced"}, "multiclass"),
    ("moon", CONTRASTIVE, {}, {"rows": "owners"}, "multilabel"),
    ("moon", CONTRASTIVE, {}, {"label_view": "own"}, "multilabel"),
    ("moon", CONTRASTIVE, {}, {"softmax": "balanced"}, "multiclass"),
    ("fedrs", FREE, {}, {"class_weights": "known"}, "multilabel"),
    ("fedrs", GRADED, {}, {"class_weights": "none", "rows": "owners"}, "multilabel"),
    ("fedrs", FREE, {}, {"softmax": "balanced"}, "multiclass"),
    ("fedrs", GRADED, {}, {}, "multiclass"),
    ("fedlc", UNCALIBRATED, {}, {}, "multiclass"),
    ("fedlc", UNCALIBRATED, {}, {"rows": "owners"}, "multiclass"),
    ("fedlc", UNCALIBRATED, {}, {"label_view": "own", "unknown": "masked"}, "multiclass"),
    ("focal", {"focal": Focal(0)}, {}, {}, "multiclass"),
    ("ldam", {"margin": LabelDistributionMargin(largest=0, start=1)}, {}, {}, "multiclass"),
    ("fedpu", {"positive_unlabelled": PositiveUnlabelled(weight=0, prior=0.2)}, {}, {}, "multiclass"),
    ("fednml", {"start": 1.0}, {"start": 0.0}, {"weights": "equal", **UNWEIGHTED}, "multilabel"),
    ("fedmlp", UNTAGGED, {}, {"rows": "all", **UNWEIGHTED}, "multilabel"),
    ("fedmlp", UNTAGGED, {}, {"rows": "owners", **UNWEIGHTED}, "multilabel"),
    ("condist", UNDISTILLED, {}, MASKED, "multilabel"),
    ("condist", UNDISTILLED, {}, MASKED, "multiclass"),
    ("fixmatch", PSEUDO_OFF, PSEUDO, MASKED, "multilabel"),
    ("fssl", RECEIVED_OFF, RECEIVED, MASKED, "multilabel"),
]


NUMBERED = [f"{row[0]}-{[r[0] for r in WITHOUT[:i]].count(row[0])}" for i, row in enumerate(WITHOUT)]


def method_of(name: str, **settings: Any) -> Any:
    return METHODS[name](**{"local": LOCAL, **settings})


@pytest.mark.parametrize(("name", "off", "on", "shared", "label_type"), WITHOUT, ids=NUMBERED)
def test_without_its_part_it_is_fedavg(
    name: str, off: Settings, on: Settings, shared: Settings, label_type: LabelType
) -> None:
    without = method_of(name, **shared, **off)
    plain = federated(FedAvg(local=LOCAL, **shared), label_type, model=without.adapted(SMALL))
    assert same(federated(without, label_type), plain)
    assert not same(federated(method_of(name, **shared, **on), label_type), plain)


@pytest.mark.parametrize(
    ("name", "off", "on"), [("fixmatch", PSEUDO_OFF, PSEUDO), ("fssl", RECEIVED_OFF, RECEIVED)]
)
def test_without_pseudo_labels_of_one_label_it_is_fedavg(name: str, off: Settings, on: Settings) -> None:
    """What FedAvg teaches as absent is true: a labelled image has no other class."""
    plain = federated(FedAvg(local=LOCAL, **ABSENT), "multiclass")
    assert same(federated(method_of(name, **off), "multiclass"), plain)
    assert not same(federated(method_of(name, **on), "multiclass"), plain)


def test_the_first_round_of_moon_is_one_of_fedavg() -> None:
    moon = MOON(local=LOCAL, contrastive=Contrastive(mu=10))
    plain = federated(FedAvg(local=LOCAL), model=moon.adapted(SMALL), rounds=1)
    assert same(federated(moon, rounds=1), plain)


@pytest.mark.parametrize("label_type", [MULTI, ONE])
def test_where_the_head_alone_is_trained_fpsl_is_fedavg_of_owners(label_type: LabelType) -> None:
    """As in a warm-up: A is what FedAvg draws, in each epoch, and B has nothing to teach."""
    local = LocalTraining(batch_size=8, warmup_epochs=3, warmup_lr=1e-2)
    plain = federated(FedAvg(local=local, **MASKED), label_type, rounds=1)
    assert same(federated(FPSL(local=local), label_type, rounds=1), plain)


UNSEEN: Settings = {"thresholds": EASY, "weak": PLAIN}

KNOWN: list[tuple[str, Settings, Settings, LabelType]] = [
    ("fedpu", {"positive_unlabelled": PositiveUnlabelled(prior=0.2)}, {}, "multiclass"),
    # e does not show beside a share.
    ("fedvls", {"suppression": LogitSuppression(weight=0)}, {"softmax": "balanced"}, "multiclass"),
    *(("condist", {"distil": Distillation(first=1, last=1)}, {}, kind) for kind in (MULTI, ONE)),
    # Under the job's augmentation, here none. No second view is drawn: it would move batch norm.
    *(
        ("fixmatch", {"pseudo_labels": PseudoLabels(thresholds=EASY, weak=PLAIN)}, {}, kind)
        for kind in (MULTI, ONE)
    ),
    *(
        ("fssl", {"received_labels": ReceivedLabels(thresholds=EASY, weak=PLAIN)}, {}, kind)
        for kind in (MULTI, ONE)
    ),
]


@pytest.mark.parametrize(
    ("name", "settings", "shared", "label_type"), KNOWN, ids=[f"{row[0]}-{row[3]}" for row in KNOWN]
)
def test_where_all_is_known_it_is_fedavg(
    name: str, settings: Settings, shared: Settings, label_type: LabelType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At sites that annotate every class, and have images of each."""
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    plain = federated(FedAvg(local=LOCAL, **shared), label_type)
    assert same(federated(method_of(name, **settings), label_type), plain)


def test_both_parts_of_fedvls_have_an_effect_where_classes_are_vacant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: tuple[Settings, ...] = ({"vacant": VacantDistillation(0)}, {"suppression": LogitSuppression(0)})
    one = federated(FedVLS(local=LOCAL), "multiclass")
    for part in parts:
        assert not same(one, federated(FedVLS(local=LOCAL, **part), "multiclass"))
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    undistilled, unsuppressed = (federated(FedVLS(local=LOCAL, **part), "multiclass") for part in parts)
    known = federated(FedVLS(local=LOCAL), "multiclass")
    assert (same(known, undistilled), same(known, unsuppressed)) == (True, False)


@pytest.mark.parametrize("label_type", [MULTI, ONE])
def test_with_one_owner_of_each_class_and_no_teacher_ark_is_surgical_aggregation(
    label_type: LabelType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's mean over one site is that site's own."""
    plain, none = SurgicalAggregation(local=LOCAL), Ark(local=LOCAL, momentum=0, consistency=0)
    with_neck = replace(SMALL, neck=256)
    assert not same(federated(plain, label_type, model=with_neck), federated(none, label_type))
    owners = {"alpha": ("Mass", "Nodule"), "beta": ("Hernia",), "gamma": ("Fibrosis",)}
    monkeypatch.setattr(trial, "SITES", owners)
    alone = federated(plain, label_type, model=with_neck)
    assert same(alone, federated(none, label_type))
    assert not same(alone, federated(Ark(local=LOCAL, momentum=0), label_type))
