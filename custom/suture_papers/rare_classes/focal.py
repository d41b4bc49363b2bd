"""FedAvg with the focal loss: images that the model already gets right count little.

    Lin, Goyal, Girshick, He, Dollar. Focal Loss for Dense Object Detection. ICCV 2017; Eq. 4. The program of
    Fed-MAS offers it for its rare classes; no table of a paper here has it.

    at site k:   minimise  mean of -(1 - p_y)^gamma ln p_y,   p = softmax(z)               (Eq. 4)
    server:      as FedAvg

It is of labels of which an image has one. The weights alpha of the paper's Eq. 5 are left out.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.steps import ce_of_rows
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, Requirements, Supervised
from suture.protocol.messages import TaskData


@validated(frozen=True, config=STRICT)
class Focal(Supervised):
    """The focal loss of known labels.

    Attributes:
        gamma: how little an image counts that the model gets right; 2 in the paper and in Fed-MAS's program.
    """

    needs: ClassVar[Requirements] = Requirements(label_types=("multiclass",))
    gamma: Annotated[float, Field(ge=0)] = 2.0

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        return lambda logits, y, known: focal_ce(logits, y, known, self.gamma)


def focal_ce(logits: Tensor, y: Tensor, known: Tensor, gamma: float) -> Tensor:
    """Return the mean of -(1 - p_y)^gamma ln p_y over the labelled rows (Eq. 4), a scalar.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.
    """
    each, labelled = ce_of_rows(logits, y, known)
    # 1 - p without cancellation; a power below 1 has no finite slope at 0.
    missing = -torch.expm1(-each).clamp(max=-torch.finfo(each.dtype).tiny)
    return torch.where(labelled, missing**gamma * each, 0.0).sum() / labelled.sum().clamp(min=1)


@hyperparameters
class FocalFedAvg(Composed):
    """FedAvg with the focal loss; see `Composed` for the other fields.

    Attributes:
        focal: the loss.
    """

    about = About(
        "focal",
        "FedAvg with focal loss",
        "Lin et al., ICCV 2017, Eq. 4",
        question="classes rare",
        mixes_patients="weighs sites by their numbers of images",
    )
    focal: Focal = field(default_factory=Focal)
