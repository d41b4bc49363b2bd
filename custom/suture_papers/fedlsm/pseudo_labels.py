"""Uncertainty and pseudo-labels of FedLSM, once for any subset of classes and once for exactly one.

    Deng, Luo, Chen. Scale Federated Learning for Label Set Mismatch in Medical Image Classification.
    MICCAI 2023, Sec. 2.3. c runs over the M classes; U are those that an image's site does not know.

Both kinds answer the same questions: how uncertain is an image, what is it taught, and how much does each
entry count. What differs is a sigmoid or a softmax.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from suture.core.labels import LabelType
from suture.learning.losses import weighted_bce

Reading = Literal["paper", "program"]
"""Where the paper and its published program differ, which of the two is followed."""


@dataclass(frozen=True)
class Thresholds:
    """How sure the teacher must be.

    Attributes:
        positive, negative: of a class by itself (multilabel): at least, and at most.
        best: of the most likely unknown class (multiclass).
    """

    positive: float
    negative: float
    best: float


@dataclass(frozen=True)
class Targets:
    """What a batch is taught.

    Attributes:
        y: ``[n, c]``: the label, the pseudo-label, or the teacher's probability where it is unsure.
        sure: ``[n, c]``: entries with a label or a pseudo-label.
        made: ``[n, c]``: entries with a pseudo-label.
    """

    y: Tensor
    sure: Tensor
    made: Tensor

    def positives(self) -> Tensor:
        """Entries that are labelled or pseudo-labelled positive, ``[n, c]``."""
        return self.sure & (self.y == 1)


class Kind(ABC):
    """What differs between the two label types."""

    @abstractmethod
    def entropy(self, p: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """How uncertain each image is, ``[n]``, from probabilities and known entries ``[n, c]``."""

    @abstractmethod
    def targets(
        self,
        p: Tensor,
        y: Tensor,
        known: Tensor,
        limits: Thresholds,
        reading: Reading,
        *,
        mixing: bool = False,
    ) -> Targets:
        """Labels where they are known, pseudo-labels where the teacher is sure.

        Args:
            p: the teacher's probabilities; with y and known ``[n, c]``.
            mixing: whether the image is one of a mixture, which the program treats differently.
        """

    @abstractmethod
    def weights(self, targets: Targets) -> Tensor:
        """How much each entry counts in the loss of labels and pseudo-labels, ``[n, c]``."""

    @abstractmethod
    def mixed_weights(self, targets: Targets) -> Tensor:
        """How much each entry counts in the loss of mixtures, ``[n, c]``."""

    @abstractmethod
    def losses(self, logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """Entry by entry, ``[n, c]``; `weight` ``[c]`` is that of a positive of each class."""


class _MultiLabel(Kind):
    """Any subset of the classes is true of an image."""

    def entropy(self, p: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """mean over U of H(p_c) / ln 2, which is in [0, 1]; over all classes where U is empty.

        The program: mean over all M of -p_c ln p_c, that of known classes being 0.
        """
        if reading == "program":
            return torch.where(known, 0.0, -torch.xlogy(p, p)).mean(dim=1)
        binary = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)
        counted = ~known | known.all(dim=1, keepdim=True)
        return torch.where(counted, binary, 0.0).sum(dim=1) / counted.sum(dim=1)

    def targets(
        self,
        p: Tensor,
        y: Tensor,
        known: Tensor,
        limits: Thresholds,
        reading: Reading,
        *,
        mixing: bool = False,
    ) -> Targets:
        """The indicators of Eq. 5, class by class.

        The program takes a known class of a mixture only where the teacher is sure of it too.
        """
        present, absent = p >= limits.positive, p <= limits.negative
        made = ~known & (present | absent)
        sure = present | absent if mixing and reading == "program" else known | made
        taught = torch.where(known, y, torch.where(made, present.to(p.dtype), p))
        return Targets(taught, sure, made)

    def weights(self, targets: Targets) -> Tensor:
        """1 / (N M) for every sure entry."""
        return targets.sure.to(targets.y) / targets.sure.numel()

    def mixed_weights(self, targets: Targets) -> Tensor:
        return self.weights(targets)

    def losses(self, logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        return weighted_bce(logits, y, weight)


class _SingleLabel(Kind):
    """Exactly one class is true of an image; a labelled image is therefore known altogether."""

    def entropy(self, p: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """-sum_c p_c ln p_c (Eq. 3)."""
        return -torch.xlogy(p, p).sum(dim=1)

    def targets(
        self,
        p: Tensor,
        y: Tensor,
        known: Tensor,
        limits: Thresholds,
        reading: Reading,
        *,
        mixing: bool = False,
    ) -> Targets:
        """The indicator of Eq. 4: the most likely unknown class of an unlabelled image.

        The program takes the most likely of all classes, and gives the images of a mixture no pseudo-label.
        """
        labelled = (known & (y == 1)).any(dim=1, keepdim=True)
        allowed = torch.ones_like(known) if reading == "program" else ~known
        best, which = torch.where(allowed, p, -1.0).max(dim=1, keepdim=True)
        made = ~labelled & (best >= limits.best)
        if mixing and reading == "program":
            made = torch.zeros_like(made)
        guess = torch.zeros_like(p).scatter_(1, which, 1.0)
        taught = torch.where(labelled, torch.where(known, y, 0.0), guess)
        return Targets(taught, (labelled | made).expand_as(known), made.expand_as(known))

    def weights(self, targets: Targets) -> Tensor:
        """1 / N_I for a labelled image and 1 / N_U for a pseudo-labelled one, of N_I labelled, N_U others."""
        labelled = targets.sure & ~targets.made
        of_labelled = labelled[:, 0].sum().clamp(min=1)
        of_others = (~labelled[:, 0]).sum().clamp(min=1)
        return labelled.to(targets.y) / of_labelled + targets.made.to(targets.y) / of_others

    def mixed_weights(self, targets: Targets) -> Tensor:
        """1 / N for a mixture of two images that have a label or a pseudo-label each."""
        return targets.sure.to(targets.y) / len(targets.sure)

    def losses(self, logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        return -y * F.log_softmax(logits, dim=1)


KINDS: dict[LabelType, Kind] = {"multilabel": _MultiLabel(), "multiclass": _SingleLabel()}


def mix(certain: Targets, uncertain: Targets, share: float) -> Targets:
    """What a mixture of `share` certain and 1 - `share` uncertain image is taught (Eq. 6).

    An entry is sure where it is in both images.
    """
    y = share * certain.y + (1 - share) * uncertain.y
    return Targets(y, certain.sure & uncertain.sure, certain.made | uncertain.made)
