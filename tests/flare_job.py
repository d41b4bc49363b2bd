"""What FLARE's server does with a `MethodAggregator` and its filter, without FLARE: site after site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import ReservedHeaderKey
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from torch import Tensor

from suture.flare.components import MethodAggregator, SiteRowsFilter

LABELS = ("Edema", "Hernia", "Mass", "Nodule", "Pneumonia")
SITES = {"alpha": ("Mass", "Nodule"), "beta": ("Hernia", "Nodule"), "gamma": ("Edema", "Mass", "Nodule")}
START = {"b": torch.zeros(3), "head.weight": torch.full((5, 2), -1.0), "head.bias": torch.full((5,), -1.0)}


def context(peer: str, direction: str = FilterKey.OUT) -> FLContext:
    """The context of a request of a site, or of a task at one."""
    ctx, other = (
        FLContextManager(
            engine=None, identity_name=name, job_id="job", public_stickers={}, private_stickers={}
        ).new_context()
        for name in ("server", peer)
    )
    ctx.set_peer_context(other)
    ctx.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
    return ctx


class FlareJob:
    """The server's half of FLARE's FedAvg.

    Attributes:
        params: the global model.
    """

    def __init__(self, aggregator: MethodAggregator, params: Mapping[str, Any], rounds: int = 4) -> None:
        self.aggregator, self.params, self.rounds, self.round = aggregator, dict(params), rounds, 0
        self.panics: list[str] = []
        aggregator.system_panic = lambda reason, _: self.panics.append(reason)
        aggregator.reset_stats()

    def task(self, site: str, stated: str | None = None) -> DXO:
        """What a site that asks is sent; it may state another name than its own."""
        data = DXO(DataKind.WEIGHTS, self.params, {"left over": 1}).to_shareable()
        data.set_header(AppConstants.CURRENT_ROUND, self.round)
        data.set_header(AppConstants.NUM_ROUNDS, self.rounds)
        ctx = context(stated or site)
        ctx.set_prop(AppConstants.TRAIN_SHAREABLE, data, private=True, sticky=False)
        self.aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, ctx)
        under_way = {f"task of {site}": SimpleNamespace(client=Client(site, "token"))}
        data.set_header(ReservedHeaderKey.TASK_ID, f"task of {site}")
        communicator = SimpleNamespace(process_task_check=lambda number, _: under_way.get(number))
        workflow = SimpleNamespace(controller=SimpleNamespace(communicator=communicator))
        ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(current_wf=workflow), private=True, sticky=False)
        return from_shareable(SiteRowsFilter().process(data, ctx))

    def introduce(
        self,
        site: str,
        labels: Iterable[str],
        images: int = 0,
        counts: Any = None,
        stated: str | None = None,
    ) -> None:
        """A site answers to its empty task; it may state another name than its own."""
        self.task(site)
        meta = {"labels": list(labels), "images": images, **({"counts": counts} if counts else {})}
        ctx = context(stated or site)
        result = DXO(DataKind.WEIGHTS, {}, meta).to_shareable()
        result.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
        ctx.set_prop(AppConstants.TRAINING_RESULT, result, private=True, sticky=False)
        self.aggregator.handle_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, ctx)

    def answer(self, site: str, params: Mapping[str, Any], **meta: Any) -> None:
        """A site sends a result."""
        meta |= {"client_name": site, "props": {}}
        self.aggregator.accept_model(FLModel(params=dict(params), meta=meta))

    def close(self) -> FLModel:
        """End the round, and begin the next one from its model."""
        model = self.aggregator.aggregate_model()
        self.params = model.params
        self.round += 1
        self.aggregator.reset_stats()
        return model


def known_job(
    method: str = "surgical",
    sites: Mapping[str, Iterable[str]] = SITES,
    start: Mapping[str, Any] = START,
    **arguments: Any,
) -> FlareJob:
    """A job whose sites have said their classes, and that each has 10 images."""
    known = FlareJob(MethodAggregator(method, LABELS, **arguments), start)
    for site, labels in sites.items():
        known.introduce(site, labels, images=10)
    known.close()
    return known


def full(value: float, rows: int) -> dict[str, Tensor]:
    """The tensors of a site, each number the same."""
    tensors = {"b": torch.zeros(3), "head.weight": torch.zeros(rows, 2), "head.bias": torch.zeros(rows)}
    return {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}
