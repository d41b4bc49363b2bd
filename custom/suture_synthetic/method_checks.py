"""Conformance checks for a method, for anybody's: `suture.testing`.

Each check is a function of a `Subject` that raises an AssertionError. Three small sites in memory train a
small network, with several labels per image and with one; each site annotates other classes. What a check
claims is tried on those, not read from the method's declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from typing import Any, ClassVar, get_origin

import torch
from pydantic import ValidationError
from torch import Tensor

from suture.core.errors import ConfigError, SutureError, unknown
from suture.core.labels import LabelType
from suture.core.validation import parse
from suture.methods.base import (
    About,
    GlobalModel,
    LabelUse,
    Method,
    Phase,
    RoundContext,
    check_channels,
    layout_of,
    learns_one_sided,
    local_round,
    with_channels,
)
from suture.methods.retraining import Retraining
from suture.models import ModelSpec
from suture.models.classifier import Layout, split_state
from suture.privacy.robust import RobustMerge, robustly_merged, unmergeable
from suture.protocol.egress import CLASSES, Shapes, add_prefix, check_declared, resolve_shape, zeros
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import Packed, Transport, load, tensors_of, unpack
from suture_synthetic.trial import SITES, Trial, least_rounds
from suture_synthetic.variants import alternatives, change_values, names, numbers, with_value, within

SMALL = ModelSpec("cnn", size=16, weights="random")
_RATE = 1e-2
"""A learning rate at which the small network moves."""

_ROUNDS = 3
"""Of a whole federation: in them its loss falls."""

_NEW = Packed({}, {})
"""What a site has stored before its first round."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The method under test.

    Attributes:
        method: as given, with a learning rate and batches that fit the small sites.
        model: that it trains.
        variants: for hyperparameters whose valid values cannot be guessed, another value by dotted name.
        exempt: hyperparameters, or groups of them, that need not change anything here, by dotted name.
        transport: of the plan.
        types: the types of labels that it is tried with; all of the method's by default.
    """

    method: Method
    model: ModelSpec = SMALL
    variants: Mapping[str, Any] = field(default_factory=dict)
    exempt: Collection[str] = ()
    transport: Transport = "float32"
    types: tuple[LabelType, ...] = ()

    @cached_property
    def label_types(self) -> tuple[LabelType, ...]:
        """The types of labels that it is tried with: `types`, or all that the method has."""
        return self.types or self.method.labels.types

    def trial(self, label_type: LabelType, **more: Any) -> Trial:
        """A small federation of the method; see `Trial`."""
        return Trial(self.method, self.model, label_type, transport=self.transport, **more)


# What several checks read, made once.


@lru_cache(maxsize=8)
def begin(subject: Subject, label_type: LabelType) -> Trial:
    """A federation that stays in its first round."""
    return subject.trial(label_type)


@lru_cache(maxsize=8)
def first_update(subject: Subject, label_type: LabelType) -> Update:
    """Alpha's in that round."""
    return begin(subject, label_type).update("alpha")


@lru_cache(maxsize=8)
def end(subject: Subject, label_type: LabelType) -> Trial:
    """A federation after all of its rounds."""
    trial = subject.trial(label_type, rounds=_ROUNDS)
    trial.run()
    return trial


@lru_cache(maxsize=8)
def hiding(subject: Subject, label_type: LabelType) -> list[dict[str, Update]]:
    """The sites' first updates with 0 in a batch in the place of unknown labels, and with another number.

    Not with 1: a batch has 0 there, so a method may count positives by ``y == 1`` without the mask.
    """
    one_sided, found = label_type == "multilabel", []
    for value in (0.0, 0.5):
        with subject.trial(label_type, hidden=value, one_sided=one_sided) as trial:
            found.append({site: trial.update(site) for site in SITES})
    return found


