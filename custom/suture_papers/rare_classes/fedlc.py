"""FedLC: before the softmax, each site lowers the logits of the classes that are rare there.

    Zhang, Li, Li, Xu, Wu, Ding, Wu. Federated Learning with Label Distribution Skew via Logits Calibration.
    ICML 2022. arXiv:2209.00189. A row of Elbatel et al. (Fed-MAS), MICCAI 2023, Tables 1, 3 and 8.

    at site k:   minimise  L = mean of -ln[ e^(a_y) / sum_c e^(a_c) ],   a_c = z_c - tau n_kc^(-1/4)
    server:      as FedAvg

n_kc counts the site's training images of class c. `denominator="paper"` sums over c != y, so that L may be
negative; public programs keep c = y. The calibration is of training alone: the model predicts with z.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.steps import masked_ce
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, Requirements, Supervised, class_counts
from suture.protocol.messages import TaskData

_FEWEST = 1e-8
"""What counts as n_c of a class without images: its logit loses tau x 100."""


@validated(frozen=True, config=STRICT)
class Calibrated(Supervised):
    """The cross-entropy of calibrated logits.

    Attributes:
        tau: how far logits are lowered; 0 leaves the cross-entropy.
        denominator: of the softmax: ``keep`` the true class in it, or leave it out, as the ``paper`` does.
    """

    needs: ClassVar[Requirements] = Requirements(label_types=("multiclass",))
    tau: Annotated[float, Field(ge=0)] = 0.5
    denominator: Literal["keep", "paper"] = "keep"

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        offsets = calibration(class_counts(site), self.tau).to(site.device)
        ce = masked_ce if self.denominator == "keep" else ce_against_others
        return lambda logits, y, known: ce(logits - offsets.to(logits), y, known)


def calibration(counts: Tensor, tau: float) -> Tensor:
    """tau n_c^(-1/4), ``[c]``; a class without images has `_FEWEST`."""
    return tau * counts.double().clamp(min=_FEWEST).pow(-0.25)


def ce_against_others(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """The mean of ln sum_{c != y} e^(a_c) - a_y over labelled rows, which may be negative.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`. A row in which a single class is known has no other
            to be told from, and is left out.

    Returns:
        a scalar; 0 with a zero gradient if no row counts.
    """
    target = torch.where(known, y, 0.0)
    counted = (target.sum(dim=1) > 0) & (known.sum(dim=1) > 1)
    least = torch.finfo(logits.dtype).min
    others = torch.where(known & (target == 0), logits, least).logsumexp(dim=1)
    each = others - torch.where(target > 0, logits, 0.0).sum(dim=1)
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)


@hyperparameters
class FedLC(Composed):
    """FedLC.

    Attributes:
        calibrated: the loss; see `Calibrated`.
    """

    about = About(
        "fedlc",
        "FedLC",
        "Zhang et al., ICML 2022",
        question="classes rare",
        mixes_patients="calibrates logits by numbers of images of classes",
    )
    calibrated: Calibrated = field(default_factory=Calibrated)
