"""What server and sites exchange in FLARE's own messages: the model in `params`, everything else in `meta`.

A task has under `LABELS` the classes of its rows, under `PHASE` the method's phase, and under `CHANNELS` what
the method sends down besides.
A site's first task is empty: the site answers with its own classes, `IMAGES` and `COUNTS`, and no tensor.
Then it answers with the tensors that it received, trained, their `LABELS`, and other fields of an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind
from torch import Tensor

from suture.core.errors import ConfigError, RejectedUpdate, shown
from suture.core.labels import LabelType
from suture.core.validation import parse
from suture.methods import method_class
from suture.methods.base import Method
from suture.models.classifier import HEADS, Layout
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import IMAGES as ALL_IMAGES
from suture.protocol.egress import OWNERS, WEIGHT
from suture.protocol.messages import LARGEST, Labels, SiteInfo, TaskName, Update, rounded
from suture.protocol.packing import Packed, unpack

LABELS, PHASE, CHANNELS, IMAGES, COUNTS = "labels", "phase", "channels", "images", "counts"
WEIGHTS = ("weight", "class_weights")

_INTRODUCTION = frozenset({LABELS, IMAGES, COUNTS})
_RESULT = frozenset({LABELS, CHANNELS, *WEIGHTS, "scalars", "train_loss"})
_HEAD, _BACKBONE = HEADS[0], "backbone."
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Contract:
    """What the messages of a job may hold, by its method and the layer of its model whose rows are classes.

    Attributes:
        head: name of that layer in the model, such as ``class_layers.out``.
        label_type: of the federation.
    """

    method: Method
    head: str
    label_type: LabelType

    @classmethod
    def of(
        cls, name: str, head: str, label_type: LabelType, settings: Mapping[str, Any] | None = None
    ) -> Contract:
        """Return the contract of a method, of this distribution or of another package.

        Raises:
            ConfigError: there is no such method, it cannot run in a federation or with such labels, or a
                setting does not fit.
        """
        method = parse(method_class(name), settings or {}, f"settings of {name}")
        about, types = method.about, method.labels.types
        if why := about.local_only or ("pools the data of all sites" if about.pooled else ""):
            raise ConfigError(f"{about.title} {why}; choose a federated method")
        if label_type not in types:
            raise ConfigError(f"{about.title} is for {' or '.join(types)} labels; set label_type")
        return cls(method, head, label_type)

    def split(self, params: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors outside the head and those of the head, under the names that methods know.

        Batch norm is left out where the method does not average it.

        Raises:
            RejectedUpdate: a value is no tensor and no array of numbers.
        """
        head = f"{self.head}."
        norms = {name.removesuffix(_STATISTICS[0]) for name in params if name.endswith(_STATISTICS[0])}
        if self.method.exchange.batch_norm == "average":
            norms = set()
        shared = {
            f"{_BACKBONE}{name}": as_tensor(name, value)
            for name, value in params.items()
            if not name.startswith(head) and f"{name.rpartition('.')[0]}." not in norms
        }
        rows = {n: as_tensor(n, value) for n, value in params.items() if n.startswith(head)}
        return shared, {f"{_HEAD}{name.removeprefix(head)}": rows[name] for name in sorted(rows)}

    def joined(self, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names that the model has: the inverse of `split`."""
        rows = {f"{self.head}.{name.removeprefix(_HEAD)}": tensor for name, tensor in head.items()}
        return {name.removeprefix(_BACKBONE): tensor for name, tensor in shared.items()} | rows

    def allowed(self, task: TaskName, layout: Layout, rows: Labels, own: Labels, images: int) -> AllowedReply:
        """Return what a site may answer.

        Args:
            task: ``handshake`` or ``train``.
            layout: of the tensors of the task.
            rows: the classes of the task's rows.
            own, images: the classes that the site annotates, and the number of its training images.
        """
        return AllowedReply(task, 0, 0, "validation", rows, own, self.method.egress(layout), images)

    def introduction(self, dxo: DXO) -> SiteInfo:
        """Return what a site says of itself, checked.

        Raises:
            RejectedUpdate: it has tensors, undeclared fields, wrong names, or other counts than the method
                requests.
        """
        meta = _declared(dxo, _INTRODUCTION)
        if dxo.data:
            raise RejectedUpdate("tensors in the answer to an empty task; answer with the labels alone")
        header = {
            "type": "siteinfo",
            "labels": meta.get(LABELS, []),
            "n": {"train": meta.get(IMAGES, 0)},
            "counts": meta.get(COUNTS, {}),
            "label_type": self.label_type,
            "threads": 1,
            "code": "flare",
        }
        info = unpack(Packed({}, header))
        assert isinstance(info, SiteInfo)
        check_reply(info, self.allowed("handshake", Layout({}, {}), (), info.labels, 0))
        return info

    def update(self, dxo: DXO, allowed: AllowedReply) -> Update:
        """Return the update that a site sends, checked against what the method declares.

        Weights that it leaves out are those that the method fixes; else they are 1.

        Raises:
            RejectedUpdate: names the first field, tensor or class that was not declared.
        """
        meta = _declared(dxo, _RESULT)
        shared, head = self.split(dxo.data)
        labels, egress = meta.get(LABELS), allowed.egress
        if labels is None:
            raise RejectedUpdate("the result names no labels; send it with suture.flare.client.send")
        weight = meta.get("weight", float(allowed.images) if egress.weight == ALL_IMAGES else 1.0)
        given = meta.get("class_weights")
        if given is None:
            each = weight if egress.class_weight in (WEIGHT, OWNERS) else 1.0
            counts = allowed.own if egress.class_weight == OWNERS else allowed.labels
            given = [each if name in counts else 0.0 for name in allowed.labels]
        tensors = {f"shared/{name}": t for name, t in shared.items()}
        tensors |= {f"head/{name}": t for name, t in head.items()}
        tensors |= {f"channels/{n}": as_tensor(n, value) for n, value in _table(meta, CHANNELS).items()}
        tensors["class_weights"] = _numbers(given)
        header = {name: meta[name] for name in ("scalars", "train_loss") if name in meta}
        header |= {"type": "update", "round": 0, LABELS: labels, "weight": weight, "kind": egress.kind}
        update = unpack(Packed(tensors, header))
        assert isinstance(update, Update)
        check_reply(update, allowed)
        return update


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a value of a message as a tensor on the CPU; one that lies in a file is read.

    Raises:
        RejectedUpdate: it is no tensor and no array of numbers.
    """
    # FLARE's tensor disk offload sends references, whose class is private.
    read = getattr(value, "materialize", None)
    tensor = read() if callable(read) else value
    if not isinstance(tensor, Tensor):
        if not hasattr(tensor, "__array__"):
            raise RejectedUpdate(f"{name} is a {type(value).__name__} instead of a tensor")
        try:
            tensor = torch.as_tensor(tensor)
        except (TypeError, ValueError):
            raise RejectedUpdate(f"{name} is an array without numbers") from None
    return tensor if tensor.is_meta else tensor.detach().cpu()  # `unpack` refuses one without values


def like(value: Any, tensor: Tensor) -> Any:
    """Return a tensor in the form of another value of the message: as a tensor, or as an array."""
    return tensor if isinstance(value, Tensor) else tensor.numpy()


def statistics_of(shared: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the statistics of batch norm, which no gradient trains."""
    return frozenset(name for name in shared if name.endswith(_STATISTICS))


def check_metrics(metrics: Any) -> Mapping[str, float]:
    """Return the metrics of a result, by which FLARE selects a model: numbers by name.

    Raises:
        RejectedUpdate: they are something else, not finite, or have more than the six digits that may leave.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise RejectedUpdate(f"metrics are a {type(metrics).__name__} instead of a table")
    for name, value in (metrics or {}).items():
        number = type(value) in (int, float) and abs(value) <= LARGEST
        if not isinstance(name, str) or not number or value != rounded(value):
            raise RejectedUpdate(f"the metric {shown(name)} is no number of at most six digits")
    return metrics or {}


def check_labels(labels: Sequence[str]) -> Labels:
    """Return the names of classes of a component's arguments.

    Raises:
        ConfigError: there is none, one is no name, or one appears twice.
    """
    try:
        header = {"type": "siteinfo", "labels": list(labels), "n": {}, "threads": 1, "code": "flare"}
        info = unpack(Packed({}, header))
        assert isinstance(info, SiteInfo)
        if not info.labels or len(set(info.labels)) < len(info.labels):
            raise RejectedUpdate("name each class once")
    except RejectedUpdate as error:
        raise ConfigError(f"labels={shown(labels)}: {error}") from None
    return info.labels


def _declared(dxo: DXO, fields: frozenset[str]) -> Mapping[str, Any]:
    """Return the meta of a DXO, whose fields are all declared."""
    if dxo.data_kind != DataKind.WEIGHTS or not isinstance(dxo.data, dict):
        kind = shown(dxo.data_kind)
        raise RejectedUpdate(f"data of kind {kind} instead of WEIGHTS; set params_transfer_type to FULL")
    if stray := dxo.meta.keys() - fields:
        raise RejectedUpdate(f"meta has the undeclared field {shown(min(map(str, stray)))}")
    meta: Mapping[str, Any] = dxo.meta
    return meta


def _table(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = meta.get(name, {})
    if not isinstance(value, Mapping):
        raise RejectedUpdate(f"{name} is a {type(value).__name__} instead of a table")
    return value


def _numbers(values: Any) -> Tensor:
    if isinstance(values, (list, tuple)) and all(type(value) in (int, float) for value in values):
        with suppress(OverflowError):  # of an integer without end
            return torch.tensor([float(value) for value in values], dtype=torch.float64)
    raise RejectedUpdate("class_weights are no list of numbers")