def check_method(
    method: Method,
    *,
    model: ModelSpec | None = None,
    variants: Mapping[str, Any] | None = None,
    exempt: Collection[str] = (),
    skip: Collection[str] = (),
) -> int:
    """Check that a method keeps the contract; see the functions of `CHECKS`.

    Args:
        method: an instance. Its learning rate and batch size are replaced by ones that fit 18 images, unless
            the method settles its own batches.
        model: that it trains, by default a small network of images.
        variants: another valid value for a hyperparameter, by dotted name, where it cannot be guessed.
        exempt: hyperparameters, or groups of them, that need not change anything here, by dotted name.
        skip: names of checks that do not apply, such as `one_site_alone_decides` where the server's optimiser
            takes a step of its own length.

    Returns:
        how many checks have passed.

    Raises:
        AssertionError: naming every check that fails, and what it found; its cause holds their tracebacks.
        ConfigError: `method` is no instance of a method, or there is no such hyperparameter or check.
    """
    subject = subject_of(method, model=model, variants=variants, exempt=exempt)
    skipped = _known_words("check", skip, [check.__name__ for check in CHECKS])
    return run_checks(subject, [check for check in CHECKS if check.__name__ not in skipped])


def run_checks(subject: Subject, checks: Collection[Callable[[Subject], None]]) -> int:
    """Run all of the checks, also after one that fails; return how many have passed. See `check_method`."""
    name, failed = subject.method.about.name, dict[str, Exception]()
    for check in checks:
        try:
            check(subject)
        except AssertionError as error:
            failed[f"{name}: {check.__name__}: {error}"] = error
        except Exception as error:  # noqa: BLE001 - a method may raise anything, and each check has its say
            failed[f"{name}: {check.__name__}: the method raised {type(error).__name__}: {error}"] = error
    if failed:
        of = f"{name}: {len(failed)} of {len(checks)} checks fail\n"
        cause = ExceptionGroup("the checks that fail", list(failed.values()))
        raise AssertionError(of + "\n".join(failed)) from cause
    return len(checks)


def subject_of(
    method: Method,
    *,
    model: ModelSpec | None = None,
    variants: Mapping[str, Any] | None = None,
    exempt: Collection[str] = (),
) -> Subject:
    """The arguments of `check_method` as what each check takes.

    Raises:
        ConfigError: see `check_method`.
    """
    _check_instance(method)
    known = names(method)
    groups = {name[:i] for name in known for i, letter in enumerate(name) if letter == "."}
    _known_words("hyperparameter in variants", variants or {}, known)
    exempt = _known_words("hyperparameter in exempt", exempt, {*known, *groups})
    # With a warm-up or a schedule, the learning rate of round 1 would not be `lr`.
    local = replace(method.local, final_lr=None, warmup_epochs=0)
    if not method.about.fixed_batches:
        steps = local.iterations and min(local.iterations, 3)
        local = replace(local, lr=_RATE, batch_size=8, iterations=steps)
    if isinstance(retrain := getattr(method, "retrain", None), Retraining):
        method = change_values(method, retrain=replace(retrain, rounds=1, batch_size=8))
    return Subject(change_values(method, local=local), model or SMALL, variants or {}, exempt)


def _check_instance(method: Any) -> None:
    """Refuse what is no instance of a method, or lacks what every check needs."""
    if isinstance(method, type):
        raise ConfigError(f"{method.__name__} is a class; check an instance of it: {method.__name__}()")
    kind = type(method).__name__
    if not isinstance(method, Method):
        raise ConfigError(f"{method!r} is not a method; check an instance of a subclass of suture.Method")
    if not isinstance(getattr(method, "about", None), About):
        raise ConfigError(f"{kind} has no name; give it about = About(name, title, paper)")
    if not isinstance(getattr(method, "labels", None), LabelUse):
        raise ConfigError(f"{kind} does not say how it uses labels; give it labels = LabelUse(...)")
    if not dataclasses.is_dataclass(method):
        raise ConfigError(f"{kind} is not a dataclass; decorate it with @hyperparameters")
    if not hasattr(method, "local"):
        raise ConfigError(f"{kind} has no local training; give it local: LocalTraining")
    check_declared(method.egress(Layout({}, {})), kind)


def _known_words(kind: str, names: Collection[str], options: Collection[str]) -> tuple[str, ...]:
    """The names, each of them among `options`; a single one need not be in a list."""
    listed = (names,) if isinstance(names, str) else tuple(names)
    for name in listed:
        if name not in options:
            raise unknown(kind, name, options)
    return listed


# The checks


