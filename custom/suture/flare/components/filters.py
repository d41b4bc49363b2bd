"""The filters of jobs with a `MethodAggregator`: one at the server, one at each site.

FLARE's own DXO filters let pass what they cannot read; these refuse it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from suture.core.errors import ConfigError, RejectedUpdate, shown
from suture.core.labels import LabelType
from suture.flare.components import contract
from suture.flare.components.contract import Contract
from suture.flare.filters import RETURN_CODES
from suture.models.classifier import Layout
from suture.protocol.messages import LARGEST, Labels

log = logging.getLogger(__name__)

TASK = "suture.task"
"""Property of FLARE's context in which `MethodAggregator` leaves the task of the site that asks."""

_RECEIVED = "suture.received"
"""Property of FLARE's context of one task at a site: what it has received, for the check of its answer."""


class SiteRowsFilter(DXOFilter):
    """At the server, on task data that goes out: each site gets the rows of its own classes, and their names.

    A site whose classes are not known yet gets an empty task. Task data that no `MethodAggregator` has
    prepared do not leave.
    """

    def __init__(self) -> None:
        super().__init__([DataKind.WEIGHTS], [DataKind.WEIGHTS])

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task of the site that asks.

        Raises:
            RejectedUpdate: the aggregator has prepared none.
        """
        # Every site gets the same Shareable of a broadcast: its own must not change.
        task = self.process_dxo(DXO(DataKind.WEIGHTS, {}), shareable, fl_ctx)
        return task.update_shareable(copy.copy(shareable))

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        task = fl_ctx.get_prop(TASK)
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) != FilterKey.OUT or not isinstance(task, DXO):
            raise RejectedUpdate(
                "no MethodAggregator has prepared these task data; add one to the job, and this filter only "
                "to the server's output of its training task"
            )
        return task


@dataclass(frozen=True)
class _Received:
    """The classes and the layout of a task's rows; None where the task asks for the site's classes."""

    labels: Labels
    layout: Layout | None


class DeclaredResultFilter(DXOFilter):
    """At a site, on task data that come in and on results that go out: nothing undeclared passes.

    It holds the site's own classes, and knows those of no other site. A task may ask for them or bring their
    rows; a result has the tensors of its task and the fields that the method declares, each within its range.
    What leaves is built anew from the checked values. The filter does not know the model: shapes are those of
    the task.

    Args:
        method, head, label_type, settings: as in `MethodAggregator`.
        labels: the classes that the site annotates.
        images: the largest number of training images that the site may announce.
        metrics: closed range of each metric that may leave, such as ``{"accuracy": [0, 1]}``.

    Raises:
        ConfigError: see `MethodAggregator`.
    """

    def __init__(
        self,
        method: str,
        labels: Sequence[str],
        head: str = "head",
        label_type: LabelType = "multilabel",
        settings: Mapping[str, Any] | None = None,
        images: int = LARGEST,
        metrics: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        super().__init__([DataKind.WEIGHTS], [DataKind.WEIGHTS])
        self.method, self.head, self.label_type, self.images = method, head, label_type, images
        self.labels, self.settings, self.metrics = list(labels), dict(settings or {}), dict(metrics or {})
        self._contract = Contract.of(method, head, label_type, settings)
        self._own = contract.check_labels(labels)
        if any(len(bounds) != 2 for bounds in self.metrics.values()):
            raise ConfigError("metrics: give the lowest and the highest value of each")

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task data unchanged, or the result built anew.

        Raises:
            RejectedUpdate: something was not declared. FLARE then sends an error code in place of a result
                and writes this error into its log, so it says nothing of the result; log.txt does.
        """
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in RETURN_CODES else ReturnCode.EXECUTION_EXCEPTION)
        try:
            dxo = self.process_dxo(from_shareable(shareable), shareable, fl_ctx)
        except Exception as error:  # noqa: BLE001 - FLARE would write its text into the log of errors
            log.warning("held back: %s", error)
        else:
            incoming = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN
            return shareable if incoming else dxo.to_shareable()
        raise RejectedUpdate("undeclared content is held back; log.txt of this site says why")

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        direction = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION)
        if direction == FilterKey.IN:
            received = self._received(dxo)
            fl_ctx.set_prop(_RECEIVED, received, private=True, sticky=False)
            return dxo
        received = fl_ctx.get_prop(_RECEIVED)
        if direction != FilterKey.OUT or not isinstance(received, _Received):
            raise RejectedUpdate("the task was not seen; add this filter to task data in and to results out")
        if received.layout is None:
            return self._introduction(dxo)
        return self._result(dxo, received.labels, received.layout)

    def _received(self, dxo: DXO) -> _Received:
        if dxo.data == {} and not dxo.meta:
            return _Received((), None)
        if stray := dxo.meta.keys() - {contract.LABELS, contract.PHASE, contract.CHANNELS}:
            raise RejectedUpdate(f"the task has the undeclared field {shown(min(map(str, stray)))}")
        labels = contract.check_labels(dxo.meta.get(contract.LABELS, ()))
        if self._contract.method.labels.view != "all" and set(labels) != set(self._own):
            raise RejectedUpdate("the task has rows of other classes than the site annotates")
        if missing := sorted(set(self._own) - set(labels)):
            raise RejectedUpdate(f"the task lacks the row of {missing[0]!r}")
        shared, head = self._contract.split(dxo.data)
        if any(not rows.dim() or len(rows) != len(labels) for rows in head.values()):
            raise RejectedUpdate(f"the task names {len(labels)} classes and has another number of rows")
        return _Received(labels, Layout.of(shared, head, contract.statistics_of(shared)))

    def _introduction(self, dxo: DXO) -> DXO:
        info = self._contract.introduction(dxo)
        if set(info.labels) != set(self._own):
            raise RejectedUpdate("the script names other classes than the site declares")
        images = info.n["train"]
        if images > self.images:
            raise RejectedUpdate(f"{images} training images; the site declares at most {self.images}")
        counts = {name: pair and list(pair) for name, pair in info.counts.items()}
        meta = {contract.LABELS: list(info.labels), contract.IMAGES: images, contract.COUNTS: counts}
        return DXO(DataKind.WEIGHTS, {}, meta)

    def _result(self, dxo: DXO, labels: Labels, layout: Layout) -> DXO:
        given = dict(dxo.meta)
        metrics = self._metrics(given.pop(MetaKey.INITIAL_METRICS, {}))
        # The server holds the site to the number that it has announced; here it is at most the declared one.
        weight = given.get("weight")
        images = self.images
        if isinstance(weight, (int, float)) and 0 <= weight <= images:
            images = int(weight)
        allowed = self._contract.allowed("train", layout, labels, self._own, images)
        update = self._contract.update(DXO(dxo.data_kind, dxo.data, given), allowed)
        checked = {
            "labels": list(update.labels),
            "weight": update.weight,
            "class_weights": update.class_weights.tolist(),
            "scalars": dict(update.scalars),
            "train_loss": update.train_loss,
            "channels": {name: tensor.numpy() for name, tensor in update.channels.items()},
        }
        meta = {name: checked[name] for name in given}
        if metrics:
            meta[MetaKey.INITIAL_METRICS] = metrics
        tensors = self._contract.joined(update.shared, update.head)
        data = {name: contract.like(dxo.data[name], tensor) for name, tensor in tensors.items()}
        return DXO(DataKind.WEIGHTS, data, meta)

    def _metrics(self, sent: Any) -> dict[str, float]:
        for name, value in contract.check_metrics(sent).items():
            if name not in self.metrics:
                raise RejectedUpdate(f"the undeclared metric {shown(name)}")
            low, high = self.metrics[name]
            if not low <= value <= high:
                raise RejectedUpdate(f"the metric {name} is outside [{low}, {high}]")
        return {name: float(value) for name, value in sent.items()}
