"""Personalised FL: the sites share a backbone, and each keeps a head of its own.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.2.2: the upper bound that leaves K models instead of one.
    After Liang et al. Think Locally, Act Globally. arXiv:2001.01523, 2020.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c;  w_k^G stays at the site
    server:      backbone  w^F = 1/K sum_k w_k^F

With `batch_norm` as FedAvg, FedBN (Li et al. 2021) or FedBN+ (Kulkarni et al. 2023), the three PFL rows of
the paper's tables.
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
from suture.methods.aggregation import WeightedMean
from suture.methods.averaging import WHY, train_weights
from suture.methods.base import GlobalModel, LabelView, Method, Personal, RoundContext
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed


@dataclass(frozen=True, config=STRICT)
class PersonalisedFL(Method):
    """Personalised FL.

    Attributes:
        local: see `SurgicalAggregation`.
        batch_norm: ``average`` (FedAvg), ``local`` (FedBN) or ``frozen`` (FedBN+).
    """

    name: ClassVar[str] = "pfl"
    title: ClassVar[str] = "Personalised FL"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 3.2.2"
    label_view: ClassVar[LabelView] = "own"
    personal: ClassVar[Personal] = "head"

    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        return Egress(shared=layout.shared, head={}, why={k: v for k, v in WHY.items() if k != "head"})

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        return train_weights(
            site, received, state, ctx, loss=self.loss, local=self.local, policy=self.batch_norm
        )

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = WeightedMean(previous.labels, previous.shared, head={})
        for update in updates:
            mean.add(update)
        return replace(previous, shared=mean.shared())