def it_describes_itself(subject: Subject) -> None:
    """It has a name, a title and a paper, and its hyperparameters survive a job's file."""
    method = subject.method
    for word in ("name", "title", "paper"):
        _ensure(bool(getattr(method.about, word)), f"it has no {word}")
    for kind, name in _list_undeclared(type(method)):
        found = f"{name} of {kind.__name__} is not a hyperparameter; decorate it with @hyperparameters"
        _ensure(False, found)
    values = json.loads(json.dumps(dataclasses.asdict(method)))  # type: ignore[call-overload]
    again = parse(type(method), values, method.about.name)
    _ensure(again == method, f"written to a job file and read again it is {again}")


def _list_undeclared(method: type[Method]) -> Iterator[tuple[type, str]]:
    """What a class that is not decorated annotates, or sets of its parents' fields; neither has an effect."""
    fields = {part.name for part in dataclasses.fields(method)}  # type: ignore[arg-type]
    for kind in method.__mro__:
        if kind is Method or not issubclass(kind, Method) or "__dataclass_fields__" in vars(kind):
            continue
        for name, hint in inspect.get_annotations(kind).items():
            of_class = "ClassVar" in hint if isinstance(hint, str) else ClassVar in (hint, get_origin(hint))
            if not of_class:
                yield kind, name
        yield from ((kind, name) for name in vars(kind) if name in fields)


def aggregation_is_a_function_of_the_updates(subject: Subject) -> None:
    """The same updates give the same bytes; their order matters only by rounding; none moves nothing."""
    method, before = subject.method, _a_model(subject.method)
    owned = (("A", "B"), ("B", "C"), ("B",))
    updates = [_an_update(method, before, own, seed) for seed, own in enumerate(owned)]
    one, two, other = (
        _all_tensors(method.aggregate(before, u, FIRST)) for u in (updates, updates, updates[::-1])
    )
    for name, tensor in one.items():
        _ensure(torch.equal(tensor, two[name]), f"{name}: the same updates give different bytes")
        _ensure(torch.allclose(tensor, other[name], 1e-6, 1e-7), f"{name}: the order of the sites matters")
    still = [_an_update(method, before, own, 0, noise=0.0) for own in (("A", "B"), ("B", "C"))]
    after = _tensors(method.aggregate(before, still, FIRST))
    for name, tensor in _tensors(before).items():
        same = torch.allclose(after[name], tensor, 1e-6, 1e-7)
        _ensure(same, f"{name}: unchanged updates change the model")


def aggregation_takes_copies(subject: Subject) -> None:
    """It leaves the updates as they are, and no tensor of its result shares memory with theirs."""
    method, before = subject.method, _a_model(subject.method)
    update, as_sent = (_an_update(method, before, LABELS, 3) for _ in range(2))
    after = _all_tensors(method.aggregate(before, [update], FIRST))
    _ensure(_equal(update, as_sent), "aggregation changes an update; make new tensors")
    sent = {t.untyped_storage().data_ptr() for t in tensors_of(update).values() if t.numel()}
    for name, tensor in after.items():
        _ensure(tensor.untyped_storage().data_ptr() not in sent, f"{name} is a tensor of an update; clone it")


def one_site_alone_decides(subject: Subject) -> None:
    """The aggregate of one site is what it sent, or a step against its gradient."""
    method, before = subject.method, _a_model(subject.method)
    update = _an_update(method, before, LABELS, 3)
    after = _tensors(method.aggregate(before, [update], FIRST))
    for name, sent in {**update.shared, **update.head}.items():
        if update.kind == "weights":
            _ensure(torch.allclose(after[name], sent, 1e-6, 1e-7), f"{name} of the only site is not adopted")
        else:
            step = (after[name] - _tensors(before)[name])[: len(sent)]
            _ensure(bool((step * sent < 0).all()), f"{name} does not step against the gradient")


