"""FedAvg of the inner loop of MetaFL: what its paper calls FL.

    Zhang, Zhu, Sun, Zhu, Jin. PMFL. arXiv:2112.05321, 2021; Eqs. 1 and 2. After McMahan et al. 2017.

    at site k:   phi_k = theta after S steps of SGD on the support half of the round's batch
    server:      theta = 1/K sum_k phi_k

Every site has a task of its own under one row of the head, so this averages rows of different meanings; the
paper shows what that does to a new task.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.learning.losses import masked_loss
from suture.learning.training import Fitted, LocalTraining, SiteContext
from suture.methods.aggregation import weighted_mean
from suture.methods.averaging import trained, weights_egress
from suture.methods.base import GlobalModel, LabelView, Method, RoundContext
from suture.methods.meta.inner_loop import INNER, adapted, check_inner
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed


@dataclass(frozen=True, config=STRICT)
class FL(Method):
    """FedAvg of the inner loop; see `MetaFL` for the fields."""

    name: ClassVar[str] = "fl"
    title: ClassVar[str] = "FL (of the inner loop)"
    paper: ClassVar[str] = "Zhang et al. 2021, Eqs. 1 and 2"
    label_view: ClassVar[LabelView] = "own"
    single_target: ClassVar[bool] = True
    fixed_steps: ClassVar[bool] = True

    local: LocalTraining = INNER
    batches: Annotated[int, Field(ge=1)] = 100
    batch_norm: NormPolicy = "frozen"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def egress(self, layout: Layout) -> Egress:
        return weights_egress(layout)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def behind_losses(self, images: int, local: LocalTraining) -> int:
        return images // self.batches // 2

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        done = adapted(site, self.loss, self.local, ctx, self.batches, second_order=False)
        return trained(site, received, ctx, Fitted(done.support_loss, {})), {}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = weighted_mean(previous, updates)
        return replace(previous, shared=mean.shared(), head=mean.head())
