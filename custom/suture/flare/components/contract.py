"""What server and sites exchange in FLARE's own messages: the model in `params`, everything else in `meta`.

A task has under `LABELS` the classes of its rows, under `PHASE` the method's phase, and under `CHANNELS` what
the method sends down besides. A site's first task is empty: the site answers with its own classes, `IMAGES`
and `COUNTS`, and no tensor. Then it answers with the tensors that it received, trained, their `LABELS`, and
other fields of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind
from torch import Tensor

from suture.core.errors import ConfigError, LabelError, RejectedUpdate, show_value
from suture.core.labels import LabelSet, LabelType, check_spelling
from suture.core.validation import parse
from suture.methods import method_class
from suture.methods.base import Method
from suture.models.classifier import HEADS, Layout
from suture.protocol import egress
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import round_figure
from suture.protocol.messages import LARGEST, RECORDED, Labels, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, unpack

LABELS, PHASE, CHANNELS, IMAGES, COUNTS = "labels", "phase", "channels", "images", "counts"

_TASK = frozenset({LABELS, PHASE, CHANNELS})
_INTRODUCTION = frozenset({LABELS, IMAGES, COUNTS})
_RESULT = frozenset({LABELS, CHANNELS, "class_weights", *RECORDED})
_HEAD, _BACKBONE = HEADS[0], "backbone."
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

LARGEST_VALUE = 1e15
"""Largest absolute value of a tensor: the squares that a server's optimiser sums stay finite in float32."""