def a_robust_merge_can_replace_its_mean(subject: Subject) -> None:
    """If it has `merges_by_mean`, it makes the same of updates as of as many copies of their mean."""
    method, before = subject.method, _a_model(subject.method)
    if unmergeable(method):
        return
    updates = [_an_update(method, before, LABELS, seed) for seed in range(2)]
    copies = robustly_merged(RobustMerge(), before, None, updates, {}).updates  # of the mean: they are few
    after, of_mean = (_tensors(method.aggregate(before, some, FIRST)) for some in (updates, copies))
    for name, tensor in after.items():
        same = torch.allclose(of_mean[name], tensor, 1e-5, 1e-6)
        _ensure(same, f"{name} depends on more than the updates' mean; set merges_by_mean = False")


def aggregation_returns_the_channels(subject: Subject) -> None:
    """Its result has each channel that it declares as ``down`` or ``server``, in its form, and no other."""
    before = _a_model(subject.method)
    after = subject.method.aggregate(before, [_an_update(subject.method, before, LABELS, 3)], FIRST)
    try:
        check_channels(after, subject.method)
    except ConfigError as error:
        raise AssertionError(str(error)) from None


def a_class_that_nobody_sent_keeps_its_row(subject: Subject) -> None:
    """Where sites see their own rows only, and also where the class moved in the round before."""
    method, before = subject.method, _a_model(subject.method)
    if method.labels.view == "all":
        return
    if method.labels.view == "own":  # a target has one row, which every site sends
        # What the server keeps of that round, as momentum, must not move the row of a class without an owner.
        before = method.aggregate(before, [_an_update(method, before, LABELS, 3)], FIRST)
    sent = [_an_update(method, before, ("A",), 1), _an_update(method, before, ("B",), 2)]
    after = method.aggregate(before, sent, FIRST)
    for name, rows in before.head.items():
        same = torch.equal(after.head[name][2], rows[2])
        _ensure(
            same,
            f"{name}: the row of a class that no site sent changed: let `aggregate` keep it where the sites' "
            "weights of the class are 0",
        )
        _ensure(bool(torch.isfinite(after.head[name]).all()), f"{name} is not finite")


def classes_are_known_by_name(subject: Subject) -> None:
    """In the reverse order each class gets the same, but for rounding: at the server, and at a site."""
    method, before = subject.method, _a_model(subject.method)
    forms = method.egress(layout_of(before, method)).forms("down", "server")
    updates = [_an_update(method, before, own, seed) for seed, own in enumerate((("A", "B"), ("B", "C")))]
    other = replace(before, labels=LABELS[::-1], **_rotate(forms, head=before.head, channels=before.channels))
    one, two = (method.aggregate(model, updates, FIRST) for model in (before, other))
    back = replace(two, **_rotate(forms, head=two.head, channels=two.channels))
    _alike(_all_tensors(one), _all_tensors(back), "aggregation")
    if method.labels.view == "target":
        return
    with suppress(SutureError, ValidationError):  # Adam makes steps even of what is rounding
        method = change_values(method, local=replace(method.local, optimiser="sgd", momentum=0.0))
    for label_type in subject.label_types:
        trial = begin(subject, label_type)
        for phase in method.phases(least_rounds(method) + 1):
            a, b = (_narrow(trial, method, phase, turned) for turned in (False, True))
            _alike(a, b, f"{label_type}, {phase.name}")


def _narrow(trial: Trial, method: Method, phase: Phase, turned: bool) -> dict[str, Tensor]:
    """What a site sends in the first round of a phase; `turned`: where it received its classes reversed."""
    payload = trial.payload("gamma")
    egress = method.egress(method.sharing.layout(trial.context("gamma", payload).model))
    if turned:
        _, once = split_state(payload.fixed)
        tensors = {"head": payload.head, "once": once, "channels": payload.channels}
        new = _rotate(egress.forms("down", "facts"), **tensors)
        fixed = {**payload.fixed, **new.pop("once")}
        payload = replace(payload, labels=payload.labels[::-1], fixed=fixed, **new)
    update, _ = _train(trial, method, "gamma", payload, RoundContext(1, phase, 1))
    found = {**update.head, **update.channels, "class_weights": update.class_weights}
    if turned:
        found = _rotate(egress.forms("up"), found=found)["found"]
    return {**update.shared, **found}


