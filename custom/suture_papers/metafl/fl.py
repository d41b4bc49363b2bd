"""FedAvg of the inner loop of MetaFL: what its paper calls FL.

    Zhang, Zhang, Chen, Bengio, Liu. PMFL. arXiv:2112.05321, 2021; Eqs. 1 and 2. After McMahan et al. 2017.

    at site k:   phi_k = theta after S steps of SGD on half of the round's batch              (Eq. 1)
    server:      theta = sum_k n_k/n phi_k   with `weights="images"`                          (Eq. 2)
                 theta = 1/K sum_k phi_k     with `weights="equal"`

n_k are the training samples of a site, n those of all. Equal weights, and the steps on that half batch, are
the published program's. Every site has a task of its own under one row of the head, so this averages rows of
different meanings: in the paper's Table I the AUROC of a new task is lower after it than after a random start
on six of eight tasks, the same on Consolidation and higher on Lung Lesion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from suture.core.validation import LIMIT
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.averaging import LocalAveraging, train_update
from suture.methods.base import About, LabelUse, hyperparameters
from suture.models.classifier import Layout, NormPolicy
from suture.protocol.egress import NUM_SAMPLES, WEIGHT, Egress
from suture.protocol.messages import TaskData, Update
from suture_papers.metafl.inner_loop import INNER, adapt_model, check_inner


@hyperparameters
class FL(LocalAveraging):
    """FedAvg of the inner loop.

    Attributes:
        local, batches, batch_norm: as in `MetaLearning`.
        weights: how much a site counts, each the same (``equal``) or by its training samples (``images``).
    """

    about = About(
        "fl",
        "FL (of the inner loop)",
        "Zhang et al. 2021, Eqs. 1 and 2",
        question="few labels",
        fixed_batches=True,
        mixes_patients="divides the batch of a round itself",
    )
    labels = LabelUse(view="target", types=("multilabel",))

    local: LocalTraining = INNER
    batches: Annotated[int, Field(ge=1, le=LIMIT)] = 100
    batch_norm: NormPolicy = "frozen"
    weights: Literal["equal", "images"] = "equal"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def egress(self, layout: Layout) -> Egress:
        equal = replace(super().egress(layout), loss_parts=2 * self.batches)
        if self.weights == "equal":
            return equal
        n = {"weight": "n_k, the weight of the site in the mean", "class_weights": "the same"}
        return replace(equal, weight=NUM_SAMPLES, class_weight=WEIGHT, why={**equal.why, **n})

    def weight(self, site: SiteContext) -> float:
        return 1.0 if self.weights == "equal" else float(len(site.samples["train"]))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        done = adapt_model(site, self.loss, round_, self.batches, second_order=False)
        update = train_update(site, received, round_, done.fitted)
        weight, rows = self.weight(site), self.row_weights(site, received)
        return replace(update, weight=weight, class_weights=rows), {}
