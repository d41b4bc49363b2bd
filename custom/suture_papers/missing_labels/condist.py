"""ConDist for classification: what a site does not annotate, it learns from the model that it received.

    Wang et al. ConDistFL: Conditional Distillation for Federated Learning from Partially Annotated Data.
    DeCaF 2023, arXiv:2308.04070.

It is published for segmentation alone: heads of whole images are a reconstruction. Site k annotates the
classes I_k and not U_k; z are its logits, z' those of the received model; T the temperature.

    at site k:   minimise  L = L(labels of I_k) + lambda_r D,    lambda_r = a + (b - a) r / (R - 1)
      several labels an image:  p_c = sigmoid(z_c / T),              over all images
      one label an image:       p_c = s_c / (sum_{U_k} s + e), s = softmax(z / T): the probability of c, given
                                U_k; over images of no class of I_k, neither by label nor by the largest z'
      D  = the mean over images and U_k of -p'_c ln p_c - (1 - p'_c) ln(1 - p_c), or of (p_c - p'_c)^2
           (softmax: the mean over images of -sum_c p'_c ln p_c), or Dice:
           the mean over U_k of 1 - 2 sum p_c p'_c / (sum p_c + sum p'_c + e), sums over the batch
    server:      FedAvg; psi_c over the sites that annotate class c

Sigmoids are independent, so there is nothing to condition on. r counts the rounds of a phase from 0, R are
all of them. With squares and T = 1 it is the consistency of FedMLP's first stage (Sun et al., MICCAI 2024).
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.batch import Batch
from suture.learning.training import LocalRound, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, LossTerm, Requirements, Step, Value

Distance = Literal["cross_entropy", "mse", "dice"]

_SMOOTH = 1e-5
"""e, of the published program: added to what is divided by, a share or Dice's sizes."""


@validated(frozen=True, config=STRICT)
class Distillation(LossTerm):
    """The distance to the received model's probabilities of the classes that the site does not annotate.

    Attributes:
        temperature: T, of all distances; the published value is 2.
        first, last: a and b, the weight in the first round of a phase and in its last, with a straight line
            between them; a phase of one round has the first.
        distance: ``cross_entropy``, ``mse`` (squares), or ``dice``, the published one.
    """

    needs: ClassVar[Requirements] = Requirements(
        view="all", unknown="masked", why="learns from the received model what the site does not annotate"
    )

    temperature: Annotated[float, Field(gt=0)] = 2.0
    first: Annotated[float, Field(ge=0)] = 0.01
    last: Annotated[float, Field(ge=0)] = 1.0
    distance: Distance = "cross_entropy"

    @property
    def active(self) -> bool:
        return self.first > 0 or self.last > 0

    def weight(self, phase_round: int, phase_rounds: int) -> float:
        """lambda of a round, counted from 1."""
        return self.first + (self.last - self.first) * (phase_round - 1) / max(phase_rounds - 1, 1)

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        label_type, identified = site.model.labels.label_type, site.identified
        if identified is None or identified.all():
            return lambda step: step.logits.new_zeros(())
        unknown = ~identified.to(site.device)
        columns = (~identified).nonzero().flatten().to(site.device)  # a mask would be read in every step
        weight = self.weight(round_.phase_round, round_.phase_rounds)

        def value(step: Step) -> Tensor:
            rows = select_distilled(step.batch, step.received_logits, unknown, label_type)
            if isinstance(rows, Tensor):
                rows = rows.nonzero().flatten()  # once, because here a GPU is waited for
            log_p, log_q = (
                log_probabilities(logits[rows] / self.temperature, columns, label_type)
                for logits in (step.logits, step.received_logits)
            )
            return weight * distance(log_p, log_q, label_type, self.distance)

        return value


def select_distilled(
    batch: Batch, received: Tensor, unknown: Tensor, label_type: LabelType
) -> Tensor | slice:
    """Which images count: all; of those with one label the ones of no annotated class, boolean ``[n]``.

    Args:
        received: logits of the received model, ``[n, c]``; its largest is a class, too.
        unknown: U_k, boolean ``[c]``.
    """
    if label_type == "multilabel":
        return slice(None)
    labelled = ((batch.y == 1) & batch.known).any(dim=1)
    return ~labelled & unknown[received.argmax(dim=1)]


def log_probabilities(logits: Tensor, unknown: Tensor, label_type: LabelType) -> Tensor:
    """ln p of the classes U_k.

    Args:
        logits: divided by T, ``[m, c]``.
        unknown: U_k, a boolean mask ``[c]`` or the numbers of its classes ``[u]``.

    Returns:
        ``[m, u]``; multilabel: ``[m, u, 2]``, of the class and of its absence.
    """
    if label_type == "multilabel":
        return F.logsigmoid(torch.stack([logits[:, unknown], -logits[:, unknown]], dim=2))
    each = torch.log_softmax(logits, dim=1)[:, unknown]
    return each - torch.log(each.exp().sum(dim=1, keepdim=True) + _SMOOTH)


def distance(log_p: Tensor, log_q: Tensor, label_type: LabelType, kind: Distance) -> Tensor:
    """D; ln p of the model and of the received one, as `log_probabilities`; a scalar, 0 without images."""
    if not len(log_p):
        return log_p.sum()
    if kind == "cross_entropy":
        return -(log_q.exp() * log_p).sum(dim=-1).mean()
    p, q = log_p.exp(), log_q.exp()
    if label_type == "multilabel":
        p, q = p[..., 0], q[..., 0]
    if kind == "mse":
        return F.mse_loss(p, q)
    overlap, sizes = (p * q).sum(dim=0), p.sum(dim=0) + q.sum(dim=0)
    return (1 - 2 * overlap / (sizes + _SMOOTH)).mean()


@hyperparameters
class ConDist(Composed):
    """ConDist; see `Composed` for the other fields.

    Attributes:
        rows: of the head, by default those of the ``owners`` of a class.
        unknown: ``masked``; a class that is distilled is not taught as absent.
        distil: what is added to the loss of known labels; with `first` and `last` 0 it is FedAvg.
    """

    about = About(
        "condist",
        "ConDist with classification heads (reconstruction)",
        "Wang et al., DeCaF 2023, arXiv:2308.04070",
        mixes_patients="weighs sites by their numbers of images",
    )

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"
    distil: Distillation = field(default_factory=Distillation)
