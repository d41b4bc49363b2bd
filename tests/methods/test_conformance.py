"""What every registered method must hold; a new one is tested by being registered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rounds import conformant, train_round
from suture.learning.samples import TARGET
from suture.methods import METHODS
from suture.methods.base import RoundContext
from suture.models.classifier import Classifier, frozen_copy
from suture.simulation.method_checks import (
    CHECKS,
    SMALL,
    Subject,
    federations_run_and_repeat,
    subject_of,
)
from suture.simulation.trial import Trial, least_rounds

EXEMPT = {
    # It must see all classes, and takes no re-training: another head predicts.
    "creff": {"label_view", "retrain"},
    # Views and thresholds have tests of their own; a few steps on 18 images do not show them all.
    "fedlsm": {f"teaching.{name}" for name in ("weak", "strong", "mixed_positive", "mixed_negative")},
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

SKIPPED = {
    ("afl", "one_site_alone_decides"),  # a site sends sums, so there are no rows of its own to adopt
    ("afl", "training_lowers_the_loss"),  # the first round has the solution, and the others repeat it
    ("afl", "optimiser_state_carries_over"),  # it has no optimiser
}

TAUGHT = {
    "ark",
    "condist",
    "fedlsm",
    "fedmlp",
    "fednml",
    "fedprox",
    "fedpu",
    "fedvls",
    "fixmatch",
    "fssl",
    "moon",
}
"""The methods that look at the received model while they train."""

ALL = pytest.mark.parametrize("name", sorted(METHODS))


def subject(name: str) -> Subject:
    method, exempt = conformant(name), EXEMPT.get(name, set())
    if hasattr(method, "class_weights") and method.labels.types == ("multiclass",):
        exempt = {*exempt, "class_weights"}  # of binary cross-entropies alone
    return subject_of(method, exempt=exempt)


@ALL
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_keeps_the_contract(name: str, check: Any) -> None:
    if (name, check.__name__) not in SKIPPED:
        one = subject(name)
        # In `training_lowers_the_loss` a federation of every type of labels runs, so one is enough to repeat.
        if check is federations_run_and_repeat and (name, "training_lowers_the_loss") not in SKIPPED:
            one = replace(one, types=one.label_types[:1])
        check(one)


@pytest.mark.parametrize("name", [n for n in sorted(METHODS) if METHODS[n]().labels.view != "target"])
def test_copies_of_the_received_model_stay_in_eval_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every phase: a teacher in training mode has statistics of the batch, and moves its own."""
    copies: list[tuple[Classifier, dict[str, Tensor]]] = []

    def recorded(model: Classifier) -> Classifier:
        made = frozen_copy(model)
        copies.append((made, {key: buffer.clone() for key, buffer in made.named_buffers()}))
        return made

    for module in [
        m for key, m in sys.modules.items() if key.startswith(("suture.methods.", "suture_papers."))
    ]:
        if getattr(module, "frozen_copy", None) is frozen_copy:
            monkeypatch.setattr(module, "frozen_copy", recorded)
    method = subject(name).method
    with Trial(method, SMALL, method.labels.types[0]) as trial:
        payload = trial.payload("gamma")
        for phase in method.phases(least_rounds(method) + 1):
            train_round(method, trial.context("gamma", payload), payload, RoundContext(1, phase, 1))
    assert bool(copies) == (name in TAUGHT)
    for model, before in copies:
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for key, buffer in model.named_buffers():
            # FedLSM's teacher follows the student.
            assert name == "fedlsm" or torch.equal(buffer, before[key]), key


@pytest.mark.parametrize("name", [n for n in sorted(METHODS) if "multilabel" in conformant(n).labels.types])
def test_figures_of_every_class_are_written(name: str, tiny: Any) -> None:
    """Of images with several labels; those of a single one are among the checks."""
    folder = Path(tiny(replace(conformant(name)), rounds=1).run().record.folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    every = {TARGET} if METHODS[name]().labels.view == "target" else {"Fibrosis", "Hernia", "Mass", "Nodule"}
    assert set(metrics["auroc"]) == every
