"""The conformance suite sees the mistakes that it is there for: mutants of FedProx, each with one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.learning.training import LocalRound, SiteContext
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, hyperparameters
from suture.models.classifier import Classifier
from suture.protocol.messages import Payload, Update
from suture.simulation import method_checks as checks
from suture.simulation.method_checks import check_method, subject_of

Trained = tuple[Update, dict[str, Tensor]]


@hyperparameters
class FedProx(LocalAveraging):
    """FedProx (Li et al., MLSys 2020): L + mu/2 ||w - w_received||^2."""

    about = About("fedprox", "FedProx", "Li et al., MLSys 2020")
    labels = LabelUse(view="own")
    sign: ClassVar[int] = 1
    mu: float = 0.01

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        distance = sum(((w - received).square().sum() for w, received in pairs), start=batch.y.new_zeros(()))
        return super().objective(model, batch, reference) + self.sign * self.mu / 2 * distance


class FlippedSign(FedProx):
    sign: ClassVar[int] = -1


class RaisesForOneLabel(FedProx):
    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        if label_type == "multiclass":
            raise NotImplementedError(label_type)
        return super().loss(logits, y, known, label_type)


class IgnoresOwnRate(FedProx):
    def train(self, site: SiteContext, received: Payload, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, local=self.local))


class IgnoresPhase(FedProx):
    def train(self, site: SiteContext, received: Payload, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, head_only=False))


class IgnoresOptimiserState(FedProx):
    def train(self, site: SiteContext, received: Payload, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, optimiser_state={}))


class IgnoresHyperparameter(FedProx):
    sign: ClassVar[int] = 0


class DrawsGlobally(FedProx):
    """Its own random numbers, of no seed."""

    calls: ClassVar[list[int]] = []

    def train(self, site: SiteContext, received: Payload, round_: LocalRound) -> Trained:
        self.calls.append(1)
        return super().train(site, received, replace(round_, seed=len(self.calls)))


class TeachesTheUnknown(FedProx):
    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits, y, known | True, label_type)


MUTANTS: list[tuple[type[FedProx], Callable[..., None], str]] = [
    (FlippedSign, checks.losses_are_never_negative, "the mean loss of a round is -"),
    (RaisesForOneLabel, checks.unknown_labels_have_no_gradient, "the method raised NotImplementedError"),
    (IgnoresOwnRate, checks.a_sites_own_learning_rate_is_used, "own learning rate is not used"),
    (IgnoresPhase, checks.a_warm_up_trains_the_head_alone, "the warm-up of the head trains backbone"),
    (IgnoresOptimiserState, checks.optimiser_state_carries_over, "the round before changes nothing"),
    (IgnoresHyperparameter, checks.every_hyperparameter_matters, "mu changes nothing"),
    (DrawsGlobally, checks.federations_run_and_repeat, "a second run gives other bytes"),
    (TeachesTheUnknown, checks.unknown_labels_have_no_gradient, "an unknown label changes the gradient"),
]


def test_fedprox_passes() -> None:
    check_method(FedProx())


@pytest.mark.parametrize(
    ("mutant", "check", "found"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mutant_fails_by_the_check_that_is_for_it(
    mutant: type[FedProx], check: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (check,))
    with pytest.raises(AssertionError, match=f"fedprox: {check.__name__}: .*{found}"):
        check_method(mutant())


def test_a_hyperparameter_of_which_no_other_value_is_known_is_asked_for() -> None:
    @hyperparameters
    class Named(FedProx):
        anchor: str = "a"

    with pytest.raises(AssertionError, match=r"give one as variants=\{'anchor': ...\}"):
        checks.every_hyperparameter_matters(subject_of(Named()))
    with pytest.raises(AssertionError, match="anchor changes nothing"):
        checks.every_hyperparameter_matters(subject_of(Named(), variants={"anchor": "b"}))
    checks.every_hyperparameter_matters(subject_of(Named(), exempt={"anchor"}))
