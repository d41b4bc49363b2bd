"""The conformance suite sees the mistakes that it is there for: mutants of FedProx, each with one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rounds import conformant
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.federation.server.exchanges import Assigner, Task
from suture.learning.training import Fitted, LocalRound, LocalTraining, SiteContext
from suture.methods import METHODS
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, GlobalModel, LabelUse, RoundContext, hyperparameters
from suture.models.classifier import Classifier
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Channel, Egress, Layout, add_prefix, strip_prefix
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Transport
from suture.testing import check_method
from suture_synthetic import method_checks as checks
from suture_synthetic.method_checks import subject_of
from suture_synthetic.trial import Trial

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
    def train(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, local=self.local))


class IgnoresPhase(FedProx):
    def train(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, head_only=False))


class IgnoresOptimiserState(FedProx):
    def train(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Trained:
        return super().train(site, received, replace(round_, optimiser_state={}))


class IgnoresHyperparameter(FedProx):
    sign: ClassVar[int] = 0


class DrawsGlobally(FedProx):
    """Its own random numbers, of no seed."""

    calls: ClassVar[list[int]] = []

    def train(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Trained:
        self.calls.append(1)
        return super().train(site, received, replace(round_, seed=len(self.calls)))


class TeachesTheUnknown(FedProx):
    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits, y, known | True, label_type)


class IgnoresTheMask(FedProx):
    """Its loss masks, and its step does not: what is unknown is taught as absent."""

    labels = LabelUse(view="all")

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch.inputs), torch.nan_to_num(batch.y))


class IgnoresTheMaskOfItsOwn(IgnoresTheMask):
    """The same where a site sees no class but its own, some labels of which are unknown."""

    labels = LabelUse(view="own")


class CountsColumns(FedProx):
    """The loss of a class depends on where it stands among the others."""

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits * torch.arange(1, logits.shape[1] + 1), y, known, label_type)


class KeepsTheModel(FedProx):
    """Its sites learn, and nothing becomes of it."""

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        super().aggregate(previous, updates, ctx)
        return previous


class ChangesUpdates(FedProx):
    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        for update in updates:
            update.head["head.bias"].add_(1)
        return previous


class TakesATensor(FedProx):
    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return replace(previous, shared={"w": next(iter(updates)).shared["w"].view(-1)})


class TakesOneSite(FedProx):
    """Not the mean, as which a robust merge would take it."""

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return super().aggregate(previous, [next(iter(updates))], ctx)


class MovesByMomentum(FedProx):
    """The server's momentum goes on where no site sent a row."""

    labels = LabelUse(view="own")

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=(Channel("m", "server", layout.trained),))

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean, m = super().aggregate(previous, updates, ctx), strip_prefix("m", previous.channels)
        x, y = previous.trained, mean.trained
        m = {name: m[name] / 2 + y[name] - x[name] for name in x}
        moved = mean.moved_to({name: x[name] + m[name] for name in x})
        return replace(moved, channels=add_prefix("m", m))


class Undecorated(FedProx):
    """`anchor` is no hyperparameter."""

    anchor: float = 0.1


class UndecoratedValue(FedProx):
    """`mu` stays 0.01."""

    mu = 0.1


MUTANTS: list[tuple[type[FedProx], Callable[..., None], str]] = [
    (FlippedSign, checks.losses_are_never_negative, "the mean loss of a round is -"),
    (RaisesForOneLabel, checks.unknown_labels_have_no_gradient, "the method raised NotImplementedError"),
    (IgnoresOwnRate, checks.a_sites_own_learning_rate_is_used, "own learning rate is not used"),
    (IgnoresPhase, checks.a_warm_up_trains_the_head_alone, "the warm-up of the head trains backbone"),
    (IgnoresOptimiserState, checks.optimiser_state_carries_over, "the round before changes nothing"),
    (IgnoresHyperparameter, checks.every_hyperparameter_matters, "mu changes nothing"),
    (DrawsGlobally, checks.federations_run_and_repeat, "a second run gives different bytes"),
    (IgnoresTheMask, checks.unknown_labels_are_not_trained, "an unknown label changes the update"),
    (IgnoresTheMaskOfItsOwn, checks.unknown_labels_are_not_trained, "an unknown label changes the update"),
    (CountsColumns, checks.classes_are_known_by_name, "depends on the order of the classes"),
    (ChangesUpdates, checks.aggregation_takes_copies, "aggregation changes an update"),
    (TakesATensor, checks.aggregation_takes_copies, "w is a tensor of an update; clone it"),
    (TakesOneSite, checks.a_robust_merge_can_replace_its_mean, "w depends on more than the updates' mean"),
    (MovesByMomentum, checks.a_class_that_nobody_sent_keeps_its_row, "that no site sent changed"),
    (KeepsTheModel, checks.training_lowers_the_loss, "three rounds have the losses"),
    (Undecorated, checks.it_describes_itself, "anchor of Undecorated .* decorate it with @hyperparameters"),
    (UndecoratedValue, checks.it_describes_itself, "mu of UndecoratedValue .* decorate it"),
    (TeachesTheUnknown, checks.unknown_labels_have_no_gradient, "an unknown label changes the gradient"),
]


