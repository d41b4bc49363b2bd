"""Centralised training: the data of all sites in one place. Two references, no federation.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.1 ("Central"; "Naive" of the MIDL 2023 version), and
    the baseline trained on complete data of the simulations (Sec. 4.2.1).

    central:        minimise  L = 1/|C| sum_{c in C} BCE_c,  with y_c = 0 for c not in C_k
    central_full:   minimise  L = 1/|C| sum_{c in C} BCE_c,  every label known: the upper bound

Hospitals that could pool their images would need no federation; these say what the federation costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.learning.losses import masked_loss
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.aggregation import weighted_mean
from suture.methods.averaging import train_weights, weights_egress
from suture.methods.base import GlobalModel, LabelView, Method, RoundContext
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed

_WHY = "pools the images of all sites"


@dataclass(frozen=True, config=STRICT)
class Central(Method):
    """Pooled data; what a site does not annotate is absent. See `SurgicalAggregation` for the fields."""

    name: ClassVar[str] = "central"
    title: ClassVar[str] = "Centralised training"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 3.3.1"
    label_view: ClassVar[LabelView] = "own"
    missing_is_negative: ClassVar[bool] = True
    pooled: ClassVar[bool] = True
    here_only: ClassVar[str] = _WHY

    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        return weights_egress(layout)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        return train_weights(
            site, received, state, ctx, loss=self.loss, local=self.local, policy=self.batch_norm
        )

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return only(previous, updates)


@dataclass(frozen=True, config=STRICT)
class CentralFull(Method):
    """Pooled data of which every label is known. See `SurgicalAggregation` for the fields."""

    name: ClassVar[str] = "central_full"
    title: ClassVar[str] = "Centralised training on complete labels"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 4.2.1"
    label_view: ClassVar[LabelView] = "own"
    pooled: ClassVar[bool] = True
    every_label: ClassVar[bool] = True
    here_only: ClassVar[str] = _WHY

    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        return weights_egress(layout)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        return train_weights(
            site, received, state, ctx, loss=self.loss, local=self.local, policy=self.batch_norm
        )

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return only(previous, updates)


def only(previous: GlobalModel, updates: Iterable[Update]) -> GlobalModel:
    """The model of the one party: a mean of one."""
    mean = weighted_mean(previous, updates)
    return replace(previous, shared=mean.shared(), head=mean.head())