def _train(
    trial: Trial, method: Method, site: str, payload: TaskData, ctx: RoundContext, state: Packed = _NEW
) -> tuple[Update, dict[str, Tensor]]:
    """What a site sends and stores after local training, outside of a federation."""
    context = trial.context(site, payload)
    return method.train(context, payload, local_round(method, context, state, ctx))


def _rotate(forms: Shapes, **groups: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors with every axis of classes reversed: those of their form, or else the first."""

    def axes(name: str) -> list[int]:
        shape, _ = forms.get(name, ((CLASSES,), ""))
        return [axis for axis, length in enumerate(shape) if length == CLASSES]

    return {key: {name: t.flip(axes(name)) for name, t in group.items()} for key, group in groups.items()}


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in one.items():
        found = f"{name} depends on the order of the classes; draw by name: generator_for(seed, name)"
        _ensure(torch.allclose(tensor, other[name], 1e-3, 1e-5), f"{where}: {found}")


def unknown_labels_have_no_gradient(subject: Subject) -> None:
    """What stands at an unknown label changes nothing, for each type of labels."""
    known = torch.tensor([[True, False, True]] * 6)
    y = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2])]
    for label_type in subject.label_types:
        gradients: list[Tensor] = []
        for labels in (y, torch.where(known, y, 1 - y)):
            logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
            loss = subject.method.loss(logits, labels, known, label_type)
            gradients += torch.autograd.grad(loss, logits)
        _ensure(torch.equal(*gradients), f"{label_type}: an unknown label changes the gradient")


def unknown_labels_are_not_trained(subject: Subject) -> None:
    """Where unknown labels are masked, what a batch holds in their place does not change the update."""
    if subject.method.labels.unknown != "masked":
        return
    for label_type in subject.label_types:
        one, two = hiding(subject, label_type)
        same = all(_alike_at_a_site(one[site], two[site]) for site in SITES)
        _ensure(same, f"{label_type}: an unknown label changes the update; leave out what is not known")


def one_sided_classes_are_not_taught_as_absent(subject: Subject) -> None:
    """A site trains a class of which it knows positives alone, where the method can, and only by these and by
    probabilities; it measures and counts none of it.
    """
    if "multilabel" not in subject.label_types:
        return
    a, b = (updates["beta"] for updates in hiding(subject, "multilabel"))
    if subject.method.labels.unknown == "masked":
        same = _alike_at_a_site(a, b)
        _ensure(same, "a label of Mass that nobody knows changes beta's update; leave it out")
    _ensure("Mass" not in (a.metrics.classes if a.metrics else ()), "beta measures Mass")
    with subject.trial("multilabel", hidden=0.0, one_sided=True) as trial:
        trial.run()
        trained = "Mass" in trial.server.registry.members["beta"].names
        _ensure(trained == learns_one_sided(subject.method), f"Mass is trained at beta: {trained}")


def _alike_at_a_site(one: Update, two: Update) -> bool:
    """Whether two updates are equal; where nothing leaves the site, its loss still tells."""
    return _equal(one, two) and (one.train_loss, one.scalars) == (two.train_loss, two.scalars)


def federations_run_and_repeat(subject: Subject, repeated: Collection[LabelType] | None = None) -> None:
    """Whole federations end, twice with the same bytes; a site is sent only the classes and rows declared."""
    for label_type in subject.label_types:
        one = end(subject, label_type)
        if repeated is None or label_type in repeated:  # a test may do with fewer
            with end.__wrapped__(subject, label_type) as two:
                same = _same(*(_all_tensors(trial.server.model) for trial in (one, two)))
            _ensure(same, f"{label_type}: a second run gives different bytes")
        for site, labels in one.seen.items():
            registered = one.server.registry.members[site].names
            allowed = one.server.registry.labels if subject.method.labels.view == "all" else registered
            _ensure(labels <= set(allowed), f"{label_type}: {site} saw {sorted(labels - set(allowed))}")
            rows = one.seen_rows[site]
            found = f"{label_type}: {site} was sent {sorted(rows)} rows and may see {len(allowed)} classes"
            _ensure(rows <= {len(allowed)}, found)


def training_lowers_the_loss(subject: Subject) -> None:
    """Over three rounds the validation loss falls, or that of the query halves where sites send gradients."""
    for label_type in subject.label_types:
        trial = end(subject, label_type)
        lines = trial.history()[:_ROUNDS]
        rounds = [line["round"] for line in lines]
        _ensure(rounds == [1, 2, 3], f"{label_type}: the history has the rounds {rounds} of 1 to 3")
        losses = [_loss_of(subject.method, line, label_type) for line in lines]
        _ensure(losses[-1] < losses[0], f"{label_type}: three rounds have the losses {losses}")
        measured, every = sorted(trial.metrics()["auroc"]), sorted(trial.server.registry.labels)
        _ensure(measured == every, f"{label_type}: the metrics have the classes {measured} of {every}")


def _loss_of(method: Method, line: Mapping[str, Any], label_type: LabelType) -> float:
    """The loss of a round that training must lower."""
    gradients = method.egress(Layout({}, {})).kind == "gradient"
    if gradients or method.labels.view == "target":
        # A model that sends gradients is one to adapt, and a single row that means another class at each site
        # fits none of them: neither need predict as it is, and the sites' own losses tell whether it learns.
        word = "query_loss" if gradients else "train_loss"
        sites = line["sites"].values()
        losses = [(site.get("scalars") or {}).get(word, site.get("train_loss")) for site in sites]
    else:
        losses = [line["validation"].get("loss")]
    where = f"{label_type}: the loss of round {line['round']} is"
    _ensure(bool(losses) and None not in losses, f"{where} missing")
    _ensure(all(math.isfinite(loss) for loss in losses), f"{where} not finite: {losses}")
    return float(sum(losses))


def a_sites_own_learning_rate_is_used(subject: Subject) -> None:
    """A site that sets its learning rate sends what it would send were that the job's."""
    own = _RATE / 8
    slower = replace(
        subject, method=change_values(subject.method, local=replace(subject.method.local, lr=own))
    )
    label_type = subject.label_types[0]
    with subject.trial(label_type, rates={"alpha": own}) as site, slower.trial(label_type) as job:
        found, expected = site.update("alpha"), job.update("alpha")
    if not {**found.shared, **found.head}:
        return  # nothing leaves the site
    _ensure(_equal(found, expected), "a site's own learning rate is not used")
    _ensure(not _equal(found, first_update(subject, label_type)), "the learning rate changes nothing")


def a_warm_up_trains_the_head_alone(subject: Subject) -> None:
    """In its phase the backbone rests, and the head moves."""
    try:
        local = replace(subject.method.local, warmup_epochs=2, warmup_lr=_RATE)
        method = change_values(subject.method, local=local)
    except (SutureError, ValidationError):
        return  # the method has no warm-up and says so
    with replace(subject, method=method).trial(subject.label_types[0], rounds=2) as trial:
        payload, update = trial.payload("alpha"), trial.update("alpha")
        backbone = [name for name in update.shared if name.startswith("backbone.")]
        moved = [name for name in backbone if not torch.equal(update.shared[name], payload.shared[name])]
        _ensure(not moved, f"the warm-up of the head trains {moved[0] if moved else ''}")
        for name, rows in update.head.items():
            if name.startswith("head."):
                _ensure(not torch.equal(rows, payload.head[name]), f"the warm-up does not train {name}")


def optimiser_state_carries_over(subject: Subject) -> None:
    """A round that begins with the state of the round before is another one than a round without."""
    local, method = subject.method.local, subject.method
    if method.about.fixed_batches or (local.optimiser == "sgd" and not local.momentum):
        return
    trial = begin(subject, subject.label_types[0])
    train = partial(_train, trial, method, "alpha", trial.payload("alpha"))
    first, second = (RoundContext(number, Phase("main", 2), 1) for number in (1, 2))
    _, state = train(first)
    _ensure(bool(state), "it returns no optimiser state")
    copied = {name: tensor.clone() for name, tensor in state.items()}
    (carried, one), (fresh, two) = train(second, Packed(copied, {"phase": "main"})), train(second)
    kept = not _same(one, two) and not _equal(carried, fresh, empty=False)
    _ensure(kept, "the state of the round before changes nothing")


def a_repeated_round_gives_the_same_update(subject: Subject) -> None:
    """As after a crash: a site that is asked again for a round that was never committed answers alike."""
    for label_type in subject.label_types:
        one, two = first_update(subject, label_type), begin(subject, label_type).update("alpha")
        _ensure(_equal(one, two), f"{label_type}: a repeated round gives another update")


def every_hyperparameter_matters(subject: Subject) -> None:
    """Another value of it changes what is sent, declared or aggregated."""
    plain = cache(lambda effect, label_type: effect(subject, label_type))
    for name in names(subject.method):
        if within(name, {"local", "batch_norm", "prior", "keep_local", *subject.exempt}):
            continue
        methods = alternatives(subject.method, name, subject.model, subject.variants)
        others = [replace(subject, method=method) for method in methods]
        _ensure(bool(others), f"no value of {name} could be guessed; give one as variants={{{name!r}: ...}}")
        differ = any(_differ(subject, others, plain))
        _ensure(differ, f"{name} changes nothing that is sent, declared or aggregated")


def losses_are_never_negative(subject: Subject) -> None:
    """Not even where a penalty weighs a lot: a term of the wrong sign rewards what it should punish."""
    method = subject.method
    strong = [
        with_value(method, name, max(abs(value), 1.0) * 1e4)
        for name, value in numbers(method)
        if not within(name, {"local", *subject.exempt})
    ]
    for label_type in subject.label_types:
        losses = [(method, first_update(subject, label_type).train_loss)]
        for other in (m for m in strong if m is not None):
            with replace(subject, method=other).trial(label_type) as trial:
                answer = unpack(trial.answer("alpha").packed)
            if isinstance(answer, Update):  # such a weight may well be too much to train with
                losses.append((other, answer.train_loss))
        for other, loss in losses:
            found = f"{label_type}: the mean loss of a round is {loss} with {other}"
            _ensure(loss is None or loss >= 0, found)


def channels_respect_the_smallest_count(subject: Subject) -> None:
    """Where a site has fewer images than its `min_count`, every channel of classes that it sends is zero."""
    method = subject.method
    up = method.egress(layout_of(_a_model(method), method)).going("up")
    if not (of_classes := [channel.name for channel in up if channel.of_classes]):
        return
    for label_type in subject.label_types:
        with subject.trial(label_type, min_count=1000) as trial:
            for site in SITES:
                sent = trial.update(site).channels
                for name in of_classes:
                    found = f"{label_type}: {name} of classes with fewer images than min_count leaves {site}"
                    remedy = "send zeros for a class with fewer than site.min_count"
                    _ensure(not bool(sent[name].any()), f"{found}; {remedy}")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    it_describes_itself,
    aggregation_is_a_function_of_the_updates,
    aggregation_takes_copies,
    one_site_alone_decides,
    a_robust_merge_can_replace_its_mean,
    aggregation_returns_the_channels,
    a_class_that_nobody_sent_keeps_its_row,
    classes_are_known_by_name,
    unknown_labels_have_no_gradient,
    unknown_labels_are_not_trained,
    one_sided_classes_are_not_taught_as_absent,
    federations_run_and_repeat,
    training_lowers_the_loss,
    a_sites_own_learning_rate_is_used,
    a_warm_up_trains_the_head_alone,
    optimiser_state_carries_over,
    a_repeated_round_gives_the_same_update,
    every_hyperparameter_matters,
    losses_are_never_negative,
    channels_respect_the_smallest_count,
)


