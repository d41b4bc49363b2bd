"""An aggregator for FLARE's own workflows whose mean is that of a method of Suture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from torch import Tensor

from suture.core.errors import ConfigError, FederationError, RejectedUpdate, SutureError, show_value
from suture.core.labels import LabelType
from suture.core.validation import parse
from suture.federation.plan import check_fits, round_context
from suture.federation.server.norms import Measure, NormBound, Norms, norm_of
from suture.flare.components import contract
from suture.flare.components.filters import TASK, stated_name
from suture.methods.base import (
    GlobalModel,
    LabelStatistics,
    Phase,
    RoundContext,
    check_channels,
    with_channels,
)
from suture.privacy.robust import RobustMerge, robustly_merged
from suture.protocol.check import AllowedReply, all_finite
from suture.protocol.egress import Shapes, reorder_axis
from suture.protocol.messages import LARGEST, Labels, SiteInfo, TaskData, Update

_OF_FLARE = frozenset({"client_name", "props", MetaKey.INITIAL_METRICS, MetaKey.JOB_ID, MetaKey.SITE_NAME})
"""What FLARE's controller adds to the meta of a result, and the metrics by which it selects a model."""


class MethodAggregator(contract.ByMethod, ModelAggregator):
    """Aggregates as a method does, with its own code, for FLARE's FedAvg and ScatterAndGather.

    The job needs a `SiteRowsFilter` on what the server sends. A site's first task is empty and asks for its
    classes; from then on it gets the rows of these, and answers with them. Updates are added in the order of
    the sites' names, so the bytes of the model do not depend on the order of arrival. An answer that the
    method does not declare is left out, and the server's log names site and reason; FLARE's controller
    decides what follows.

    Args:
        method: its name, as in a job of Suture.
        labels: the classes of the rows of the model's head, in their order.
        head: name of the layer whose rows are the classes: ``head`` has ``head.weight`` and ``head.bias``.
        label_type: ``multilabel`` or ``multiclass``.
        settings: of the method, as in a job's ``[method]``.
        images: the largest number of training images that a site may announce, and so the largest weight.
        robust: as a job's ``[robust]``: a merge that takes the place of the method's mean. A round with fewer
            results than it needs ends the job.
        max_update: as a job's: how many times the norm of the model, or of what was sent before, an update
            may have; None accepts any.

    Raises:
        ConfigError: there is no such method, it does not run in a federation, or an argument does not fit.
    """

    def __init__(
        self,
        method: str,
        labels: Sequence[str],
        head: str = "head",
        label_type: LabelType = "multilabel",
        settings: Mapping[str, Any] | None = None,
        images: int = LARGEST,
        robust: Mapping[str, Any] | None = None,
        max_update: float | None = 100.0,
    ) -> None:
        super().__init__()
        self.configure(method, labels, head, label_type, settings, images)
        self.robust = dict(robust) if robust is not None else None
        self._robust = parse(RobustMerge, self.robust, "robust") if self.robust is not None else None
        check_fits(self._robust, self._contract.method)
        if max_update is not None and not max_update >= 1:
            raise ConfigError(f"max_update={max_update}: write 1 or more, or None")
        self.max_update = max_update
        self._bound, self._measure = NormBound(max_update), Measure()
        self._before: GlobalModel | None = None  # of the round before, in the same phase
        self._radii: Mapping[str, float] = {}
        self._sites: dict[str, SiteInfo] = {}
        self._params: Mapping[str, Any] = {}  # the global model as FLARE has it
        self._model: GlobalModel | None = None
        self._channels: Mapping[str, Tensor] = {}
        self._round = 0
        self._ctx: RoundContext | None = None
        self._allowed: dict[str, AllowedReply] = {}
        self._received: dict[str, DXO] = {}
        self._norms: dict[str, Norms] = {}
        self._metrics: dict[str, Mapping[str, float]] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        try:
            if event_type == AppEventType.BEFORE_TRAIN_TASK:
                self._prepare(fl_ctx)
            elif event_type == AppEventType.AFTER_CONTRIBUTION_ACCEPT:
                self._introduce(fl_ctx)
        except SutureError as error:
            self.system_panic(str(error), fl_ctx)

    # What a site is sent

    def _prepare(self, fl_ctx: FLContext) -> None:
        """Leave the task of the site that asks for one in FLARE's context, for the filter.

        Raises:
            ConfigError: the model has no such head or another number of rows, the job has too few rounds, or
                the method sends no weights.
        """
        site, data = stated_name(fl_ctx), fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)
        self._round = data.get_header(AppConstants.CURRENT_ROUND, 0)
        # The first round is spent on the sites' classes.
        number = max(self._round, 1)
        rounds = max(data.get_header(AppConstants.NUM_ROUNDS, 0) - 1, number)
        self._ctx = replace(round_context(self._contract.method, 0, rounds, number), sites=len(self._sites))
        self._params = from_shareable(data).data
        self._model = self._global_model()
        known = site in self._sites
        task = self._task(site, self._model, self._ctx.phase) if known else DXO(DataKind.WEIGHTS, {}, {})
        fl_ctx.set_prop(TASK, task, private=True, sticky=False)

    def _global_model(self) -> GlobalModel:
        shared, head = self._contract.split(self._params)
        if {tensor.shape[:1] for tensor in head.values()} != {(len(self._names),)}:
            what = f"the layer {self.head!r} with one row for each of the {len(self._names)} labels"
            raise ConfigError(f"the model lacks {what}; correct head or labels of the aggregator")
        buffers = contract.statistics_of(shared)
        model = GlobalModel(self._names, shared, head, label_type=self.label_type, buffers=buffers)
        model = with_channels(model, self._contract.method)
        return replace(model, channels={**model.channels, **self._channels})

    def _task(self, site: str, model: GlobalModel, phase: Phase) -> DXO:
        method, info = self._contract.method, self._sites[site]
        labels = info.labels if method.labels.view != "all" else model.labels
        shared, head = method.sharing.parts(model.shared, model.rows(labels))
        task = TaskData("train", phase=phase.name, labels=labels, shared=shared, head=head)
        allowed = self._allowed[site] = self._contract.allowed(task, info.labels, info.n["train"])
        if not allowed.egress.shared and not allowed.egress.head:
            raise ConfigError(f"{method.about.title} sends no weights to average; run it with `suture run`")
        tensors = self._contract.joined(shared, head)
        params = {name: contract.like(self._params[name], tensor) for name, tensor in tensors.items()}
        meta: dict[str, Any] = {contract.LABELS: list(labels), contract.PHASE: phase.name}
        if channels := self._sent_down(allowed.egress.forms("down"), model, labels):
            meta[contract.CHANNELS] = {name: tensor.numpy() for name, tensor in channels.items()}
        return DXO(DataKind.WEIGHTS, params, meta)

    def _sent_down(self, forms: Shapes, model: GlobalModel, labels: Labels) -> dict[str, Tensor]:
        """Return what the method sends down besides, and what it makes of the sites' counts of each class."""
        sent = {n: reorder_axis(form, model.channels[n], model.labels, labels) for n, form in forms.items()}
        images = {site: info.n["train"] for site, info in self._sites.items()}
        counts = {site: info.counts for site, info in self._sites.items()}
        facts = self._contract.method.class_facts(
            LabelStatistics(model.labels, images, counts, self.label_type)
        )
        return sent | {name: tensor[model.where(labels)] for name, tensor in facts.tensors.items()}

    # What a site answers

    def _introduce(self, fl_ctx: FLContext) -> None:
        """Take the classes of a site from its answer to an empty task."""
        site, answer = stated_name(fl_ctx), fl_ctx.get_prop(AppConstants.TRAINING_RESULT)
        if answer is None or site in self._sites:
            return
        try:
            _check_sender(site, answer)
            info = self._contract.introduction(from_shareable(answer), self.images)
            if strange := sorted(set(info.labels) - set(self._names)):
                raise RejectedUpdate(f"the class {strange[0]!r}; add it to the job's labels, with a row")
        except Exception as error:  # noqa: BLE001 - FLARE's code has no one error for what is no model
            self.log_warning(fl_ctx, f"{site} cannot take part: {error}")
            return
        self._sites[site] = info
        self.log_info(fl_ctx, f"{site} takes part with {len(info.labels)} classes")

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take a result; ScatterAndGather calls this, also with one of an earlier round, which is refused."""
        try:
            if shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND, self._round) != self._round:
                raise RejectedUpdate("a result of another round")
            _check_sender(site := shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, ""), shareable)
            model = FLModelUtils.from_shareable(shareable)
            model.meta["client_name"] = site
            if model.params:  # else an introduction: see `_introduce`
                self.accept_model(model)
            return bool(model.params)
        except Exception as error:  # noqa: BLE001 - FLARE's code has no one error for what is no model
            self.log_warning(fl_ctx, f"left out: {error}")
            return False

    def accept_model(self, model: FLModel) -> None:
        """Take a result; FedAvg calls this.

        Raises:
            RejectedUpdate: nothing was requested of the site, or the method does not declare the result.
        """
        site = model.meta["client_name"]
        kind = DataKind.WEIGHTS if model.params_type == ParamsType.FULL else DataKind.WEIGHT_DIFF
        dxo = DXO(kind, model.params, {n: v for n, v in model.meta.items() if n not in _OF_FLARE})
        try:
            if site not in self._allowed or site in self._received:
                raise RejectedUpdate("a result that was not requested, or a second one")
            self._norms[site] = self._bounded(site, self._contract.update(dxo, self._allowed[site]))
            metrics = contract.check_metrics(model.metrics or {})
        except RejectedUpdate as error:
            raise RejectedUpdate(f"{site}, round {self._round}: {error}") from None
        self._received[site], self._metrics[site] = dxo, metrics

    def _bounded(self, site: str, update: Update) -> Norms:
        """Return the norms of an update, as Suture's own workflow bounds them.

        Raises:
            RejectedUpdate: they are out of all proportion to the model, or to what was sent before.
        """
        assert self._model is not None
        assert self._ctx is not None
        sharing, model = self._contract.method.sharing, self._model
        if self._bound.initial is None:
            self._bound = replace(self._bound, initial=norm_of(*sharing.parts(model.shared, model.head)))
        self._bound = self._bound.in_phase(self._ctx.phase.name)
        norms = self._measure(update, self._allowed[site].task, self._allowed[site].egress)
        self._bound.check(site, norms)
        return norms

    def aggregate_model(self) -> FLModel:
        """Return the next model, with every tensor of the present one; without any update the same.

        Its metrics are the plain means over the sites, of those that every site has sent.

        Raises:
            ConfigError: the method returns other channels than it declares.
            FederationError: no task was sent before, or the new model is not finite.
        """
        if self._model is None or self._ctx is None:
            raise FederationError("no task was sent in this job yet, so there is no model")
        if not self._received:
            return FLModel(params=dict(self._params), params_type=ParamsType.FULL)
        method = self._contract.method
        following = method.aggregate(self._model, self._updates(self._model, self._ctx), self._ctx)
        check_channels(following, method)
        merged = self._contract.joined(following.shared, following.head)
        for name, tensor in {**merged, **following.channels}.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                raise FederationError(f"{name} of the model of round {self._round} is not finite")
        self._channels, self._bound = following.channels, self._bound.after(self._norms)
        changed = {name: contract.like(self._params[name], tensor) for name, tensor in merged.items()}
        sent = [self._metrics[site] for site in sorted(self._received)]
        means = {name: fmean(one[name] for one in sent) for name in sorted(set.intersection(*map(set, sent)))}
        return FLModel(params={**self._params, **changed}, params_type=ParamsType.FULL, metrics=means or None)

    def _updates(self, model: GlobalModel, ctx: RoundContext) -> Iterable[Update]:
        """Return the updates as the robust merge leaves them.

        Raises:
            FederationError: they are too few for it.
        """
        updates, robust = _Updates(self._contract, self._received, self._allowed), self._robust
        if robust is None:
            return updates
        if len(self._received) < robust.fewest:
            raise FederationError(
                f"round {self._round} has {len(self._received)} results, and robust.kind={robust.kind!r} "
                f"with liars={robust.liars} needs {robust.fewest}; let the workflow wait for more clients"
            )
        if ctx.phase_round == 1:
            self._before, self._radii = None, {}
        merged = robustly_merged(robust, model, self._before, updates, self._radii)
        self._before, self._radii = model, merged.radii
        if merged.plain:
            plain = ", ".join(sorted(name or "the shared tensors" for name in merged.plain))
            self.logger.warning(
                f"round {self._round}: too few sites for the robust merge, plain mean: {plain}"
            )
        return merged.updates

    def reset_stats(self) -> None:
        """Forget the results of a round."""
        self._received, self._allowed, self._metrics = {}, {}, {}
        self._norms, self._measure = {}, Measure()


@dataclass(frozen=True)
class _Updates:
    """The updates in the order of the sites' names; those that lie on disk are read one at a time."""

    rules: contract.Contract
    received: Mapping[str, DXO]
    allowed: Mapping[str, AllowedReply]

    def __iter__(self) -> Iterator[Update]:
        # A generator would hold an update while the next one is read.
        return map(self._read, sorted(self.received))

    def _read(self, site: str) -> Update:
        return self.rules.update(self.received[site], self.allowed[site])


def _check_sender(site: str, result: Shareable) -> None:
    """Refuse a name that is not the one of the token, whose client FLARE's server puts into the result."""
    name = getattr(result.get_header(ServerCommandKey.FL_CLIENT), "name", None)
    if name != site:
        raise RejectedUpdate(f"{show_value(name)} sent it and states the name {show_value(site)}")
