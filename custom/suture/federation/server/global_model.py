"""The global model: how it begins, gains classes, is stored in a state and continues from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet, LabelType
from suture.core.validation import flat
from suture.federation.plan import Plan
from suture.federation.store import Rounds
from suture.methods.base import GlobalModel
from suture.methods.parameters import local_parameters, shared_parameters
from suture.models import build
from suture.models.classifier import Classifier, relabelled, split_state
from suture.models.saved import save_model
from suture.protocol.messages import Labels
from suture.protocol.packing import Packed

_GROUPS = ("shared", "head", "fixed", "memory")

_FIXED_SETTINGS = {
    "seed": "seed",
    "method": "method",
    "hyperparameters": "method",
    "model": "model",
    "augmentation": "augmentation",
}
"""The parts of a plan that a later job of the experiment may not change, with the job's word for each."""


def initial(plan: Plan, labels: Labels, label_type: LabelType = "multilabel") -> GlobalModel:
    """Initialise the model for all sites. Pretrained weights are read here and nowhere else."""
    model = build(plan.model, LabelSet(labels, label_type), plan.seed, pretrained=True)
    state, head = split_state(model.state_dict())
    shared = shared_parameters(model, plan.method)
    fixed = set(local_parameters(model, plan.method)) - {*shared, *head}
    return GlobalModel(
        labels,
        {name: state[name].clone() for name in shared},
        {name: rows.clone() for name, rows in head.items()},
        {name: state[name].clone() for name in sorted(fixed)},
        label_type=label_type,
    )


def with_labels(model: GlobalModel, labels: Labels, plan: Plan) -> GlobalModel:
    """Return the model with a row for each of `labels`: known classes keep theirs, others are initialised."""
    return replace(model, labels=labels, head=relabelled(model.head, model.labels, labels, plan.seed))


def pack_model(model: GlobalModel, header: Mapping[str, Any]) -> Packed:
    """Convert the model and further facts into a state."""
    tensors = {f"{group}/{name}": t for group in _GROUPS for name, t in getattr(model, group).items()}
    return Packed(tensors, {**header, "labels": list(model.labels), "label_type": model.label_type})


def unpack_model(packed: Packed) -> GlobalModel:
    """Return the model of a state."""
    groups: dict[str, dict[str, torch.Tensor]] = {group: {} for group in _GROUPS}
    for name, tensor in packed.tensors.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    return GlobalModel(tuple(packed.header["labels"]), **groups, label_type=packed.header["label_type"])


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


@dataclass(frozen=True)
class Progress:
    """Where an experiment stands that continues.

    Attributes:
        round: the newest committed round.
        model: of that round.
        header: of its state.
    """

    round: int
    model: GlobalModel
    header: Mapping[str, Any]

    @property
    def prior(self) -> str | None:
        """Digest of the frozen network that the experiment began with; None without one."""
        digest: str | None = self.header["registry"]["prior"]
        return digest


def read_progress(states: Rounds, plan: Plan) -> Progress | None:
    """Read the newest state of an experiment; None before there is one.

    Raises:
        ConfigError: the experiment began with other settings, names the first; or with another version of
            Suture.
        SutureError: every state is corrupt.
    """
    found = states.newest()
    if found is None:
        return None
    number, packed = found
    check_unchanged(packed.header["plan"], fixed_settings(plan), plan.experiment)
    return Progress(number, unpack_model(packed), packed.header)


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
        for key in sorted(was.keys() | has.keys()):
            if was.get(key) != has.get(key):
                raise ConfigError(
                    f"the experiment {experiment!r} was begun with {key}={was.get(key)}, and this job has "
                    f"{key}={has.get(key)}; set it back, or begin a new experiment"
                )
