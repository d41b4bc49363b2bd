"""Where a method is FedAvg, or another one, bit for bit: without its part, or where it has nothing to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from federated import LOCAL, federated, same
from suture.core.labels import LabelType
from suture.data.batch import Augmentation
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_papers.ark.ark import Ark
from suture_papers.drift.fedprox import FedProx, Proximal
from suture_papers.drift.moon import MOON, Contrastive
from suture_papers.missing_labels.condist import ConDist, Distillation
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fedmlp import FedMLP, Tagging
from suture_papers.missing_labels.fednml import FedNML
from suture_papers.missing_labels.fedpu import FedPU, PositiveUnlabelled
from suture_papers.missing_labels.fedrs import FedRS, Restricted
from suture_papers.missing_labels.fedvls import FedVLS, LogitSuppression, VacantDistillation
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels
from suture_papers.missing_labels.fpsl import FPSL
from suture_papers.missing_labels.fssl import FSSL, ReceivedLabels
from suture_papers.rare_classes.fedlc import Calibrated, FedLC
from suture_papers.rare_classes.focal import Focal, FocalFedAvg
from suture_papers.rare_classes.ldam import LDAM, LabelDistributionMargin
from suture_synthetic import trial
from suture_synthetic.method_checks import SMALL

WITH_NECK = replace(SMALL, neck=256)
COSINE = replace(SMALL, head="cosine")
SGD = LocalTraining(lr=0.1, batch_size=8, epochs=2, optimiser="sgd", momentum=0.0)
WARM = LocalTraining(batch_size=8, warmup_epochs=3, warmup_lr=1e-2)
PLAIN = Augmentation()
EASY = Thresholds(positive=0.501, negative=0.499, best=0.26)
"""A model of random weights is as sure as this."""

MASKED: dict[str, Any] = {"rows": "owners", "unknown": "masked"}
EQUAL: dict[str, Any] = {"weights": "equal", "unknown": "masked", "class_weights": "none"}
BALANCED: dict[str, Any] = {"rows": "owners", "softmax": "balanced"}
UNWEIGHTED: dict[str, Any] = {"unknown": "masked", "class_weights": "none"}
OWN_EQUAL: dict[str, Any] = {"label_view": "own", "weights": "equal"}
OWN_MASKED: dict[str, Any] = {"label_view": "own", "unknown": "masked"}
CONSTANT: dict[str, Any] = {"first": 1.0, "last": 1.0}
CONFIDENT: tuple[tuple[Any, str, Any], ...] = (
    (FixMatch, "pseudo_labels", PseudoLabels),
    (FSSL, "received_labels", ReceivedLabels),
)


class Case(NamedTuple):
    """`one` ends with the tensors of `two`, and `other` does not.

    Attributes:
        model: of `two`; the others adapt theirs.
    """

    one: Any
    two: Any
    other: Any = None
    label_type: LabelType = "multilabel"
    model: ModelSpec = SMALL
    rounds: int = 2


def fedprox(mu: float, **more: Any) -> FedProx:
    return FedProx(local=LOCAL, proximal=Proximal(mu), **more)


def moon(mu: float, **more: Any) -> MOON:
    return MOON(local=LOCAL, contrastive=Contrastive(mu=mu), **more)


def fedrs(alpha: float, graded: bool, **more: Any) -> FedRS:
    return FedRS(local=LOCAL, restricted=Restricted(alpha, graded=graded), **more)


def fedlc(tau: float, **more: Any) -> FedLC:
    return FedLC(local=LOCAL, calibrated=Calibrated(tau=tau), **more)


def fedmlp(share: float, **more: Any) -> FedMLP:
    tagging = Tagging(negative=share, positive=share)
    return FedMLP(local=LOCAL, stage1=0.0, tagging=tagging, weak=PLAIN, **more)


def fedavg(**more: Any) -> FedAvg:
    return FedAvg(local=LOCAL, **more)


def without_a_part() -> dict[str, Case]:
    """Of each method, with settings of FedAvg that its part must leave as they are."""
    cases = {
        "fedpu": Case(
            FedPU(local=LOCAL, positive_unlabelled=PositiveUnlabelled(weight=0, prior=0.2)),
            fedavg(),
            FedPU(local=LOCAL),
            "multiclass",
        ),
        "focal": Case(
            FocalFedAvg(local=LOCAL, focal=Focal(0)), fedavg(), FocalFedAvg(local=LOCAL), "multiclass"
        ),
        "ldam": Case(
            LDAM(local=LOCAL, margin=LabelDistributionMargin(largest=0, start=1)),
            fedavg(),
            LDAM(local=LOCAL),
            "multiclass",
            COSINE,
        ),
        "fednml": Case(FedNML(local=LOCAL, start=1.0, **EQUAL), fedavg(**EQUAL)),
        "moon in its first round": Case(moon(10), fedavg(), None, "multilabel", WITH_NECK, rounds=1),
    }
    for number, (label_type, more) in enumerate(
        (("multilabel", {}), ("multilabel", OWN_EQUAL), ("multiclass", BALANCED))
    ):
        avg = fedavg(**more)
        cases[f"fedprox {number}"] = Case(fedprox(0, **more), avg, fedprox(0.1, **more), label_type)
        cases[f"moon {number}"] = Case(moon(0, **more), avg, moon(5, **more), label_type, WITH_NECK)
    for number, (label_type, graded, more) in enumerate(
        (
            ("multilabel", False, {"class_weights": "known"}),
            ("multilabel", True, {"class_weights": "none", "rows": "owners"}),
            ("multiclass", False, {"softmax": "balanced"}),
            ("multiclass", True, {}),
        )
    ):
        cases[f"fedrs {number}"] = Case(
            fedrs(1.0, graded, **more), fedavg(**more), fedrs(0.5, graded, **more), label_type
        )
    for number, more in enumerate(({}, {"rows": "owners"}, OWN_MASKED)):
        cases[f"fedlc {number}"] = Case(fedlc(0, **more), fedavg(**more), fedlc(0.5, **more), "multiclass")
    for rows in ("all", "owners"):
        more = {**UNWEIGHTED, "rows": rows}
        cases[f"fedmlp {rows}"] = Case(fedmlp(0.0, **more), fedavg(**more))
    for label_type in ("multilabel", "multiclass"):
        none = ConDist(local=LOCAL, distil=Distillation(first=0, last=0))
        cases[f"condist {label_type}"] = Case(none, fedavg(**MASKED), ConDist(local=LOCAL), label_type)
        # As in a warm-up: A is what FedAvg draws, in each epoch, and B has nothing to teach.
        warm = FedAvg(local=WARM, **MASKED)
        cases[f"fpsl {label_type}"] = Case(FPSL(local=WARM), warm, FPSL(local=SGD), label_type, rounds=1)
        # With one label an image, what FedAvg teaches as absent is true: a labelled image has no other class.
        known = fedavg(rows="owners", unknown="masked" if label_type == "multilabel" else "negative")
        for kind, name, term in CONFIDENT:
            none, some = (kind(local=LOCAL, **{name: term(weight=w, thresholds=EASY)}) for w in (0, 1))
            cases[f"{kind.__name__.lower()} {label_type}"] = Case(none, known, some, label_type)
    return cases


CASES = without_a_part()


@cache
def ended(
    method: Any, label_type: LabelType, model: ModelSpec, rounds: int, sites: tuple[Any, ...]
) -> GlobalModel:
    """The model after the rounds at sites that annotate these classes."""
    with patch.dict(trial.SITES, dict(sites), clear=True):
        return federated(method, label_type, model=model, rounds=rounds)


def holds(case: Case, sites: Mapping[str, tuple[str, ...]] = trial.SITES) -> bool:
    of = case.label_type, case.rounds, tuple(sites.items())
    two = ended(case.two, of[0], case.model, *of[1:])
    if case.other is not None:
        assert not same(ended(case.other, of[0], SMALL, *of[1:]), two)
    return same(ended(case.one, of[0], SMALL, *of[1:]), two)


@pytest.mark.complete
@pytest.mark.parametrize("case", CASES)
def test_without_its_part_it_is_another_method(case: str) -> None:
    assert holds(CASES[case])


def where_all_is_known() -> dict[str, Case]:
    """At sites that annotate every class and have images of each."""
    unsuppressed = FedVLS(local=LOCAL, suppression=LogitSuppression(weight=0))
    undistilled = FedVLS(local=LOCAL, vacant=VacantDistillation(weight=0))
    unlabelled = FedPU(local=LOCAL, positive_unlabelled=PositiveUnlabelled(prior=0.2))
    cases = {
        "fedpu": Case(unlabelled, fedavg(), None, "multiclass"),
        # e does not show beside a share.
        "fedvls suppressing": Case(undistilled, FedVLS(local=LOCAL), unsuppressed, "multiclass"),
        "fedvls distilling": Case(unsuppressed, fedavg(softmax="balanced"), undistilled, "multiclass"),
    }
    for label_type in ("multilabel", "multiclass"):
        one = ConDist(local=LOCAL, distil=Distillation(**CONSTANT))
        cases[f"condist {label_type}"] = Case(one, fedavg(), None, label_type)
        # Under the job's augmentation, here none. No second view is drawn: it would move batch norm.
        for kind, name, term in CONFIDENT:
            seen = kind(local=LOCAL, **{name: term(thresholds=EASY, weak=PLAIN)})
            cases[f"{kind.__name__.lower()} {label_type}"] = Case(seen, fedavg(), None, label_type)
    return cases


KNOWN = where_all_is_known()


@pytest.mark.complete
@pytest.mark.parametrize("case", KNOWN)
def test_where_all_is_known_it_is_another_method(case: str) -> None:
    assert holds(KNOWN[case], dict.fromkeys(("alpha", "beta"), trial.CLASSES))


@pytest.mark.complete
def test_both_parts_of_fedvls_have_an_effect_where_classes_are_vacant() -> None:
    one = federated(FedVLS(local=LOCAL), "multiclass")
    for part in ({"vacant": VacantDistillation(weight=0)}, {"suppression": LogitSuppression(weight=0)}):
        assert not same(one, federated(FedVLS(local=LOCAL, **part), "multiclass"))


@pytest.mark.complete
@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_with_one_owner_of_each_class_and_no_teacher_ark_is_surgical_aggregation(
    label_type: LabelType,
) -> None:
    """A row's mean over one site is that site's own."""
    plain, none = SurgicalAggregation(local=LOCAL), Ark(local=LOCAL, momentum=0, consistency=0)
    assert not holds(Case(none, plain, None, label_type, WITH_NECK))
    alone = {"alpha": ("Mass", "Nodule"), "beta": ("Hernia",), "gamma": ("Fibrosis",)}
    assert holds(Case(none, plain, Ark(local=LOCAL, momentum=0), label_type, WITH_NECK), alone)
