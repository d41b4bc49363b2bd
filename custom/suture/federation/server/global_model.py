"""The global model: how it begins, gains classes, is stored in a state and continues from one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, FiniteFloat
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError, as_word
from suture.core.labels import LabelSet, LabelType
from suture.core.validation import OPEN, flat, lasting, parse
from suture.federation.plan import Plan
from suture.federation.server.norm_bound import NormBound
from suture.federation.store import Rounds
from suture.methods.base import GlobalModel
from suture.methods.exchange import layout_of, with_channels
from suture.models import build
from suture.models.classifier import Classifier, check_tensors, relabelled, split_state
from suture.models.saved import save_model
from suture.protocol.egress import in_order
from suture.protocol.messages import Codes, Count, Label, Labels, Word
from suture.protocol.packing import Packed

_GROUPS = ("shared", "head", "fixed", "channels")

_FIXED_SETTINGS = {
    "seed": "seed",
    "method": "method",
    "hyperparameters": "method",
    "model": "model",
    "augmentation": "augmentation",
    "transport": "transport",
}
"""The parts of a plan that a later job of the experiment may not change, with the job's word for each."""


def initial(
    plan: Plan, labels: Labels, label_type: LabelType = "multilabel", *, pretrained: bool = True
) -> GlobalModel:
    """Initialise the model for all sites. Pretrained weights are read here and nowhere else."""
    model = build(plan.model, LabelSet(labels, label_type), plan.seed, pretrained=pretrained)
    state, head = split_state(model.state_dict())
    shared = plan.method.exchange.shared(model)
    fixed = set(plan.method.exchange.local(model)) - {*shared, *head}
    begun = GlobalModel(
        labels,
        {name: state[name].clone() for name in shared},
        {name: rows.clone() for name, rows in head.items()},
        {name: state[name].clone() for name in sorted(fixed)},
        label_type=label_type,
        buffers=model.buffer_names & set(shared),
    )
    return with_channels(begun, plan.method)


def with_labels(model: GlobalModel, labels: Labels, plan: Plan) -> GlobalModel:
    """Return the model with a row for each of `labels`: known classes keep theirs, others are initialised."""
    spec = plan.model
    head = relabelled(model.head, model.labels, labels, plan.seed, spec.row_init, spec.name_vectors)
    forms = plan.method.egress(layout_of(model, plan.method)).forms("down", "server")
    channels = {n: in_order(form, model.channels[n], model.labels, labels) for n, form in forms.items()}
    return replace(model, labels=labels, head=head, channels=channels)


def served(model: GlobalModel, plan: Plan) -> GlobalModel:
    """Return the model that predicts; see `Method.predictor`."""
    return model.moved_to(plan.method.predictor({**model.shared, **model.head}, model.channels))


def pack_model(model: GlobalModel, header: Mapping[str, Any]) -> Packed:
    """Convert the model and further facts into a state."""
    tensors = {f"{group}/{name}": t for group in _GROUPS for name, t in getattr(model, group).items()}
    return Packed(tensors, {**header, "labels": list(model.labels), "label_type": model.label_type})


@dataclass(frozen=True, config=OPEN)
class _Classes:
    """The part of a state's header that `pack_model` writes."""

    labels: Annotated[Labels, Field(min_length=1)]
    label_type: LabelType


def unpack_model(packed: Packed, where: str = "the state") -> GlobalModel:
    """Return the model of a state.

    Args:
        where: names the state, for errors.

    Raises:
        ConfigError: the state holds no model.
    """
    try:
        classes = parse(_Classes, packed.header, where)
    except ConfigError as error:
        remedy = "the experiment cannot continue under this name; rename the class and begin a new experiment"
        raise ConfigError(f"{error}; {remedy}") if "label name" in str(error) else error from None
    groups: dict[str, dict[str, torch.Tensor]] = {group: {} for group in _GROUPS}
    for name, tensor in packed.tensors.items():
        group, _, rest = name.partition("/")
        if group == "memory":
            raise ConfigError(
                f"{where} is of a former version, which kept {as_word(rest)} in another form; continue with "
                "that version, or begin a new experiment"
            )
        group = "channels" if group == "class_tensors" else group  # as former versions called it
        if group not in groups:
            raise ConfigError(
                f"{where}: the tensor {as_word(name)} does not belong to the model; restore the file from a "
                "backup"
            )
        groups[group][rest] = tensor
    return GlobalModel(classes.labels, label_type=classes.label_type, **groups)  # type: ignore[arg-type]