# Models and updates for the server's half

LABELS = ("A", "B", "C")
FIRST = RoundContext(1, Phase("main", 1), 0, sites=3)


def _a_model(method: Method) -> GlobalModel:
    g = torch.Generator().manual_seed(0)
    head = {"head.weight": torch.randn(3, 4, generator=g), "head.bias": torch.randn(3, generator=g)}
    shared = {} if method.sharing.personal == "model" else {"w": torch.randn(5, generator=g)}
    return with_channels(GlobalModel(LABELS, shared, head), method)


def _an_update(
    method: Method, previous: GlobalModel, own: tuple[str, ...], seed: int, noise: float = 1.0
) -> Update:
    """What a site of `own` classes sends: the model moved by noise, or noise as a gradient."""
    labels = LABELS if method.labels.view == "all" else own
    shared, rows = method.sharing.parts(previous.shared, previous.rows(labels))
    g, egress = torch.Generator().manual_seed(seed), method.egress(Layout.of(shared, rows))
    kind = egress.kind

    def moved(tensor: Tensor) -> Tensor:
        change = noise * torch.randn(tensor.shape, generator=g)
        return change if kind == "gradient" else tensor + change

    shared, rows = ({name: moved(t) for name, t in group.items()} for group in (shared, rows))
    tensors = {
        name: (noise * torch.rand(resolve_shape(form[0], len(labels), 1), generator=g)).to(
            zeros(((), form[1]), 0)
        )
        for name, form in egress.forms("up").items()
    }
    ranges = {**egress.scalars, **egress.losses}
    scalars = {name: _draw(low, high, g) for name, (low, high) in ranges.items()}
    return Update(1, labels, shared, rows, ones(labels), kind=kind, channels=tensors, scalars=scalars)


