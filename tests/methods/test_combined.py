"""Parts of several methods in one job: the same bytes as the methods alone, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel, Method
from suture.methods.combined import Combined
from suture.methods.condist import ConDist, Distillation
from suture.methods.fedavg import FedAvg
from suture.methods.fedprox import FedProx, Proximal
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.simulation.job import load_job, settings_of, with_settings
from suture.simulation.trial import Trial

LOCAL = LocalTraining(lr=1e-2, batch_size=8)
TYPES: tuple[LabelType, ...] = ("multilabel", "multiclass")


def trained(method: Method, label_type: LabelType) -> GlobalModel:
    with Trial(method, ModelSpec("cnn", size=16), label_type, rounds=2) as trial:
        trial.run()
        return trial.server.model


def assert_same(one: GlobalModel, two: GlobalModel) -> None:
    for group in ("shared", "head"):
        a, b = getattr(one, group), getattr(two, group)
        assert a.keys() == b.keys()
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


PAIRS: dict[str, tuple[Method, Method]] = {
    "nothing is FedAvg": (
        Combined(local=LOCAL, rows="all", unknown="negative"),
        FedAvg(local=LOCAL),
    ),
    "a proximal term is FedProx": (
        Combined(local=LOCAL, rows="all", unknown="negative", proximal=Proximal(0.5)),
        FedProx(local=LOCAL, proximal=Proximal(0.5)),
    ),
    "a distillation is ConDist": (
        Combined(local=LOCAL, distil=Distillation(first=0.5)),
        ConDist(local=LOCAL, distil=Distillation(first=0.5)),
    ),
    "own labels, equal sites and no class weights are Surgical Aggregation": (
        Combined(local=LOCAL, label_view="own", weights="equal", class_weights="none"),
        SurgicalAggregation(local=LOCAL),
    ),
}


@pytest.mark.parametrize("label_type", TYPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_one_part_is_its_method_bit_for_bit(pair: str, label_type: LabelType) -> None:
    one, two = PAIRS[pair]
    assert_same(trained(one, label_type), trained(two, label_type))


def test_two_terms_are_both_there() -> None:
    both = trained(
        Combined(local=LOCAL, proximal=Proximal(0.5), distil=Distillation(first=0.5)), "multilabel"
    )
    for one in (
        Combined(local=LOCAL, proximal=Proximal(0.5)),
        Combined(local=LOCAL, distil=Distillation(first=0.5)),
    ):
        alone = trained(one, "multilabel")
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
