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
    # Views and thresholds have tests of their own; a few steps on 18 images do not show them all.
    "fedlsm": {f"teaching.{name}" for name in ("weak", "strong", "mixed_positive", "mixed_negative", "ema")},
    # What the prior sees differs under augmentation alone; the program's loss needs a second head.
    "fedmas": {"prior_view", "supervision"},
    # Their terms take one value of these; the other one is refused. Thresholds and views as for FedLSM.
    "condist": {"label_view", "unknown"},
    "fssl": {"label_view", "unknown", "received_labels.thresholds", "received_labels.strong"},
    "fedpu": {"label_view", "unknown"},
    # Whole units are those of an LSTM.
    "pmfl": {"share.of"},
}

ALL = pytest.mark.parametrize("name", sorted(METHODS))


def subject(name: str) -> Subject:
    return subject_of(conformant(name), exempt=EXEMPT.get(name, ()))


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