def _draw(low: float, high: float, g: torch.Generator) -> float:
    """A number of a range, of its lowest ten where it is wider."""
    low = max(low, min(high, 0.0) - 10)
    return low + min(high - low, 10.0) * float(torch.rand((), generator=g))


def _tensors(model: GlobalModel) -> dict[str, Tensor]:
    return {**model.shared, **model.head}


def _all_tensors(model: GlobalModel) -> dict[str, Tensor]:
    """What aggregation makes: the model, and the channels."""
    return {**_tensors(model), **add_prefix("channels", model.channels)}


def _same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether two groups of tensors have the same names and bytes."""
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def _equal(one: Update, two: Update, *, empty: bool = True) -> bool:
    """Whether two updates have the same tensors and weights; `empty` answers where they have none."""
    a, b = ({**u.shared, **u.head, **u.channels} for u in (one, two))
    if not a and not b:
        return empty
    return _same(a, b) and one.weight == two.weight and torch.equal(one.class_weights, two.class_weights)


# What a method does


def _differ(subject: Subject, others: Collection[Subject], plain: Callable[..., str]) -> Iterator[bool]:
    """Whether any of the others does anything else than the subject, whose effects are `plain`.

    What takes longer is tried where nothing else shows it.
    """
    declared, *else_ = (repr(one.method.egress(Layout({}, {}))) for one in (subject, *others))
    yield any(other != declared for other in else_)
    for effect, other, label_type in product((_at_a_site, _effect), others, subject.label_types):
        yield effect(other, label_type) != plain(effect, label_type)


def _at_a_site(subject: Subject, label_type: LabelType) -> str:
    """Two rounds of each phase at a site that receives what it has sent, in one line: most shows there."""
    method, found = subject.method, list[Any]()
    with suppress(Exception):  # the whole federation shows it
        payload = (trial := begin(subject, label_type)).payload("gamma")
        for phase in method.phases(least_rounds(method) + 1):
            state = _NEW
            for number in (1, 2)[: phase.rounds]:
                ctx = RoundContext(number, phase, 1, number)
                update, kept = _train(trial, method, "gamma", payload, ctx, state)
                found.append((_sums(tensors_of(update)), update.weight, update.train_loss, update.scalars))
                state = Packed(kept, {"phase": phase.name})
                if update.kind == "weights":
                    shared, head = {**payload.shared, **update.shared}, {**payload.head, **update.head}
                    payload = replace(payload, shared=shared, head=head)
    return repr(found)


def _effect(subject: Subject, label_type: LabelType) -> str:
    """All that a federation leaves, in one line."""
    try:
        trial = end(subject, label_type)
    except SutureError as error:
        return f"{type(error).__name__}: {error}"
    sites = [site for line in trial.history() for site in line["sites"].values()]
    facts = [[site[key] for key in ("weight", "train_loss", "scalars")] for site in sites]
    states = sorted(trial.folder.glob("*/state/experiments/*/round-*"))
    stored = [_sums(load(path).tensors) for path in states]
    return repr((_sums(_all_tensors(trial.server.model)), facts, stored))


def _sums(tensors: Mapping[str, Tensor]) -> list[float]:
    return [float(tensor.double().sum()) for _, tensor in sorted(tensors.items())]


def _ensure(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)
