"""LDAM-FL: larger margins for rarer classes on a cosine head, and late in the run larger weights.

    Cao, Wei, Gaidon, Arechiga, Ma. Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss.
    NeurIPS 2019 (LDAM-DRW). arXiv:1906.07413. At each site of FedAvg: Elbatel et al. (Fed-MAS), MICCAI 2023,
    Table 1.

    at site k:   s_c = <h, psi_c> of unit vectors,   m_c = m n_kc^(-1/4) / max_j n_kj^(-1/4)
                 minimise  L = sum w_y CE(30 (s - m_y 1[c = y]), y) / sum w_y
                 w_c = 1 in the rounds r < floor(.8 R), counted from 0; then (1 - beta) / (1 - beta^n_kc),
                 scaled to add up to the number of classes that the site has
    server:      as FedAvg

n_kc counts the site's training images of class c; a class without any has margin and weight 0.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.learning.steps import ce_of_rows
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, Requirements, Supervised, class_counts
from suture.models import ModelSpec
from suture.models.classifier import SCALE
from suture.protocol.messages import TaskData


@validated(frozen=True, config=STRICT)
class LabelDistributionMargin(Supervised):
    """The cross-entropy with margins, of logits that are scaled cosines.

    Attributes:
        largest: m, the margin of the site's rarest class, in cosines; 0 for none.
        beta: of the weights late in the run, by effective numbers of images (Cui et al., CVPR 2019).
        start: the share of the main phase's rounds after which classes are re-weighted (DRW), rounded down to
            whole rounds; with 1 they never are.
    """

    needs: ClassVar[Requirements] = Requirements(label_types=("multiclass",))
    largest: Annotated[float, Field(ge=0)] = 0.5
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9999
    start: Annotated[float, Field(ge=0, le=1)] = 0.8

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        if spec.head not in ("linear", "cosine"):
            raise ConfigError(
                f"LDAM's margins need cosine similarities, which model.head={spec.head} does not "
                "compute; set model.head=cosine"
            )
        return replace(spec, head="cosine")

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        counts = class_counts(site).double()
        shift = SCALE * margins(counts, self.largest)
        weights = effective_weights(counts, self.beta) if self.begins(round_) else torch.ones_like(counts)
        shift, weights = shift.to(site.device), weights.to(site.device)
        return lambda logits, y, known: _weighted_ce(
            logits - shift.to(logits) * (y == 1), y, known, weights.to(logits)
        )

    def begins(self, round_: LocalRound) -> bool:
        """Whether the re-weighting has begun; in a main phase of one round it begins with it."""
        whole = math.floor(round(self.start * round_.phase_rounds, 9))
        return round_.phase == "main" and round_.phase_round - 1 >= whole


def margins(counts: Tensor, largest: float) -> Tensor:
    """n_c^(-1/4), scaled so that the rarest of the classes present has `largest`; ``[c]``."""
    present = counts > 0
    raw = torch.where(present, counts.clamp(min=1).pow(-0.25), 0.0)
    return largest * raw / raw.max() if present.any() else raw


def effective_weights(counts: Tensor, beta: float) -> Tensor:
    """(1 - beta) / (1 - beta^n_c), scaled to add up to the number of classes present; ``[c]``."""
    present = counts > 0
    raw = torch.where(present, (1 - beta) / (1 - beta ** counts.clamp(min=1)), 0.0)
    return raw * present.sum() / raw.sum() if present.any() else raw


def _weighted_ce(logits: Tensor, y: Tensor, known: Tensor, weights: Tensor) -> Tensor:
    """The mean of the cross-entropy of labelled rows, weighted by their classes' weights ``[c]``.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.

    Returns:
        a scalar; 0 with a zero gradient if no row has a weight.
    """
    each, _ = ce_of_rows(logits, y, known)
    weight = (torch.where(known, y, 0.0) * weights).sum(dim=1)
    total = weight.sum()
    return (weight * each).sum() / torch.where(total > 0, total, 1.0)


@hyperparameters
class LDAM(Composed):
    """LDAM-FL; it trains a cosine head.

    Attributes:
        margin: the loss; see `LabelDistributionMargin`.
    """

    about = About(
        "ldam",
        "LDAM-FL",
        "Cao et al., NeurIPS 2019 (LDAM-DRW)",
        question="classes rare",
        mixes_patients="takes its margins from numbers of images of classes",
    )
    margin: LabelDistributionMargin = field(default_factory=LabelDistributionMargin)
