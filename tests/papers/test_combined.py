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
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
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
from suture_synthetic.trial import Trial

TYPES: tuple[LabelType, ...] = ("multilabel", "multiclass")


EASY = Thresholds(positive=0.51, negative=0.49, best=0.3)
"""A model is soon as sure as this."""

PAIRS: dict[str, tuple[Method, Method]] = {
    "nothing is FedAvg": (
        Combined(local=LOCAL, rows="all", unknown="negative"),
        FedAvg(local=LOCAL),
    ),
    "a proximal term is FedProx": (
        Combined(local=LOCAL, rows="all", unknown="negative", proximal=Proximal(0.5)),
        FedProx(local=LOCAL, proximal=Proximal(0.5)),
    ),
    "a restriction is FedRS": (
        Combined(local=LOCAL, rows="all", unknown="negative", restricted=Restricted()),
        FedRS(local=LOCAL),
    ),
    "a distillation is ConDist": (
        Combined(local=LOCAL, distil=Distillation(first=0.5)),
        ConDist(local=LOCAL, distil=Distillation(first=0.5)),
    ),
    "labels of the received model are FSSL": (
        Combined(local=LOCAL, received_labels=ReceivedLabels(thresholds=EASY)),
        FSSL(local=LOCAL, received_labels=ReceivedLabels(thresholds=EASY)),
    ),
    "labels of its own are FixMatch": (
        Combined(local=LOCAL, pseudo_labels=PseudoLabels(thresholds=EASY)),
        FixMatch(local=LOCAL, pseudo_labels=PseudoLabels(thresholds=EASY)),
    ),
    "own labels, equal sites and no class weights are Surgical Aggregation": (
        Combined(local=LOCAL, label_view="own", weights="equal", class_weights="none"),
        SurgicalAggregation(local=LOCAL),
    ),
}


@pytest.mark.complete
@pytest.mark.parametrize("label_type", TYPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_one_part_is_its_method_bit_for_bit(pair: str, label_type: LabelType) -> None:
    one, two = PAIRS[pair]
    assert same(federated(one, label_type), federated(two, label_type))


OF_ONE_LABEL: dict[str, tuple[Method, Method]] = {
    "a suppression and a distillation of vacant classes are FedVLS": (
        Combined(
            local=LOCAL,
            rows="all",
            unknown="negative",
            suppression=LogitSuppression(),
            vacant=VacantDistillation(),
        ),
        FedVLS(local=LOCAL),
    ),
    "unlabelled images of other classes are FedPU": (
        Combined(local=LOCAL, rows="all", unknown="negative", positive_unlabelled=PositiveUnlabelled()),
        FedPU(local=LOCAL),
    ),
    "confident labels and a balanced softmax are FSSL with it": (
        Combined(local=LOCAL, softmax="balanced", received_labels=ReceivedLabels(thresholds=EASY)),
        FSSL(local=LOCAL, softmax="balanced", received_labels=ReceivedLabels(thresholds=EASY)),
    ),
}


@pytest.mark.complete
@pytest.mark.parametrize("pair", OF_ONE_LABEL)
def test_one_part_of_one_label_is_its_method_bit_for_bit(pair: str) -> None:
    one, two = OF_ONE_LABEL[pair]
    assert same(federated(one, "multiclass"), federated(two, "multiclass"))


@pytest.mark.parametrize("loss", [{}, {"focal": Focal()}, {"calibrated": Calibrated()}])
def test_with_confident_labels_the_softmax_of_any_loss_is_over_all_classes(loss: dict[str, Any]) -> None:
    """A row of others' classes has a gradient of labelled images; without such labels it has none."""
    logits, y, known = (
        torch.zeros(1, 3, requires_grad=True),
        torch.eye(3)[:1],
        torch.tensor([[True, True, False]]),
    )
    for more, moved in (({}, False), ({"received_labels": ReceivedLabels()}, True)):
        method = Combined(local=LOCAL, **loss, **more)
        with Trial(method, ModelSpec("cnn", size=16), "multiclass") as trial:
            payload = trial.payload("alpha")
            site = trial.context("alpha", payload)
            site = replace(site, samples={"train": replace(site.samples["train"], y=torch.eye(3))})
            of_round = method.supervised.of(site, payload, LocalRound(LOCAL, "average", 1, 1))
        for of in (of_round, partial(method.loss, label_type="multiclass")):
            (slope,) = torch.autograd.grad(of(logits, y, known), logits)
            assert (slope[0, 2] != 0) == moved


@pytest.mark.complete
def test_two_terms_are_both_there() -> None:
    both = federated(
        Combined(local=LOCAL, proximal=Proximal(0.5), distil=Distillation(first=0.5)), "multilabel"
    )
    for one in (
        Combined(local=LOCAL, proximal=Proximal(0.5)),
        Combined(local=LOCAL, distil=Distillation(first=0.5)),
    ):
        alone = federated(one, "multilabel")
        assert not torch.equal(both.head["head.weight"], alone.head["head.weight"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "distillation of classes that are taught as absent": (
        {"distil": Distillation(), "unknown": "negative"},
        "Distillation learns from .* what the site does not annotate; set method.unknown=masked",
    ),
    "distillation of classes that the site does not see": (
        {"distil": Distillation(), "label_view": "own"},
        "Distillation .*; set method.label_view=all, or leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        Combined(**settings)


def test_a_setting_of_a_part_adds_the_part() -> None:
    job = with_settings(
        load_job("demo"), ["method=combined", "method.distil.last=0.5", "method.weights=equal"]
    )
    assert job.method == Combined(
        local=job.method.local,
        batch_norm=job.method.batch_norm,
        distil=Distillation(last=0.5),
        weights="equal",
    )
    settings = settings_of(job)
    assert settings["method.distil.last"] == 0.5
    assert settings["method.proximal"] is None
    with pytest.raises(ConfigError, match=r"did you mean 'method\.distil\.last'"):
        with_settings(job, ["method.distil.lst=1"])


def test_a_job_is_refused_with_the_reason_of_a_part() -> None:
    job = with_settings(load_job("demo"), ["method=combined", "method.distil.last=0.5"])
    with pytest.raises(ConfigError, match=r"set method\.unknown=masked, or leave it out"):
        with_settings(job, ["method.unknown=negative"])
