"""The global model: how it begins, grows by a class, and is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from suture.core.labels import LabelSet, LabelType
from suture.federation.plan import Plan
from suture.methods.base import GlobalModel
from suture.methods.parameters import local_parameters, shared_parameters
from suture.models import build
from suture.models.classifier import Classifier, relabelled, split_state
from suture.models.saved import save_model
from suture.protocol.messages import Labels
from suture.protocol.packing import Packed

_GROUPS = ("shared", "head", "fixed", "memory")


def initial(plan: Plan, labels: Labels, task: LabelType = "multilabel") -> GlobalModel:
    """One common initialisation for all sites; pretrained weights are read here and nowhere else."""
    model = build(plan.model, LabelSet(labels, task), plan.seed, pretrained=True)
    state, head = split_state(model.state_dict())
    shared = shared_parameters(model, plan.method)
    fixed = set(local_parameters(model, plan.method)) - {*shared, *head}
    return GlobalModel(
        labels,
        {name: state[name].clone() for name in shared},
        {name: rows.clone() for name, rows in head.items()},
        {name: state[name].clone() for name in sorted(fixed)},
        label_type=task,
    )


def with_labels(model: GlobalModel, labels: Labels, plan: Plan) -> GlobalModel:
    """The model with a row for each of `labels`: known classes keep theirs, new ones are initialised."""
    return replace(model, labels=labels, head=relabelled(model.head, model.labels, labels, plan.seed))


def pack_model(model: GlobalModel, header: Mapping[str, Any]) -> Packed:
    """The model and further facts as a state."""
    tensors = {f"{group}/{name}": t for group in _GROUPS for name, t in getattr(model, group).items()}
    return Packed(tensors, {**header, "labels": list(model.labels), "label_type": model.label_type})


def unpack_model(packed: Packed) -> GlobalModel:
    """The model of a state."""
    groups: dict[str, dict[str, torch.Tensor]] = {group: {} for group in _GROUPS}
    for name, tensor in packed.tensors.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    return GlobalModel(tuple(packed.header["labels"]), **groups, label_type=packed.header["label_type"])


def classifier(model: GlobalModel, plan: Plan) -> Classifier:
    """The global model as a network that predicts every class."""
    network = build(plan.model, LabelSet(model.labels, model.label_type), plan.seed, pretrained=False)
    tensors = {**model.shared, **model.head, **model.fixed}
    with torch.no_grad():
        for name, target in network.state_dict().items():
            if name in tensors:
                target.copy_(tensors[name])
    return network.eval()


def export(model: GlobalModel, plan: Plan, folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes model/ of a run: weights, class names, backbone and preprocessing."""
    save_model(classifier(model, plan), plan.model, folder, facts)