MOST_METRICS, LONGEST_METRIC = 100, 64
"""Largest number of metrics of a result, and of characters of the name of one."""


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
    def of(cls, name: str, head: str, label_type: LabelType, settings: Mapping[str, Any]) -> Contract:
        """Return the contract of a method, of this distribution or of another package.

        Raises:
            ConfigError: there is no such method, it cannot run in a federation or with such labels, or a
                setting does not fit.
        """
        method = parse(method_class(name), settings, f"settings of {name}")
        about, types = method.about, method.labels.types
        if about.local_only:
            raise ConfigError(f"{about.title} {about.local_only}; choose a federated method")
        if label_type not in types:
            raise ConfigError(f"{about.title} is for {' or '.join(types)} labels; set label_type")
        return cls(method, head, label_type)

    def split(self, params: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors outside the head and those of the head, under the names that methods know.

        Batch norm is left out where the method does not average it.

        Raises:
            RejectedUpdate: a value is no tensor and no array of numbers.
        """
        head, norms = f"{self.head}.", set[str]()
        if self.method.sharing.batch_norm != "average":
            norms = {name.rpartition(".")[0] for name in params if name.endswith(_STATISTICS)}
        kept = {n: as_tensor(n, value) for n, value in params.items() if n.rpartition(".")[0] not in norms}
        shared = {f"{_BACKBONE}{name}": t for name, t in kept.items() if not name.startswith(head)}
        return shared, {_HEAD + n.removeprefix(head): kept[n] for n in sorted(kept) if n.startswith(head)}

    def joined(self, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names that the model has: the inverse of `split`."""
        rows = {f"{self.head}.{name.removeprefix(_HEAD)}": tensor for name, tensor in head.items()}
        return {name.removeprefix(_BACKBONE): tensor for name, tensor in shared.items()} | rows

    def allowed(self, task: TaskData, own: Labels = (), images: int = 0) -> AllowedReply:
        """Return what a site may answer, in the shapes of the task: its filter does not know the model."""
        layout = Layout.of(task.shared, task.head, statistics_of(task.shared))
        return AllowedReply(task, self.method.egress(layout), own, images)

    def task(self, dxo: DXO) -> TaskData:
        """Return the task that has come to a site: for its classes, or to train.

        Raises:
            RejectedUpdate: it has an undeclared field, names no classes, or has not a row for each.
        """
        if dxo.data == {} and not dxo.meta:
            return TaskData("handshake")
        labels, (shared, head) = check_labels(_declared(dxo, _TASK).get(LABELS, ())), self.split(dxo.data)
        if any(not rows.dim() or len(rows) != len(labels) for rows in head.values()):
            raise RejectedUpdate(f"the task names {len(labels)} classes and has another number of rows")
        return TaskData("train", labels=labels, shared=shared, head=head)

    def introduction(self, dxo: DXO, images: int) -> SiteInfo:
        """Return what a site says of itself, checked.

        Args:
            dxo: its message.
            images: the largest number of training images that it may announce.

        Raises:
            RejectedUpdate: it has tensors, undeclared fields, wrong names, too many images, or other counts
                than the method requests.
        """
        meta = _declared(dxo, _INTRODUCTION)
        header = {"type": "siteinfo", "threads": 1, "code": "flare", "label_type": self.label_type}
        header |= {"labels": meta.get(LABELS), "n": {"train": meta.get(IMAGES, 0)}}
        info = unpack(Packed(dxo.data, {**header, "counts": meta.get(COUNTS, {})}))
        assert isinstance(info, SiteInfo)
        check_reply(info, allowed := self.allowed(TaskData("handshake"), info.labels))
        if info.n["train"] > images:
            raise RejectedUpdate(f"{info.n['train']} training images; the declared limit is {images}")
        if allowed.egress.weight == egress.NUM_SAMPLES and not info.n["train"]:
            raise RejectedUpdate("no training images, by which the method weights sites; name their number")
        return info

    def update(self, dxo: DXO, allowed: AllowedReply) -> Update:
        """Return the update that a site sends, checked against what the method declares.

        Weights may be left out where the method fixes them.

        Raises:
            RejectedUpdate: names the first field, tensor or class that was not declared, or the tensor with a
                value above `LARGEST_VALUE`.
        """
        meta, declared = _declared(dxo, _RESULT), allowed.egress
        if LABELS not in meta:
            raise RejectedUpdate("the result names no labels; send it with suture.flare.client.send")
        weight: Any = meta.get(
            "weight", _fixed((0, 1) if declared.over_classes else declared.weight, allowed.images)
        )
        each = _fixed(declared.class_weight, weight)
        rows = allowed.task.labels
        counted = allowed.own if declared.class_weight == egress.OWNED_CLASSES else rows
        fixed = [each if name in counted else 0.0 for name in rows]
        if not isinstance(channels := meta.pop(CHANNELS, {}), Mapping):
            raise RejectedUpdate(f"channels are a {type(channels).__name__} instead of a table")
        groups = zip(("shared", "head", "channels"), (*self.split(dxo.data), channels), strict=True)
        tensors = {f"{group}/{n}": as_tensor(n, t) for group, named in groups for n, t in named.items()}
        tensors["class_weights"] = as_tensor("class_weights", meta.pop("class_weights", fixed), torch.float64)
        header = {**meta, "type": "update", "round": 0, "weight": weight, "kind": declared.kind}
        update = unpack(Packed(tensors, header))
        assert isinstance(update, Update)
        check_reply(update, allowed)
        for name, t in {**update.shared, **update.head, **update.channels}.items():
            if t.numel() and not t.is_complex() and max(abs(e.item()) for e in t.aminmax()) > LARGEST_VALUE:
                raise RejectedUpdate(f"{name} has a value above {LARGEST_VALUE:g}, so the training diverged")
        return update


class ByMethod:
    """What the aggregator and the filter of a site are both told, kept where FLARE's export finds it."""

    def configure(
        self,
        method: str,
        labels: Sequence[str],
        head: str,
        label_type: LabelType,
        settings: Mapping[str, Any] | None,
        images: int,
    ) -> None:
        """Keep the arguments: FLARE exports one that is an attribute of the same name.

        Raises:
            ConfigError: see `Contract.of`; or a label cannot be a name.
        """
        self.method, self.head, self.label_type, self.images = method, head, label_type, images
        self.labels, self.settings = list(labels), dict(settings or {})
        self._contract = Contract.of(method, head, label_type, self.settings)
        self._names = check_labels(labels)


def _fixed(declared: egress.Range | str, otherwise: float) -> float | None:
    """Return the weight that a declaration fixes, by a word or a range of one number; else None."""
    if isinstance(declared, str):
        return otherwise
    return declared[0] if declared[0] == declared[1] else None


def as_tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a value of a message as a tensor on the CPU; one that lies in a file is read.

    Raises:
        RejectedUpdate: it is no tensor and no array of numbers, or cannot be read.
    """
    # FLARE's tensor disk offload sends references, whose class is private.
    read = getattr(value, "materialize", None)
    try:
        value = read() if callable(read) else value
    except Exception as error:
        raise RejectedUpdate(f"{name} cannot be read from its file ({type(error).__name__})") from error
    try:
        tensor = torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RejectedUpdate(f"{name} is neither a tensor nor an array of numbers") from None
    return tensor if tensor.is_meta else tensor.detach().cpu()  # `unpack` refuses one without values


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous copy: no subclass, no attributes, and none of the storage behind a view."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    copied.copy_(tensor)  # what it returns may be of the subclass
    return copied


def like(value: Any, tensor: Tensor) -> Any:
    """Return a tensor in the form of another value of the message: as a tensor, or as an array."""
    return tensor if isinstance(value, Tensor) else tensor.numpy()


def statistics_of(shared: Iterable[str]) -> frozenset[str]:
    """Return the names of the statistics of batch norm, which no gradient trains."""
    return frozenset(name for name in shared if name.endswith(_STATISTICS))


def check_metrics(metrics: Any, bounds: Mapping[str, Sequence[float]] | None = None) -> dict[str, float]:
    """Return the metrics of a result, by which FLARE selects a model: numbers by name.

    Args:
        bounds: closed range of each metric that may be there; None for any number.

    Raises:
        RejectedUpdate: there is another metric, or one outside its range or of more than six digits; or a
            name is no short printable text, or there are too many.
    """
    if not isinstance(metrics, Mapping) or len(metrics) > MOST_METRICS:
        raise RejectedUpdate(f"metrics must be a table of at most {MOST_METRICS}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_METRIC:
            raise RejectedUpdate(f"metric {show_value(name)}: give 1 to {LONGEST_METRIC} printable letters")
        low, high = (-LARGEST, LARGEST) if bounds is None else bounds.get(name, (1, 0))
        if type(value) not in (int, float) or not low <= value <= high or value != round_figure(value):
            raise RejectedUpdate(
                f"the metric {show_value(name)} is undeclared, outside its range or not rounded"
            )
    return dict(metrics)


def check_labels(labels: Iterable[str]) -> Labels:
    """Return the names of classes.

    Raises:
        LabelError: there is none, one cannot be a name, one appears twice, or the names are no list.
    """
    if isinstance(labels, str):
        raise LabelError(f"{labels!r} is one name; give a list of names")
    return LabelSet(tuple(map(check_spelling, labels))).names


def _declared(dxo: DXO, fields: frozenset[str]) -> dict[str, Any]:
    """Return a copy of the meta of a DXO, whose fields are all declared."""
    kind = isinstance(dxo.data_kind, str) and dxo.data_kind == DataKind.WEIGHTS
    if not kind or not isinstance(dxo.data, dict) or not all(isinstance(name, str) for name in dxo.data):
        raise RejectedUpdate(
            f"{show_value(dxo.data_kind)} instead of WEIGHTS by name; set params_transfer_type to FULL"
        )
    meta: dict[str, Any] = dict(dxo.meta)
    if stray := meta.keys() - fields:
        raise RejectedUpdate(f"meta has the undeclared field {show_value(min(map(str, stray)))}")
    return meta
