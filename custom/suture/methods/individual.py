"""Individual training: every site by itself; nothing is shared.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.2.1: the model that a site gets from its own data.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c

A reference for the same training loop, initialisation and budget. Each site keeps its own best round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.learning.losses import masked_loss
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.averaging import train_weights
from suture.methods.base import GlobalModel, LabelView, Method, Personal, RoundContext
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed


@dataclass(frozen=True, config=STRICT)
class Individual(Method):
    """Individual training.

    Attributes:
        local: see `SurgicalAggregation`.
        batch_norm: ``frozen`` keeps a pretrained backbone's batch norm as it is; else it is trained.
    """

    name: ClassVar[str] = "individual"
    title: ClassVar[str] = "Individual training"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 3.2.1"
    label_view: ClassVar[LabelView] = "own"
    personal: ClassVar[Personal] = "model"
    here_only: ClassVar[str] = "trains every site by itself and exchanges nothing"

    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        return Egress(shared={}, head={}, why={"metrics": "the site's model on the site's validation data"})

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        return train_weights(
            site, received, state, ctx, loss=self.loss, local=self.local, policy=self.batch_norm
        )

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return previous