def read_model(packed: Packed, plan: Plan, where: str) -> GlobalModel:
    """Return the model of a state, whose tensors have the shapes of the plan's model.

    Raises:
        ConfigError: the state holds no such model.
    """
    model = unpack_model(packed, where)
    expected = initial(plan, model.labels, model.label_type, pretrained=False)
    for group in _GROUPS:
        check_tensors(getattr(model, group), getattr(expected, group), where)
    return replace(model, buffers=expected.buffers)


def classifier(model: GlobalModel, plan: Plan) -> Classifier:
    """Return the global model as a network that predicts every class."""
    network = build(plan.model, LabelSet(model.labels, model.label_type), plan.seed, pretrained=False)
    tensors = {**model.shared, **model.head, **model.fixed}
    with torch.no_grad():
        for name, target in network.state_dict().items():
            if name in tensors:
                target.copy_(tensors[name])
    return network.eval()


def export(model: GlobalModel, plan: Plan, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write model/ of a run: weights, class names, backbone and preprocessing."""
    save_model(classifier(model, plan), plan.model, folder, facts)


def _open_round(line: dict[str, Any]) -> dict[str, Any]:
    sites = line.get("sites")
    if not isinstance(line.get("validation"), dict) or not isinstance(sites, dict):
        raise ValueError("is not a round of history.jsonl")
    if not all(isinstance(one, dict) for one in sites.values()):
        raise ValueError("has a site that is not a table")
    return line


@dataclass(frozen=True, config=OPEN)
class BegunMember:
    """A site of the experiment so far, with the federation's names of its classes."""

    names: tuple[Label, ...] = ()


@dataclass(frozen=True, config=OPEN)
class Began:
    """What the experiment began with: the digest of its frozen network, None without one; and what sites have
    stated so far, the codes of its classes and, by site, the federation's names of their own.
    """

    prior: str | None
    codes: dict[Label, Codes] = Field(default_factory=dict)
    members: dict[str, BegunMember] = Field(default_factory=dict)

    def owners(self) -> dict[str, set[str]]:
        """Return the sites of each class so far."""
        found: dict[str, set[str]] = {}
        for site, member in self.members.items():
            for name in member.names:
                found.setdefault(name, set()).add(site)
        return found


@dataclass(frozen=True, config=OPEN)
class Header:
    """The facts of a server's state; see `Server`. States of former versions lack those with a default."""

    plan: dict[str, Any]
    registry: Began
    standings: dict[str, Any]
    pending: Annotated[dict[str, Any], AfterValidator(_open_round)] | None
    holders: tuple[str, ...]
    codes: Annotated[tuple[tuple[Count, Word], ...], Field(min_length=1)]
    norms: dict[str, FiniteFloat] = Field(default_factory=dict)
    received: FiniteFloat = 0.0
    bound: NormBound = NormBound()
    excluded: dict[str, str] = Field(default_factory=dict)
    sent: dict[str, Count] = Field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where an experiment stands that continues.

    Attributes:
        round: the newest committed round.
        model: of that round.
        header: of its state.
    """

    round: int
    model: GlobalModel
    header: Header


def read_progress(states: Rounds, plan: Plan) -> Progress | None:
    """Read the newest state of an experiment; None before there is one.

    Raises:
        ConfigError: the experiment began with other settings, names the first; or with another version of
            Suture; or the state is not one of a server.
        SutureError: every state is corrupt.
    """
    found = states.newest()
    if found is None:
        return None
    number, packed = found
    where = f"the state of round {number} in {states.folder}"
    header = parse(Header, packed.header, where)
    check_unchanged(header.plan, fixed_settings(plan), plan.experiment)
    return Progress(number, read_model(packed, plan, where), header)


def fixed_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan that later jobs of the experiment may not change."""
    values = plan.to_dict()
    return {key: values[key] for key in _FIXED_SETTINGS}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], experiment: str) -> None:
    """Check that an experiment continues with the settings that it began with.

    Args:
        before, now: what `fixed_settings` returns, or a part of it.

    Raises:
        ConfigError: they differ; names the setting.
    """
    for part in (key for key in _FIXED_SETTINGS if key in before and key in now):
        was, has = (flat(_FIXED_SETTINGS[part], json.loads(json.dumps(plan[part]))) for plan in (before, now))
        was = lasting(was)
        for key in sorted(was.keys() | has.keys()):
            if was.get(key) != has.get(key):
                raise ConfigError(
                    f"the experiment {experiment!r} was begun with {as_word(key)}={as_word(was.get(key))}, "
                    f"and this job has {as_word(key)}={as_word(has.get(key))}; set it back, or begin a new "
                    "experiment"
                )
