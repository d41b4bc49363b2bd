"""Vanilla FL: FedAvg over the union of all classes; what a site does not annotate counts as absent.

    McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017;
    as the baseline of Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.2.

    at site k:   minimise  L = 1/|C| sum_{c in C} BCE_c,  with y_c = 0 for c not in C_k
    server:      w = 1/K sum_k w_k, every row included

This is the harm that the other methods undo: a finding that one site annotates is taught as absent by all
the others. Every site sees the names of all classes.
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


@dataclass(frozen=True, config=STRICT)
class VanillaFL(Method):
    """Vanilla FL: unknown is negative. See `SurgicalAggregation` for the fields."""

    name: ClassVar[str] = "vanilla"
    title: ClassVar[str] = "Vanilla FL"
    paper: ClassVar[str] = "McMahan et al. 2017; Kulkarni et al. 2024, Sec. 3.3.2"
    label_view: ClassVar[LabelView] = "all"
    missing_is_negative: ClassVar[bool] = True

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
        mean = weighted_mean(previous, updates)  # every site sends every row
        return replace(previous, shared=mean.shared(), head=mean.head())
