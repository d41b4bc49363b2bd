"""Losses over the known labels. Mask first, then reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.models.classifier import Classifier

LabelLoss = Callable[[Tensor, Tensor, Tensor, LabelType], Tensor]
"""`Method.loss`: logits, y and known ``[n, c]``, and the label type, to a scalar."""

Objective = Callable[[Classifier, Batch], Tensor]
"""What a step minimises: the model on a batch, to a scalar."""


def masked_bce(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """Return the binary cross-entropy over the known entries.

    Surgical Aggregation, Eq. 3; partial loss, Eq. 8. It is the mean over all known entries of the batch.
    Where the same classes C_k are known in every row, as at a site, it equals the papers' mean over samples
    of the mean over C_k.

    Args:
        logits: ``[n, c]``.
        y: ``[n, c]``, 1 or 0; unknown entries may have any value, NaN included.
        known: ``[n, c]`` boolean.

    Returns:
        a scalar; 0 with a zero gradient if nothing is known.
    """
    each = F.binary_cross_entropy_with_logits(logits, torch.where(known, y, 0.0), reduction="none")
    return torch.where(known, each, 0.0).sum() / known.sum().clamp(min=1)


def masked_ce(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """Return the cross-entropy of multiclass labels over the known classes.

    A row whose known entries are all 0 means "none of my classes" and is left out.

    Args:
        logits, y, known: ``[n, c]``; y is one-hot over the known classes.

    Returns:
        a scalar; 0 with a zero gradient if no row is labelled.
    """
    each, labelled = ce_of_rows(logits, y, known)
    return torch.where(labelled, each, 0.0).sum() / labelled.sum().clamp(min=1)


def ce_of_rows(logits: Tensor, y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row over its known classes, and whether the row is labelled.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.

    Returns:
        ``[n]`` and ``[n]`` boolean; the cross-entropy of a row without a label is 0.
    """
    target = torch.where(known, y, 0.0)
    visible = torch.where(known, logits, torch.finfo(logits.dtype).min)
    return -(target * F.log_softmax(visible, dim=1)).sum(dim=1), target.sum(dim=1) > 0


def masked_loss(logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
    """Return `masked_bce` for multilabel data, `masked_ce` for multiclass data."""
    return (masked_bce if label_type == "multilabel" else masked_ce)(logits, y, known)


def balanced_ce(logits: Tensor, y: Tensor, known: Tensor, counts: Tensor) -> Tensor:
    """Return the balanced softmax loss: the cross-entropy of z_c + ln(n_c / n).

    Ren et al., NeurIPS 2020, Eq. 4. A class without a training image at the site gets ln 1e-12.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.
        counts: n_c, the number of training images of each class, ``[c]``.
    """
    prior = counts / counts.sum().clamp(min=1)
    return masked_ce(logits + torch.log(prior + 1e-12), y, known)


def weighted_bce(logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Entry by entry -w_c y ln sigma(s) - (1 - y) ln(1 - sigma(s)).

    Args:
        logits, y: ``[n, c]``.
        weight: ``[c]``; None for 1.
    """
    return F.binary_cross_entropy_with_logits(logits, y, pos_weight=weight, reduction="none")


def probabilities(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return the probabilities ``[n, c]``: sigmoids for multilabel data, a softmax for multiclass data."""
    return torch.sigmoid(logits) if label_type == "multilabel" else torch.softmax(logits, dim=1)
