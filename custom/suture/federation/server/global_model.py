"""The global model: how it begins, gains classes, and is stored in a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, as_word
from suture.core.labels import LabelSet, LabelType
from suture.core.validation import OPEN, parse
from suture.federation.plan import Plan
from suture.methods.base import GlobalModel, layout_of, with_channels
from suture.models import build
from suture.models.classifier import Classifier, check_tensors, relabel, split_state
from suture.protocol.egress import reorder_axis
from suture.protocol.messages import Labels
from suture.protocol.packing import Packed

_GROUPS = ("shared", "head", "fixed", "channels")


def initial(
    plan: Plan, labels: Labels, label_type: LabelType = "multilabel", *, pretrained: bool = True
) -> GlobalModel:
    """Initialise the model for all sites. Pretrained weights are read here and nowhere else."""
    model = build(plan.model, LabelSet(labels, label_type), plan.seed, pretrained=pretrained)
    state, head = split_state(model.state_dict())
    shared = plan.method.sharing.shared(model)
    fixed = set(plan.method.sharing.local(model)) - {*shared, *head}
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
    head = relabel(model.head, model.labels, labels, plan.seed, spec.row_init, spec.name_vectors)
    forms = plan.method.egress(layout_of(model, plan.method)).forms("down", "server")
    channels = {n: reorder_axis(form, model.channels[n], model.labels, labels) for n, form in forms.items()}
    return replace(model, labels=labels, head=head, channels=channels)


def serve(model: GlobalModel, plan: Plan) -> GlobalModel:
    """Return the model that predicts; see `Method.predictor`."""
    return model.moved_to(plan.method.predictor({**model.shared, **model.head}, model.channels))


def pack_model(model: GlobalModel, header: Mapping[str, Any]) -> Packed:
    """Convert the model and further facts into a state."""
    tensors = {f"{group}/{name}": t for group in _GROUPS for name, t in getattr(model, group).items()}
    return Packed(tensors, {**header, "labels": list(model.labels), "label_type": model.label_type})


@validated(frozen=True, config=OPEN)
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
        group, _, key = name.partition("/")
        if group not in groups:
            raise ConfigError(
                f"{where}: the tensor {as_word(name)} does not belong to the model; restore the file from a "
                "backup"
            )
        groups[group][key] = tensor
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
