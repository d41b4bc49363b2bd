"""Meta-Federated Learning: sites with different tasks meta-train one model that a new task adapts fast.

    Zhang, Zhu, Sun, Zhu, Jin. PMFL: Partial Meta-Federated Learning for heterogeneous tasks and its
    applications on real-world medical records. arXiv:2112.05321, 2021; Algorithm 1.
    After Finn, Abbeel, Levine. Model-Agnostic Meta-Learning. ICML 2017.

    at site k:   phi_0 = theta;  phi_{s+1} = phi_s - alpha grad L_support(phi_s),  s < S       (Eq. 3)
                 L_k = L_query(phi_S)
                 g_k = grad_phi L_k at phi_S  (`order=1`), or grad_theta L_k through all steps  (`order=2`)
    server:      theta <- theta - beta 1/K sum_k g_k, by Adam                                   (Eq. 4)

The paper returns the loss L_k alone. A number has no derivative: where server and sites are different
machines the gradient must travel, and does here. `order=2` is Eq. 4 to the letter; `order=1`, which leaves
out the derivative of the inner steps, is what the published program computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.learning.losses import masked_loss
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, LabelView, Method, RoundContext
from suture.methods.meta.inner_loop import (
    INNER,
    ServerStep,
    check_inner,
    gradient_egress,
    gradient_update,
    stepped,
)
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed


@dataclass(frozen=True, config=STRICT)
class MetaFL(Method):
    """MetaFL.

    Attributes:
        local: the inner loop, plain SGD: alpha is its `lr`, S its `iterations`.
        server: the step of the server.
        order: of the gradient, 1 or 2.
        batches: B, batches of one pass over a site's data; a round takes one of each site.
        batch_norm: ``frozen`` alone; statistics have no gradient.
    """

    name: ClassVar[str] = "metafl"
    title: ClassVar[str] = "MetaFL"
    paper: ClassVar[str] = "Zhang et al. 2021, Algorithm 1"
    label_view: ClassVar[LabelView] = "own"
    single_target: ClassVar[bool] = True
    fixed_steps: ClassVar[bool] = True

    local: LocalTraining = INNER
    server: ServerStep = field(default_factory=ServerStep)
    order: Literal[1, 2] = 1
    batches: Annotated[int, Field(ge=1)] = 100
    batch_norm: NormPolicy = "frozen"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def egress(self, layout: Layout) -> Egress:
        return gradient_egress(layout)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def behind_losses(self, images: int, local: LocalTraining) -> int:
        return images // self.batches // 2

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        return gradient_update(self, site, received, ctx, self.batches, self.order), {}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return stepped(self, previous, updates, self.server)
