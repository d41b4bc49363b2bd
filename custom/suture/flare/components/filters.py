"""The filters of jobs with a `MethodAggregator`: one at the server, one at each site.

FLARE's own DXO filters let pass what they cannot read; these refuse it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from suture.core.errors import ConfigError, RejectedUpdate, show_value
from suture.core.labels import LabelType
from suture.flare.compat.task_client import client_of
from suture.flare.components import contract
from suture.flare.executor import ALLOWED, RETURN_CODES
from suture.protocol.check import AllowedReply
from suture.protocol.messages import LARGEST
from suture.protocol.packing import pack, without_tensors

TASK = "suture.task"
"""Property of FLARE's context in which `MethodAggregator` leaves the task of the site that asks."""

_CHAINS = {FilterKey.IN: FilterChainType.TASK_DATA_CHAIN, FilterKey.OUT: FilterChainType.TASK_RESULT_CHAIN}
"""What passes a filter of a site in each direction."""


def stated_name(fl_ctx: FLContext) -> str:
    """Return the name that the site of a request states: changed code of a site can state any."""
    return str(fl_ctx.get_peer_context().get_identity_name())


class SiteRowsFilter(Filter):
    """At the server, on task data that goes out: each site gets the rows of its own classes, and their names.

    A site whose classes are not known yet gets an empty task, and so does one that states the name of another
    site. Task data that no `MethodAggregator` has prepared do not leave.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task of the site that asks.

        Raises:
            RejectedUpdate: the aggregator has prepared none.
        """
        task = fl_ctx.get_prop(TASK)
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) != FilterKey.OUT or not isinstance(task, DXO):
            raise RejectedUpdate("no MethodAggregator has prepared this task; the job needs one")
        if (stated := stated_name(fl_ctx)) != (client := client_of(shareable, fl_ctx)):
            self.log_warning(fl_ctx, f"{client} states the name {show_value(stated)}; it gets no rows")
            task = DXO(DataKind.WEIGHTS, {}, {})
        return task.update_shareable(copy.copy(shareable))  # every site gets the same one of a broadcast


class DeclaredResultFilter(contract.ByMethod, DXOFilter):
    """At a site, on task data that come in and on results that go out: nothing undeclared passes.

    It holds the site's own classes, and knows those of no other site. A task may ask for them or bring their
    rows; a result has the tensors of its task and the fields that the method declares, each within its range.
    What leaves is built anew from the checked values. The filter does not know the model: shapes are those of
    the task.

    `method`, `head`, `label_type` and `settings` are as in `MethodAggregator`.

    Args:
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
        self.configure(method, labels, head, label_type, settings, images)
        self.metrics = dict(metrics or {})
        if any(not isinstance(bounds, Sequence) or len(bounds) != 2 for bounds in self.metrics.values()):
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
            incoming = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN
            return shareable if incoming else dxo.to_shareable()
        except Exception as error:  # noqa: BLE001 - FLARE would write its text into the log of errors
            self.log_warning(fl_ctx, f"held back: {error}")
        raise RejectedUpdate("undeclared content is held back; log.txt of this site says why")

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        direction = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION)
        # At the server, a result comes in: taken for a task, its tensors would pass.
        if self.get_prop(FilterContextKey.CHAIN_TYPE, _CHAINS.get(direction)) != _CHAINS.get(direction):
            raise RejectedUpdate("the wrong place; add this filter to a site's task data in and results out")
        if direction == FilterKey.IN:
            fl_ctx.set_prop(ALLOWED, self._allowed(dxo), private=True, sticky=False)
            return dxo
        allowed = fl_ctx.get_prop(ALLOWED)
        if direction != FilterKey.OUT or allowed is None:
            raise RejectedUpdate("the task was not seen; add this filter to task data in and to results out")
        return self._introduction(dxo) if allowed.task.task == "handshake" else self._result(dxo, allowed)

    def _allowed(self, dxo: DXO) -> AllowedReply:
        task, own_only = self._contract.task(dxo), self._contract.method.labels.view != "all"
        labels, own = set(task.labels), set(self._names)
        if task.task == "train" and (labels != own if own_only else not labels >= own):
            raise RejectedUpdate("the task has classifier weights of classes that the site does not label")
        allowed = self._contract.allowed(task, self._names, self.images)
        return replace(allowed, task=without_tensors(task))

    def _introduction(self, dxo: DXO) -> DXO:
        info = self._contract.introduction(dxo, self.images)
        if set(info.labels) != set(self._names):
            raise RejectedUpdate("other classes than the site declares to its filter")
        about = {contract.LABELS: list(info.labels), contract.IMAGES: info.n["train"]}
        return DXO(DataKind.WEIGHTS, {}, {**about, contract.COUNTS: dict(info.counts)})

    def _result(self, dxo: DXO, allowed: AllowedReply) -> DXO:
        stated = dict(dxo.meta)
        metrics = contract.check_metrics(stated.pop(MetaKey.INITIAL_METRICS, {}), self.metrics)
        # The server holds the site to the number that it has announced; here it is at most the declared one.
        weight = stated.get("weight")
        if isinstance(weight, (int, float)) and 0 <= weight <= self.images:
            allowed = replace(allowed, images=int(weight))
        update = self._contract.update(DXO(dxo.data_kind, dxo.data, stated), allowed)
        checked = {**pack(update).header, "class_weights": update.class_weights.tolist()}
        checked["channels"] = {name: contract.plain(t).numpy() for name, t in update.channels.items()}
        meta = {n: checked[n] for n in stated} | ({MetaKey.INITIAL_METRICS: metrics} if metrics else {})
        tensors = self._contract.joined(update.shared, update.head)
        data = {name: contract.like(dxo.data[name], contract.plain(t)) for name, t in tensors.items()}
        return DXO(DataKind.WEIGHTS, data, meta)
