"""Surgical Aggregation: every site trains its own classes; the server stitches the head, class by class.

    Kulkarni, Kanhere, Yi, Parekh. Surgical Aggregation: Federated Class-Heterogeneous Learning.
    arXiv:2301.06683v5, 2024; Algorithm 1. First published with "Harmonizing Distributed Datasets with
    Diverse Tasks" in the title, MIDL 2023.

The model is a representation block (backbone) F and a task block (head) G. Site k knows the classes C_k.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c                              (Eq. 3)
    server:      backbone  w^F     = 1/K sum_k w_k^F                                      (Eq. 6)
                 head      (w^G)_c = mean of (w_k^G)_c over the sites {k : c in C_k}      (Eq. 7)

A class of a single site keeps that site's row unchanged, and a site only ever sees the rows of C_k: which
classes the others know, it never learns.
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
class SurgicalAggregation(Method):
    """Surgical Aggregation.

    Attributes:
        local: Adam, learning rate 5e-5, one epoch a round, batches of 64 (Sec. 3.4).
        batch_norm: ``average`` (FedAvg), or ``frozen`` (FedBN+: a pretrained backbone's batch norm stays as
            it is and is sent once).
    """

    name: ClassVar[str] = "surgical"
    title: ClassVar[str] = "Surgical Aggregation"
    paper: ClassVar[str] = "Kulkarni et al. 2024, arXiv:2301.06683"
    label_view: ClassVar[LabelView] = "own"

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
        mean = weighted_mean(previous, updates)  # every site sends its own rows only, each of weight 1
        return replace(previous, shared=mean.shared(), head=mean.head())