@pytest.mark.complete
def test_fedprox_passes() -> None:
    assert check_method(FedProx()) == len(checks.CHECKS)


@hyperparameters
class FedNova(LocalAveraging):
    """A site's change counts by 1 over its steps: FedNova whose tau_eff is the harmonic mean of these."""

    about = About("fednova", "FedNova", "Wang et al., NeurIPS 2020")
    labels = LabelUse()
    merges_by_mean = False

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), scalars={"steps": (1.0, 1e6)})

    def weigh(self, site: SiteContext, received: TaskData, round_: LocalRound, fitted: Fitted) -> Update:
        update = super().weigh(site, received, round_, fitted)
        return replace(update, scalars={"steps": float(fitted.steps)})

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        steps = [update.scalars["steps"] for update in updates]
        normalised = [
            replace(one, weight=1 / tau, class_weights=one.class_weights / tau)
            for one, tau in zip(updates, steps, strict=True)
        ]
        return super().aggregate(previous, normalised, ctx)


@pytest.mark.complete
def test_a_method_that_reads_what_it_declares_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_server = (
        checks.aggregation_is_a_function_of_the_updates,
        checks.aggregation_takes_copies,
        checks.one_site_alone_decides,
        checks.aggregation_returns_the_channels,
        checks.a_class_that_nobody_sent_keeps_its_row,
        checks.classes_are_known_by_name,
    )
    monkeypatch.setattr(checks, "CHECKS", of_the_server)
    assert check_method(FedNova()) == 6


