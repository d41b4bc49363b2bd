"""What every registered method must hold; a new one is tested by being registered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from rounds import conformant, train_round
from suture.learning.samples import TARGET
from suture.methods import METHODS
from suture.methods.base import RoundContext
from suture.models.classifier import Classifier, frozen_copy
from suture_results.report import write_report
from suture_synthetic.method_checks import (
    CHECKS,
    Subject,
    begin,
    end,
    federations_run_and_repeat,
    run_checks,
    subject_of,
)
from suture_synthetic.trial import CLASSES, least_rounds

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
    "fixmatch": {"label_view", "unknown"}
    | {f"pseudo_labels.{name}" for name in ("thresholds", "weak", "strong", "keep", "among")},
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
    "afl": {
        "one_site_alone_decides",  # a site sends sums, so there are no rows of its own to adopt
        "training_lowers_the_loss",  # the first round has the solution, and the others repeat it
        "optimiser_state_carries_over",  # it has no optimiser
    }
}

ALL = pytest.mark.parametrize("name", sorted(METHODS), scope="module")
"""A test after the other of one method, so that they share its federations."""

FAST = {"creff", "fedavg", "fedlsm", "pmfl", "surgical"}
"""Methods whose half at the sites the fast tests check: one with each way of training."""

AT_THE_SERVER = {
    "it_describes_itself",
    "aggregation_is_a_function_of_the_updates",
    "aggregation_takes_copies",
    "one_site_alone_decides",
    "a_robust_merge_can_replace_its_mean",
    "aggregation_returns_the_channels",
    "a_class_that_nobody_sent_keeps_its_row",
    "unknown_labels_have_no_gradient",
}
"""Checks that train nothing."""

OF_A_FEDERATION = {"training_lowers_the_loss", "federations_run_and_repeat"}
EVERY = {check.__name__ for check in CHECKS}


@functools.lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    method, exempt = conformant(name), EXEMPT.get(name, set())
    if hasattr(method, "class_weights") and method.labels.types == ("multiclass",):
        exempt = {*exempt, "class_weights"}  # of binary cross-entropies alone
    return subject_of(method, exempt=exempt)


def keeps(name: str, checks: Collection[str]) -> None:
    kept = checks - SKIPPED.get(name, set())
    run_checks(subject(name), [check for check in CHECKS if check.__name__ in kept])


@ALL
def test_its_half_at_the_server_keeps_the_contract(name: str) -> None:
    keeps(name, AT_THE_SERVER)


@ALL
def test_a_federation_learns_and_shows_sites_what_is_declared(name: str) -> None:
    """Of each type of labels."""
    federations_run_and_repeat(subject(name), ())
    keeps(name, {"training_lowers_the_loss"})
    for label_type in subject(name).label_types:
        federation = end(subject(name), label_type)
        every = {TARGET} if METHODS[name]().labels.view == "target" else set(CLASSES)
        assert set(federation.metrics()["auroc"]) == every
        assert write_report(federation.folder / "run").is_file()


@pytest.mark.complete
@ALL
def test_a_federation_repeats(name: str) -> None:
    """That of the first type of labels: with every type a round does."""
    federations_run_and_repeat(subject(name), subject(name).label_types[:1])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.complete) for name in sorted(METHODS)],
)
def test_its_half_at_the_sites_keeps_the_contract(name: str) -> None:
    keeps(name, EVERY - AT_THE_SERVER - OF_A_FEDERATION)


@pytest.mark.parametrize(
    "name", [n for n in sorted(METHODS) if METHODS[n]().labels.view != "target"], scope="module"
)
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
    trial = begin(subject(name), method.labels.types[0])
    payload = trial.payload("gamma")
    for phase in method.phases(least_rounds(method) + 1):
        train_round(method, trial.context("gamma", payload), payload, RoundContext(1, phase, 1))
    for model, before in copies:
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for key, buffer in model.named_buffers():
            # FedLSM's teacher follows the student.
            assert name == "fedlsm" or torch.equal(buffer, before[key]), key
