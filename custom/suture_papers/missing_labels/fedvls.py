"""FedVLS: of classes that a site has no image of, it keeps what the received model knows of them.

    Guo et al. Exploring Vacant Classes in Label-Skewed Federated Learning. AAAI 2025, arXiv:2401.02329.

Site k has n_c images of class c, the share pi_c, and none of the vacant classes V. z are its logits, z' those
of the received model, M the number of classes. In a batch of N labelled images:

    at site k:   minimise  L = CE(z + ln(pi + e)) + S + lambda D                e = 1e-9
      suppression:    S = s sum_c pi_c [ln sum_n exp(a_nc) - ln N],             s = .005
                      a_nc = z_nc - ln(pi_c + e) + ln(1/M + e) where n is not of class c, else 0
      distillation:   D = mean over images of KL(q' || q),   q = softmax of z over V alone
    server:      FedAvg

S holds down the logits of a class on images of others, the more the more frequent it is. An image of class c
enters the sum of c as exp(0), as in the authors' program. An unlabelled image counts in D, which needs no
label, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.steps import masked_ce
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import (
    Composed,
    LossTerm,
    Requirements,
    Step,
    Supervised,
    Value,
    all_labelled,
    class_counts,
)
from suture.protocol.messages import TaskData

_ABSENT = 1e-9
"""e: the share of a class without images, as a logarithm has none of 0."""


@validated(frozen=True, config=STRICT)
class LogitSuppression(Supervised):
    """The cross-entropy of logits adjusted by the site's own shares, and S.

    Attributes:
        weight: s.
    """

    needs: ClassVar[Requirements] = Requirements(label_types=("multiclass",))

    weight: Annotated[float, Field(ge=0)] = 0.005

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        counts, every = class_counts(site).to(site.device), all_labelled(site)

        def loss(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
            prior = counts.to(logits)
            prior = prior / prior.sum().clamp(min=1)
            adjusted = masked_ce(logits + torch.log(prior + _ABSENT), y, known)
            return adjusted + self.weight * suppress(logits, torch.where(known, y, 0.0), prior, every=every)

        return loss


def suppress(logits: Tensor, y: Tensor, prior: Tensor, *, every: bool = False) -> Tensor:
    """S / s of the labelled images of a batch, a scalar; 0 without any. It may be below 0.

    Args:
        logits, y: ``[n, c]``; a row of zeros is unlabelled.
        prior: pi, ``[c]``.
        every: whether all are labelled; otherwise those are looked for, and a GPU waited for.
    """
    others = logits - torch.log(prior + _ABSENT) + math.log(1 / len(prior) + _ABSENT)
    a = torch.where(y == 1, 0.0, others)
    if not every:
        a = a[(y.sum(dim=1) > 0).nonzero().flatten()]
    if not len(a):
        return logits.new_zeros(())
    return (prior * (torch.logsumexp(a, dim=0) - math.log(len(a)))).sum()


@validated(frozen=True, config=STRICT)
class VacantDistillation(LossTerm):
    """The Kullback-Leibler divergence to the received model among the classes without images at the site.

    Attributes:
        weight: lambda; the authors' example on CIFAR-10 has .1.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multiclass",), view="all", why="keeps what the received model knows of others' classes"
    )

    weight: Annotated[float, Field(ge=0)] = 1.0

    @property
    def active(self) -> bool:
        return self.weight > 0

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        vacant = (class_counts(site) == 0).nonzero().flatten().to(site.device)
        if not len(vacant):
            return lambda step: step.logits.new_zeros(())

        def value(step: Step) -> Tensor:
            log_q, log_received = (
                torch.log_softmax(z[:, vacant], dim=1) for z in (step.logits, step.received_logits)
            )
            divergence = F.kl_div(log_q, log_received, reduction="batchmean", log_target=True)
            return self.weight * divergence

        return value


@hyperparameters
class FedVLS(Composed):
    """FedVLS; see `Composed` for the other fields.

    Attributes:
        suppression: the loss of known labels.
        vacant: what is added to it.
    """

    about = About(
        "fedvls",
        "FedVLS",
        "Guo et al., AAAI 2025, arXiv:2401.02329",
        mixes_patients="weighs sites by their numbers of images, and looks for classes that they lack",
    )

    suppression: LogitSuppression = field(default_factory=LogitSuppression)
    vacant: VacantDistillation = field(default_factory=VacantDistillation)
