"""The conformance suite sees the mistakes that it is there for: mutants of FedProx, each with one of them."""

from __future__ import annotations

import itertools
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
from suture.learning.training import LocalRound, LocalTraining, SiteContext
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
from world import refused

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


class IgnoresHyperparameter(FedProx):
    sign: ClassVar[int] = 0


def trains(change: Callable[[FedProx, LocalRound], LocalRound]) -> type[FedProx]:
    """It trains in another round than that which it was given."""

    class Trains(FedProx):
        def train(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Trained:
            return super().train(site, received, change(self, round_))

    return Trains


class RaisesForOneLabel(FedProx):
    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        if label_type == "multiclass":
            raise NotImplementedError(label_type)
        return super().loss(logits, y, known, label_type)


class TeachesTheUnknown(FedProx):
    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits, y, known | True, label_type)


class CountsColumns(FedProx):
    """The loss of a class depends on where it stands among the others."""

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits * torch.arange(1, logits.shape[1] + 1), y, known, label_type)


class IgnoresTheMask(FedProx):
    """Its loss masks, and its step does not: what is unknown is taught as absent."""

    labels = LabelUse(view="all")

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch.inputs), torch.nan_to_num(batch.y))


class IgnoresTheMaskOfItsOwn(IgnoresTheMask):
    """The same where a site sees no class but its own, some labels of which are unknown."""

    labels = LabelUse(view="own")


Merge = Callable[[GlobalModel, list[Update], Callable[[Iterable[Update]], GlobalModel]], GlobalModel]


def merges(merge: Merge) -> type[FedProx]:
    """It makes another model of the former one, the updates and their mean."""

    class Merges(FedProx):
        def aggregate(
            self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext
        ) -> GlobalModel:
            mean = super().aggregate
            return merge(previous, list(updates), lambda some: mean(previous, some, ctx))

    return Merges


def changes_updates(previous: GlobalModel, updates: list[Update], _: object) -> GlobalModel:
    for update in updates:
        update.head["head.bias"].add_(1)
    return previous


def takes_a_tensor(previous: GlobalModel, updates: list[Update], _: object) -> GlobalModel:
    return replace(previous, shared={"w": updates[0].shared["w"].view(-1)})


def half_a_step(previous: GlobalModel, updates: list[Update], mean: Any) -> GlobalModel:
    after: GlobalModel = mean(updates)
    return replace(after, shared={k: (t + previous.shared[k]) / 2 for k, t in after.shared.items()})


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


CALLS = itertools.count()
MUTANTS: dict[str, tuple[type[FedProx], Callable[..., None], str]] = {
    "wrong sign": (FlippedSign, checks.losses_are_never_negative, "-"),
    "of one label": (RaisesForOneLabel, checks.unknown_labels_have_no_gradient, "NotImplementedError"),
    "no own rate": (
        trains(lambda method, round_: replace(round_, local=method.local)),
        checks.a_sites_own_learning_rate_is_used,
        "",
    ),
    "no phase": (
        trains(lambda _, round_: replace(round_, head_only=False)),
        checks.a_warm_up_trains_the_head_alone,
        "backbone",
    ),
    "no optimiser state": (
        trains(lambda _, round_: replace(round_, optimiser_state={})),
        checks.optimiser_state_carries_over,
        "",
    ),
    "random numbers of no seed": (
        trains(lambda _, round_: replace(round_, seed=next(CALLS))),
        checks.federations_run_and_repeat,
        "",
    ),
    "no hyperparameter": (IgnoresHyperparameter, checks.every_hyperparameter_matters, "mu"),
    "no mask": (IgnoresTheMask, checks.unknown_labels_are_not_trained, ""),
    "no mask of its own": (IgnoresTheMaskOfItsOwn, checks.unknown_labels_are_not_trained, ""),
    "mask of all": (TeachesTheUnknown, checks.unknown_labels_have_no_gradient, ""),
    "order": (CountsColumns, checks.classes_are_known_by_name, ""),
    "changed updates": (merges(changes_updates), checks.aggregation_takes_copies, ""),
    "taken tensor": (merges(takes_a_tensor), checks.aggregation_takes_copies, "w is a tensor"),
    "one site": (
        merges(lambda _, updates, mean: mean(updates[:1])),
        checks.a_robust_merge_can_replace_its_mean,
        "w",
    ),
    "half a step": (merges(half_a_step), checks.one_site_alone_decides, ""),
    "momentum": (MovesByMomentum, checks.a_class_that_nobody_sent_keeps_its_row, ""),
    "no learning": (merges(lambda previous, *_: previous), checks.training_lowers_the_loss, ""),
    "undecorated": (Undecorated, checks.it_describes_itself, "anchor of Undecorated"),
    "undecorated value": (UndecoratedValue, checks.it_describes_itself, "mu of UndecoratedValue"),
}


