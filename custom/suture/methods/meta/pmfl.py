"""Partial Meta-Federated Learning: MetaFL of one half of the model; the other half is each party's own.

    Zhang, Zhu, Sun, Zhu, Jin. PMFL: Partial Meta-Federated Learning for heterogeneous tasks and its
    applications on real-world medical records. arXiv:2112.05321, 2021; Algorithm 2.

    at site k:   phi_k[:N/2] <- theta[:N/2];  phi_k[N/2:] stays as the site left it
                 phi_k <- S steps of SGD on the support half, all of phi_k                     (Eq. 3)
                 L_k = L_query(phi_k);  g_k = its gradient, of the first half
    server:      theta[:N/2] <- theta[:N/2] - beta 1/K sum_k g_k, by Adam                      (Eq. 4)
                 theta[N/2:] stays as it was initialised

Half of a model is the first half of the rows of each tensor: so in the published program, where an LSTM
shares its input and forget gates, the embedding half of the words, and an output layer of one row nothing.
Whole hidden units (`share.of="units"`) are what the paper's words suggest. As in `metafl.py`, gradients
travel rather than the paper's losses, and only of the rows that are shared.
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
from suture.methods.share import Share
from suture.models.classifier import Layout
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed


@dataclass(frozen=True, config=STRICT)
class PMFL(Method):
    """PMFL.

    Attributes:
        share: the part of the model that server and sites share.
        The rest as in `MetaFL`.
    """

    name: ClassVar[str] = "pmfl"
    title: ClassVar[str] = "PMFL"
    paper: ClassVar[str] = "Zhang et al. 2021, Algorithm 2"
    label_view: ClassVar[LabelView] = "own"
    single_target: ClassVar[bool] = True
    fixed_steps: ClassVar[bool] = True

    local: LocalTraining = INNER
    server: ServerStep = field(default_factory=ServerStep)
    order: Literal[1, 2] = 1
    batches: Annotated[int, Field(ge=1)] = 100
    share: Share = field(default_factory=Share)
    batch_norm: NormPolicy = "frozen"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def egress(self, layout: Layout) -> Egress:
        return gradient_egress(layout)  # the layout is already that of the rows that cross

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, task: LabelType) -> Tensor:
        return masked_loss(logits, y, known, task)

    def behind_losses(self, images: int, local: LocalTraining) -> int:
        return images // self.batches // 2

    def train(
        self, site: SiteContext, received: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[Update, dict[str, Tensor]]:
        # The model holds the site's own half and the received one; what it holds afterwards, the site keeps.
        return gradient_update(self, site, received, ctx, self.batches, self.order), {}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return stepped(self, previous, updates, self.server)