def test_the_steps_of_a_round_are_those_of_its_batches() -> None:
    method = FedNova(local=LocalTraining(epochs=2, batch_size=8))
    with Trial(method, checks.SMALL, "multilabel") as trial:
        assert trial.update("alpha").scalars == {"steps": 2 * math.ceil(18 / 8)}


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (1.0, 1e6), (-math.inf, math.inf), (-math.inf, -5.0), (3.0, 3.0)]
)
def test_numbers_of_an_update_lie_in_their_range(low: float, high: float) -> None:
    drawn = [checks._draw(low, high, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(low <= number <= high and math.isfinite(number) for number in drawn)
    assert len(set(drawn)) == (1 if low == high else 20)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("mutant", "check", "found"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mutant_fails_by_the_check_that_is_for_it(
    mutant: type[FedProx], check: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (check,))
    with pytest.raises(AssertionError, match=f"fedprox: {check.__name__}: .*{found}"):
        check_method(mutant(), variants={"mu": 1.0})


@pytest.mark.complete
def test_every_failed_check_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tracebacks are those of the checks; `IgnoresTheMask` passes the last one."""

    class Wrong(RaisesForOneLabel, IgnoresTheMask):
        mu = 0.1

    tried = [
        checks.it_describes_itself,
        checks.unknown_labels_have_no_gradient,
        checks.unknown_labels_are_not_trained,
        checks.aggregation_takes_copies,
    ]
    monkeypatch.setattr(checks, "CHECKS", tuple(tried))
    with pytest.raises(AssertionError) as raised:
        check_method(Wrong())
    first, *lines = str(raised.value).splitlines()
    assert first == "fedprox: 3 of 4 checks fail"
    assert [line.split(": ")[1] for line in lines] == [check.__name__ for check in tried[:3]]
    assert "the method raised NotImplementedError: multiclass" in lines[1]
    cause = raised.value.__cause__
    assert isinstance(cause, ExceptionGroup)
    kinds = [type(error) for error in cause.exceptions]
    assert kinds == [AssertionError, NotImplementedError, AssertionError]


@pytest.mark.complete
def test_a_hyperparameter_of_which_no_other_value_is_known_is_asked_for() -> None:
    @hyperparameters
    class Named(FedProx):
        anchor: str = "a"

    def check(**settings: Any) -> None:
        checks.every_hyperparameter_matters(replace(subject_of(Named(), **settings), types=("multilabel",)))

    with pytest.raises(AssertionError, match=r"give one as variants=\{'anchor': ...\}"):
        check()
    with pytest.raises(AssertionError, match="anchor changes nothing"):
        check(variants={"anchor": "b"})
    check(exempt={"anchor"})


LINE = {
    "round": 2,
    "validation": {"loss": 0.5},
    "sites": {"a": {"train_loss": 0.25, "scalars": {"query_loss": 2.0}}, "b": {"train_loss": 0.5}},
}


@pytest.mark.parametrize(("name", "loss"), [("surgical", 0.5), ("fl", 0.75), ("pmfl", 2.5)])
def test_which_loss_must_fall_depends_on_what_is_sent(name: str, loss: float) -> None:
    assert checks._loss_of(METHODS[name](), LINE, "multilabel") == loss


@pytest.mark.parametrize(
    ("loss", "found"),
    [(None, "the loss of round 2 is missing"), (float("nan"), "the loss of round 2 is not finite")],
)
def test_a_loss_that_is_none_is_named(loss: float | None, found: str) -> None:
    with pytest.raises(AssertionError, match=f"multilabel: {found}"):
        checks._loss_of(FedProx(), LINE | {"validation": {"loss": loss}}, "multilabel")


@pytest.mark.complete
def test_rows_of_classes_that_a_site_may_not_see_are_found_without_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, others = Assigner.assign, {"head.others": torch.zeros(4, 2)}

    def leaking(self: Assigner, task: Task) -> dict[str, AllowedReply]:
        return {
            site: replace(allowed, task=replace(allowed.task, fixed=allowed.task.fixed | others))
            for site, allowed in plain(self, task).items()
        }

    monkeypatch.setattr(Assigner, "assign", leaking)
    with pytest.raises(AssertionError, match=r"alpha was sent \[2, 4\] rows and may see 2 classes"):
        checks.federations_run_and_repeat(subject_of(FedProx()))


class Nameless(LocalAveraging):
    labels = LabelUse()


@pytest.mark.parametrize(
    ("method", "found"),
    [
        (FedProx, r"FedProx is a class; check an instance of it: FedProx\(\)"),
        ("fedprox", "'fedprox' is not a method"),
        (Nameless(), "Nameless has no name; give it about"),
    ],
)
def test_what_is_no_instance_of_a_method_is_refused(method: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        check_method(method)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"variants": {"muu": 1.0}}, "unknown hyperparameter in variants 'muu'; did you mean 'mu'"),
        ({"exempt": {"loca"}}, "unknown hyperparameter in exempt 'loca'; did you mean 'local'"),
        ({"exempt": "muu"}, "unknown hyperparameter in exempt 'muu'; did you mean 'mu'"),
        ({"skip": {"one_site_decides"}}, "unknown check .*did you mean 'one_site_alone_decides'"),
    ],
)
def test_unknown_names_are_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        check_method(FedProx(), **settings)


def test_a_check_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    @hyperparameters
    class HalfStep(FedProx):
        def aggregate(
            self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext
        ) -> GlobalModel:
            after = super().aggregate(previous, updates, ctx)
            return replace(after, shared={k: (t + previous.shared[k]) / 2 for k, t in after.shared.items()})

    monkeypatch.setattr(checks, "CHECKS", (checks.one_site_alone_decides,))
    with pytest.raises(AssertionError, match="of the only site is not adopted"):
        check_method(HalfStep())
    check_method(HalfStep(), skip={"one_site_alone_decides"})


def test_an_exempt_hyperparameter_is_not_made_strong() -> None:
    checks.losses_are_never_negative(subject_of(FlippedSign(mu=0.0), exempt="mu"))


@pytest.mark.complete
@pytest.mark.parametrize("settings", [{"final_lr": 1e-4}, {"warmup_epochs": 1}])
def test_a_schedule_or_a_warm_up_is_no_other_learning_rate(settings: dict[str, Any]) -> None:
    checks.a_sites_own_learning_rate_is_used(subject_of(FedProx(local=LocalTraining(**settings))))


@pytest.mark.complete
@pytest.mark.parametrize(("name", "transport"), [("surgical", "int8"), ("pmfl", "float16")])
def test_the_checks_hold_where_weights_travel_in_fewer_bits(name: str, transport: Transport) -> None:
    subject = subject_of(conformant(name))
    subject = replace(subject, transport=transport, types=subject.label_types[:1])
    for check in set(checks.CHECKS) - {checks.every_hyperparameter_matters}:
        check(subject)
