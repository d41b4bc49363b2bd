"""Confident pseudo-labels: what a model is sure of in a weak view is taught in a strong one.

    Sohn et al. FixMatch. NeurIPS 2020, Eq. 4; class by class as in Deng et al. (FedLSM), MICCAI 2023, Eq. 5.

    p: probabilities of the weak view, from the model that labels; z: logits of the strong view

    several labels an image:  y_c = 1 if p_c >= tau_p, 0 if p_c <= tau_n; otherwise the entry is left out
                              L = 1/(unknown entries) sum_{kept} BCE(z_c, y_c)
    one label an image:       y = argmax_c p_c; kept if p_y >= tau
                              L = 1/(unlabelled images) sum_{kept} CE(z, y)

The divisors count what was left out, too: a model that is rarely sure teaches little. A method chooses the
model that labels: the student itself (FixMatch), or the received model (FSSL).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.batch import STRONG, WEAK, Augmentation, Batch, Share
from suture.learning.steps import probabilities
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import hyperparameters
from suture.methods.composed import Composed, LossTerm, Requirements, Step, Supervised, Value
from suture.protocol.messages import TaskData


@validated(frozen=True, config=STRICT)
class Thresholds:
    """How sure the model that labels must be.

    Attributes:
        positive, negative: tau_p and tau_n, of a class by itself (multilabel): at least, and at most.
        best: tau, of an image's most likely class (multiclass).

    Raises:
        ConfigError: one probability would be both positive and negative.
    """

    positive: Share = 0.85
    negative: Share = 0.005
    best: Share = 0.95

    def __post_init__(self) -> None:
        if self.negative >= self.positive:
            raise ConfigError(
                f"thresholds: negative, {self.negative}, is not below positive, {self.positive}; lower it"
            )


@dataclass(frozen=True)
class OverAllClasses(Supervised):
    """Another loss of known labels, with a softmax over all classes.

    With one label an image, an image of an annotated class is of no other: pseudo-labels are the argmax over
    all classes, so these must be comparable. (A balanced softmax leaves out absent classes by itself.)
    """

    loss: Supervised

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        loss, label_type = self.loss.of(site, received, round_), site.model.labels.label_type
        return lambda logits, y, known: loss(logits, *of_no_other_class(y, known, label_type))


def of_no_other_class(y: Tensor, known: Tensor, label_type: LabelType) -> tuple[Tensor, Tensor]:
    """Labels and mask ``[n, c]`` in which the one label of an image tells all of its classes."""
    if label_type == "multilabel":
        return y, known
    return torch.where(known, y, 0.0), torch.ones_like(known)


def unknown_entries(batch: Batch, label_type: LabelType) -> Tensor:
    """What pseudo-labels may be of, boolean ``[n, c]``.

    Multilabel: the unknown entries. Multiclass: all classes of the unlabelled images, whose known entries are
    all 0.
    """
    if label_type == "multilabel":
        return ~batch.known
    unlabelled = ~((batch.y == 1) & batch.known).any(dim=1, keepdim=True)
    return unlabelled.expand_as(batch.known)


def multilabel_targets(
    p: Tensor, unknown: Tensor, positive: float = 0.85, negative: float = 0.005
) -> tuple[Tensor, Tensor]:
    """The pseudo-labels of single entries.

    Args:
        p: probabilities of the weak view, ``[n, c]``.
        unknown: the entries that have no label, boolean ``[n, c]``.

    Returns:
        targets ``[n, c]``, 1 or 0, and which of them count, boolean ``[n, c]``.
    """
    present, absent = p >= positive, p <= negative
    return present.to(p.dtype), unknown & (present | absent)


def _multilabel_loss(p: Tensor, strong_logits: Tensor, unknown: Tensor, thresholds: Thresholds) -> Tensor:
    """The binary cross-entropy of kept entries over the number of all unknown ones; ``[n, c]`` each."""
    targets, kept = multilabel_targets(p, unknown, thresholds.positive, thresholds.negative)
    each = F.binary_cross_entropy_with_logits(strong_logits, targets.to(strong_logits), reduction="none")
    return torch.where(kept, each, 0.0).sum() / unknown.sum().clamp(min=1)


def _single_label_loss(p: Tensor, strong_logits: Tensor, unknown: Tensor, thresholds: Thresholds) -> Tensor:
    """The cross-entropy of kept images over the number of all unlabelled ones; ``[n, c]`` each.

    An image is unlabelled where any entry is unknown; its label is the likeliest class among those entries.
    """
    best, which = torch.where(unknown, p, -1.0).max(dim=1)
    each = F.cross_entropy(strong_logits, which, reduction="none")
    return torch.where(best >= thresholds.best, each, 0.0).sum() / unknown.any(dim=1).sum().clamp(min=1)


def pseudo_loss(
    weak_p: Tensor, strong_logits: Tensor, unknown: Tensor, label_type: LabelType, thresholds: Thresholds
) -> Tensor:
    """The loss of the strong view under pseudo-labels of the weak one.

    Args:
        weak_p: probabilities of the model that labels, ``[n, c]``, without gradient.
        strong_logits: of the student, ``[n, c]``.
        unknown: see `unknown_entries`, of the same images, boolean ``[n, c]``.

    Returns:
        a scalar; 0 if nothing is kept.
    """
    loss = _multilabel_loss if label_type == "multilabel" else _single_label_loss
    return loss(weak_p, strong_logits, unknown, thresholds)


@validated(frozen=True, config=STRICT)
class ConfidentLabels(LossTerm):
    """Confident pseudo-labels of one view, learned in another one; a method says which model gives them.

    Attributes:
        weight: lambda.
        thresholds: how sure the model that labels must be; those of FedLSM and FixMatch.
        weak: the view that gets the pseudo-labels, and known labels, in place of the job's augmentation.
        strong: the view that learns the pseudo-labels.
    """

    needs: ClassVar[Requirements] = Requirements(
        view="all", unknown="masked", why="gives pseudo-labels for what the site does not annotate"
    )

    weight: Annotated[float, Field(ge=0)] = 1.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    weak: Augmentation = WEAK
    strong: Augmentation = STRONG

    @abstractmethod
    def labelling(self, step: Step) -> Tensor:
        """Logits of the model that labels, for the weak views of the batch, ``[n, c]``, without gradient."""

    def unknown(self, batch: Batch, label_type: LabelType) -> Tensor:
        """What pseudo-labels may be of, boolean ``[n, c]``."""
        return unknown_entries(batch, label_type)

    def of_strong_view(self, p: Tensor, logits: Tensor, unknown: Tensor, label_type: LabelType) -> Tensor:
        """L_u; the arguments are those of `pseudo_loss`."""
        return pseudo_loss(p, logits, unknown, label_type, self.thresholds)

    @property
    def active(self) -> bool:
        return self.weight > 0

    @property
    def first_view(self) -> Augmentation:
        return self.weak

    @property
    def second_view(self) -> Augmentation:
        return self.strong

    def seen_again(self, batch: Batch, label_type: LabelType) -> Tensor:
        return self.unknown(batch, label_type).any(dim=1).nonzero().squeeze(1)

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        label_type = site.model.labels.label_type

        def value(step: Step) -> Tensor:
            if step.rows is None or step.strong is None:
                return step.logits.new_zeros(())
            p = probabilities(self.labelling(step)[step.rows], label_type)
            unknown = self.unknown(step.batch, label_type)[step.rows]
            return self.weight * self.of_strong_view(p, step.strong, unknown, label_type)

        return value


@hyperparameters
class Confident(Composed):
    """What FixMatch and FSSL share; see `Composed` for the other fields.

    Attributes:
        rows: of the head, by default those of the ``owners`` of a class.
        unknown: ``masked``; a class that gets pseudo-labels is not taught as absent, except that an image
            with its one label is of no other class.
    """

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"

    @property
    def supervised(self) -> Supervised:
        loss = super().supervised
        return loss if self.softmax == "balanced" else OverAllClasses(loss)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits, *of_no_other_class(y, known, label_type), label_type)
