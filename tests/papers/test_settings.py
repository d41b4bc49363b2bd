"""What methods cannot do is refused where their settings, their model or their labels are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture.federation.server.checks import check_label_type
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.composed import check_needs
from suture.methods.retraining import Retraining
from suture.models import ModelSpec
from suture_papers.ark.ark import Ark
from suture_papers.closed_form.afl import AFL
from suture_papers.drift.fedprox import Proximal
from suture_papers.drift.moon import MOON, Contrastive
from suture_papers.fedlsm.mean_teacher import Teaching
from suture_papers.metafl.inner_loop import INNER
from suture_papers.metafl.pmfl import PMFL
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fedalign import FedAlign
from suture_papers.missing_labels.fedrs import Restricted
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels
from suture_papers.missing_labels.fssl import ReceivedLabels
from suture_papers.rare_classes.creff import CReFF
from suture_papers.rare_classes.focal import Focal
from suture_papers.rare_classes.ldam import LDAM
from suture_synthetic.method_checks import SMALL
from world import refused

NUMBERS: list[tuple[Any, dict[str, float]]] = [
    (Ark, {"momentum": 1.0}),
    (Ark, {"momentum": -0.1}),
    (Ark, {"consistency": -1.0}),
    (Proximal, {"mu": -0.1}),
    (Contrastive, {"tau": 0.0}),
    (Restricted, {"alpha": -0.1}),
    (Restricted, {"alpha": 1.1}),
    (Focal, {"gamma": -1.0}),
]

ALL_CLASSES = ("condist", "creff", "fedmlp", "fednml", "fedpu", "fedrs", "fedvls", "fixmatch", "fssl")
UNKNOWN = ("condist", "fedmlp", "fednml", "fixmatch", "fssl")

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"label_view": "own"}, "label_view=all") for name in ALL_CLASSES),
    *((name, {"unknown": "negative"}, "method.unknown=masked") for name in UNKNOWN),
    *((name, {"unknown": "masked"}, "method.unknown=negative") for name in ("fedpu", "fedrs")),
    *((name, {"softmax": "balanced"}, "method.softmax") for name in ("fedlc", "fedvls", "focal", "ldam")),
    ("creff", {"retrain": Retraining()}, "method.retrain"),
    ("afl", {"local": LocalTraining(warmup_epochs=1)}, "warm-up"),
    ("pmfl", {"batch_norm": "average"}, "batch norm"),
    *(("pmfl", {"local": replace(INNER, **local)}, "inner loop") for local in (
        {"optimiser": "adam"}, {"iterations": None}, {"clip": 1.0}, {"batch_size": 8}, {"epochs": 2},
        {"betas": (0.5, 0.999)}, {"warmup_epochs": 1},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), NUMBERS)
def test_numbers_out_of_their_range_are_refused(kind: Any, settings: dict[str, float]) -> None:
    with refused(*settings, by=ValidationError):
        kind(**settings)


@pytest.mark.parametrize(("name", "settings", "named"), SETTINGS)
def test_settings_without_sense_are_refused(name: str, settings: dict[str, Any], named: str) -> None:
    with refused(named, by=ConfigError):
        METHODS[name](**settings)


def test_thresholds_and_second_views_that_contradict_each_other_are_refused() -> None:
    with refused("negative", "positive", by=ConfigError):
        Thresholds(positive=0.2, negative=0.3)
    with refused("PseudoLabels", "ReceivedLabels", by=ConfigError):
        check_needs((PseudoLabels(), ReceivedLabels()), FixMatch().labels)


@pytest.mark.parametrize("value", [1.0, 0.0, -3, 0, True, "0.2", 1.5, float("nan")])
def test_a_subset_of_fedlsm_is_a_share_or_a_number_of_images(value: Any) -> None:
    for name in ("confident", "uncertain"):
        with refused(name, by=ConfigError):
            parse(Teaching, {name: value}, "teaching")
    how = parse(Teaching, {"confident": 0.5, "uncertain": 1}, "teaching")
    assert (how.confident, how.uncertain, type(how.uncertain)) == (0.5, 1, int)


@pytest.mark.parametrize(
    ("method", "model", "named"),
    [
        (FixMatch(), ModelSpec("lstm"), "lstm"),
        (AFL(), replace(SMALL, hidden=4), "AFL"),
        (AFL(), replace(SMALL, neck=4), "AFL"),
        (AFL(), replace(SMALL, projection=4), "AFL"),
        (AFL(), replace(SMALL, head="cosine"), "AFL"),
        (CReFF(), ModelSpec(head="cosine"), "model.head=linear"),
        (CReFF(), ModelSpec(second_head=True), "model.head=linear"),
        (LDAM(), replace(SMALL, head="dot"), "model.head=cosine"),
    ],
)
def test_a_model_of_another_kind_is_refused(method: Any, model: ModelSpec, named: str) -> None:
    with refused(named, by=ConfigError):
        method.adapted(model)


@pytest.mark.parametrize(
    ("method", "given", "adapted"),
    [
        (MOON(), {}, {"neck": 256}),
        (MOON(), {"neck": 32}, {"neck": 32}),
        (Ark(), {"projection": 8}, {"neck": 256, "projection": 0}),
        (Ark(), {"neck": 32}, {"neck": 32}),
        (LDAM(), {}, {"head": "cosine"}),
        (AFL(), {}, {"train": "head"}),
        (FedAlign(), {}, {"neck": 256, "head": "anchors", "row_init": "named"}),
        (FedAlign(), {"neck": 64}, {"neck": 64}),
        (CReFF(), {}, {}),
        (FixMatch(), {}, {}),
    ],
)
def test_a_model_is_adapted(method: Any, given: dict[str, Any], adapted: dict[str, Any]) -> None:
    model = method.adapted(replace(SMALL, **given))
    assert {name: getattr(model, name) for name in adapted} == adapted


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (("creff", "fedlc", "fedpu", "fedvls", "focal", "ldam"), "multilabel"),
        (("fedmlp", "fednml"), "multiclass"),
    ],
)
def test_labels_of_the_other_type_are_refused(names: tuple[str, ...], other: Any) -> None:
    for name in names:
        method = METHODS[name]()
        with refused(method.about.title, by=ConfigError):
            check_label_type(method, other)


def test_a_share_of_no_row_is_refused(tiny: Any) -> None:
    from suture.methods.base import Share

    with refused("share.fraction", by=ConfigError):
        tiny(PMFL(share=Share(1e-6), batches=2)).run()