@pytest.mark.complete
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_by_the_check_that_is_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check, named = MUTANTS[name]
    monkeypatch.setattr(checks, "CHECKS", (check,))
    with refused(f"fedprox: {check.__name__}: ", named, by=AssertionError):
        check_method(mutant(), variants={"mu": 1.0})


@pytest.mark.complete
def test_fedprox_passes_and_a_check_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_method(FedProx()) == len(checks.CHECKS)
    monkeypatch.setattr(checks, "CHECKS", (checks.one_site_alone_decides,))
    check_method(merges(half_a_step)(), skip={"one_site_alone_decides"})
    checks.losses_are_never_negative(subject_of(FlippedSign(mu=0.0), exempt="mu"))
    for settings in ({"final_lr": 1e-4}, {"warmup_epochs": 1}):  # no other learning rate
        checks.a_sites_own_learning_rate_is_used(subject_of(FedProx(local=LocalTraining(**settings))))


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
    assert "3 of 4" in first
    assert [line.split(": ")[1] for line in lines] == [check.__name__ for check in tried[:3]]
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

    with refused("variants={'anchor': ...}", by=AssertionError):
        check()
    with refused("anchor", by=AssertionError):
        check(variants={"anchor": "b"})
    check(exempt={"anchor"})


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (1.0, 1e6), (-math.inf, math.inf), (-math.inf, -5.0), (3.0, 3.0)]
)
def test_numbers_of_an_update_lie_in_their_range(low: float, high: float) -> None:
    drawn = [checks._draw(low, high, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(low <= number <= high and math.isfinite(number) for number in drawn)
    assert len(set(drawn)) == (1 if low == high else 20)


LINE = {
    "round": 2,
    "validation": {"loss": 0.5},
    "sites": {"a": {"train_loss": 0.25, "scalars": {"query_loss": 2.0}}, "b": {"train_loss": 0.5}},
}


def test_which_loss_must_fall_depends_on_what_is_sent_and_one_that_is_none_is_named() -> None:
    for name, loss in {"surgical": 0.5, "fl": 0.75, "pmfl": 2.5}.items():
        assert checks._loss_of(METHODS[name](), LINE, "multilabel") == loss
    for none in (None, math.nan):
        with refused("multilabel", "round 2", by=AssertionError):
            checks._loss_of(FedProx(), LINE | {"validation": {"loss": none}}, "multilabel")


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
    with refused("alpha", "[2, 4]", by=AssertionError):
        checks.federations_run_and_repeat(subject_of(FedProx()))


class Nameless(LocalAveraging):
    labels = LabelUse()


@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        (FedProx, {}, ("FedProx()",)),
        ("fedprox", {}, ("'fedprox'",)),
        (Nameless(), {}, ("Nameless", "about")),
        (FedProx(), {"variants": {"muu": 1.0}}, ("'muu'", "'mu'")),
        (FedProx(), {"exempt": {"loca"}}, ("'loca'", "'local'")),
        (FedProx(), {"exempt": "muu"}, ("'muu'", "'mu'")),
        (FedProx(), {"skip": {"one_site_decides"}}, ("'one_site_alone_decides'",)),
    ],
)
def test_no_instance_and_unknown_names_are_refused(
    method: Any, settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    with refused(*named, by=ConfigError):
        check_method(method, **settings)


@pytest.mark.complete
@pytest.mark.parametrize(("name", "transport"), [("surgical", "int8"), ("pmfl", "float16")])
def test_the_checks_hold_where_weights_travel_in_fewer_bits(name: str, transport: Transport) -> None:
    subject = subject_of(conformant(name))
    subject = replace(subject, transport=transport, types=subject.label_types[:1])
    for check in set(checks.CHECKS) - {checks.every_hyperparameter_matters}:
        check(subject)
