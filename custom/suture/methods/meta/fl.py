"""FedAvg of the inner loop of MetaFL: what its paper calls FL.

    Zhang, Zhu, Sun, Zhu, Jin. PMFL. arXiv:2112.05321, 2021; Eqs. 1 and 2. After McMahan et al. 2017.

    at site k:   phi_k = theta after S steps of SGD on the support half of the round's batch
    server:      theta = 1/K sum_k phi_k

Every site has a task of its own under one row of the head, so this averages rows of different meanings; the
paper shows what that does to a new task.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from suture.core.validation import LIMIT
from suture.learning.training import Fitted, LocalRound, LocalTraining, SiteContext
from suture.methods.averaging import LocalAveraging, trained
from suture.methods.base import About, LabelUse, Limits, hyperparameters
from suture.methods.meta.inner_loop import INNER, adapted, check_inner
from suture.models.classifier import NormPolicy
from suture.protocol.messages import Payload, Update


@hyperparameters
class FL(LocalAveraging):
    """FedAvg of the inner loop; see `MetaLearning` for the fields."""

    about = About("fl", "FL (of the inner loop)", "Zhang et al. 2021, Eqs. 1 and 2", question="few labels")
    labels = LabelUse(view="own", single_target=True)
    limits = Limits(fixed_batches=True)

    local: LocalTraining = INNER
    batches: Annotated[int, Field(ge=1, le=LIMIT)] = 100
    batch_norm: NormPolicy = "frozen"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def behind_losses(self, images: int, local: LocalTraining) -> int:
        return images // self.batches // 2

    def train(
        self, site: SiteContext, received: Payload, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        done = adapted(site, self.loss, round_, self.batches, second_order=False)
        return trained(site, received, round_, Fitted(done.support_loss, {})), {}
