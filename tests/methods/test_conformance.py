"""What every registered method must hold; a new one is tested by being registered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rounds import conformant
from suture.learning.samples import TARGET
from suture.methods import METHODS
from suture.simulation.method_checks import CHECKS, Subject, subject_of

EXEMPT = {
    # It must see all classes, and takes no re-training: another head predicts.
    "creff": {"label_view", "retrain"},
    # Views and thresholds have tests of their own; a few steps on 18 images do not show them all.
    "fedlsm": {f"teaching.{name}" for name in ("weak", "strong", "mixed_positive", "mixed_negative", "ema")},
    # What the prior sees differs under augmentation alone; the program's loss needs a second head.
    "fedmas": {"prior_view", "supervision"},
    # What it restricts, and its own softmax; the other value is refused.
    "fedrs": {"label_view", "unknown"},
    "focal": {"softmax"},
    # It takes one value of these; the other one is refused. A few steps on 18 images do not show its views.
    "fedmlp": {"label_view", "unknown", "weak"},
    # Likewise; and two rounds have no second refinement.
    "fednml": {"label_view", "unknown", "soft_labels.every"},
    # Their terms take one value of these; the other one is refused. Thresholds and views as for FedLSM.
    "condist": {"label_view", "unknown"},
    "fssl": {
        "label_view",
        "unknown",
        *(f"received_labels.{name}" for name in ("thresholds", "weak", "strong")),
    },
    "fixmatch": {
        "label_view",
        "unknown",
        "pseudo_labels.thresholds",
        "pseudo_labels.weak",
        "pseudo_labels.strong",
        "pseudo_labels.keep",
        "pseudo_labels.among",
    },
    "fedpu": {"label_view", "unknown"},
    # As above; and one term of the loss may be below 0, so a large weight of it is no sign of a mistake.
    "fedvls": {"label_view", "softmax", "suppression"},
    # Their losses are softmaxes of their own, and refuse another.
    "fedlc": {"softmax"},
    "ldam": {"softmax"},
    # They need unknown=negative; test_combined.py has them with it.
    "combined": {"restricted", "positive_unlabelled"},
    # Whole units are those of an LSTM.
    "pmfl": {"share.of"},
}

ALL = pytest.mark.parametrize("name", sorted(METHODS))


def subject(name: str) -> Subject:
    method, exempt = conformant(name), EXEMPT.get(name, set())
    if hasattr(method, "class_weights") and method.label_types == ("multiclass",):
        exempt = {*exempt, "class_weights"}  # of binary cross-entropies alone
    return subject_of(method, exempt=exempt)


@ALL
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_keeps_the_contract(name: str, check: Any) -> None:
    check(subject(name))


@pytest.mark.parametrize("name", [n for n in sorted(METHODS) if "multilabel" in conformant(n).label_types])
def test_figures_of_every_class_are_written(name: str, tiny: Any) -> None:
    """Of images with several labels; those of a single one are among the checks."""
    folder = Path(tiny(replace(conformant(name)), rounds=1).run().record.folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    every = {TARGET} if METHODS[name].labels.single_target else {"Fibrosis", "Hernia", "Mass", "Nodule"}
    assert set(metrics["auroc"]) == every
