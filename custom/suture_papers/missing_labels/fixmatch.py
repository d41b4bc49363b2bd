"""FixMatch: a site's model labels a weak view of what the site does not annotate, and learns a strong one.

    Sohn et al. FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence. NeurIPS 2020.
    FixMatch* in Tables 1 and 2 of Deng et al. (FedLSM), MICCAI 2023.

p are the probabilities that the model in training gives a weak view, without gradient, z its logits of the
strong one. Both views go through it together, in training mode.

    at site k:   minimise  L = L(labels, weak view) + lambda L_u(p, z)        L_u: Eq. 4 (confident.py)
    server:      FedAvg; psi_c over the sites that annotate class c

The paper has one label an image. For several, L_u is that of FedLSM's Eq. 5, entry by entry; or that of a
published program for several labels, in which an image counts only as a whole:

    keep = images:  an image counts if of each of its unknown classes p_c >= tau_p or p_c <= tau_n
                    L_u = the mean of BCE(z_c, y_c) over the unknown entries of these images

FedLSM parts from FixMatch by a teacher that is a moving average, its choice of images, and mixtures.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.batch import Batch
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Step
from suture_papers.missing_labels.confident import Confident, ConfidentLabels, Thresholds, multilabel_targets


def whole_image_loss(p: Tensor, strong_logits: Tensor, unknown: Tensor, thresholds: Thresholds) -> Tensor:
    """The mean binary cross-entropy over images of which the model is sure in every unknown class.

    Args:
        p: probabilities of the weak view, ``[n, c]``.
        strong_logits: ``[n, c]``.
        unknown: the entries that have no label, boolean ``[n, c]``.

    Returns:
        a scalar; 0 if no image counts.
    """
    targets, sure = multilabel_targets(p, unknown, thresholds.positive, thresholds.negative)
    kept = unknown & (sure == unknown).all(dim=1, keepdim=True)
    each = F.binary_cross_entropy_with_logits(strong_logits, targets.to(strong_logits), reduction="none")
    return torch.where(kept, each, 0.0).sum() / kept.sum().clamp(min=1)


@validated(frozen=True, config=STRICT)
class PseudoLabels(ConfidentLabels):
    """Confident pseudo-labels of the model in training; see `ConfidentLabels` for the other fields.

    Attributes:
        keep: of several labels an image, each of the ``entries`` by itself; or whole ``images``, for which
            the program has the thresholds .8 and .2.
        among: of one label an image, the likeliest of ``all`` classes; or of the ``unknown`` ones, which the
            site does not annotate.
    """

    keep: Literal["entries", "images"] = "entries"
    among: Literal["all", "unknown"] = "all"

    def labelling(self, step: Step) -> Tensor:
        return step.logits.detach()

    def unknown(self, batch: Batch, label_type: LabelType) -> Tensor:
        entries = super().unknown(batch, label_type)
        return entries & ~batch.known if self.among == "unknown" else entries

    def of_strong_view(self, p: Tensor, logits: Tensor, unknown: Tensor, label_type: LabelType) -> Tensor:
        if label_type == "multilabel" and self.keep == "images":
            return whole_image_loss(p, logits, unknown, self.thresholds)
        return super().of_strong_view(p, logits, unknown, label_type)


@hyperparameters
class FixMatch(Confident):
    """FixMatch; see `Confident` and `Composed` for the other fields.

    Attributes:
        pseudo_labels: what is added to the loss of known labels; with the weight 0 it is FedAvg.
    """

    about = About(
        "fixmatch",
        "FixMatch",
        "Sohn et al., NeurIPS 2020; Deng et al., MICCAI 2023",
        images_only=True,
        mixes_patients="weighs sites by their numbers of images",
    )
    pseudo_labels: PseudoLabels = field(default_factory=PseudoLabels)
