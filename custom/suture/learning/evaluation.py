"""Measuring models and counting labels; a site withholds what is below its privacy limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Samples
from suture.learning.losses import LabelLoss, masked_loss
from suture.learning.metrics import (
    bootstrap_mean,
    class_recalls,
    mean_defined,
    multiclass_metrics,
    score_classes,
)
from suture.learning.training import NonFiniteLoss, SiteContext, predict
from suture.protocol.messages import LARGEST, ClassScore, Counts, Figures, Metrics, rounded
from suture.protocol.privacy import PrivacyConfig

NOTHING = ClassScore(None, None, None, None, None)
"""The score of a class that is withheld."""


@dataclass(frozen=True)
class Measurement:
    """How a site measures every model.

    Attributes:
        loss: the method's, for validation data.
        own: the classes that the site annotates.
        limits: the site's; a figure of too few images is withheld.
        seed: of the bootstrap.
    """

    loss: LabelLoss
    own: LabelSet
    limits: PrivacyConfig
    seed: int

    def loss_on(self, part: Samples, logits: Tensor, label_type: LabelType) -> float:
        """Return the method's loss of the logits ``[n, c]`` of some samples."""
        return float(self.loss(logits, *part.targets(), label_type))


def measure(
    context: SiteContext,
    how: Measurement,
    split: Literal["validation", "test"],
    of_round: int,
    bootstrap: int = 0,
) -> Metrics:
    """Return the loss of the site's model on one split, and the figures of the site's own classes.

    The loss on validation data is the method's own, by which rounds are selected; on test data it is
    `entropy`, the same for all methods.

    Args:
        of_round: the round of the model.
        bootstrap: draws for the intervals; 0 computes none.

    Raises:
        NonFiniteLoss: a logit or the loss is not finite, or the loss is larger than any that is sent.
    """
    part = context.samples.get(split)
    if part is None or not len(part):
        return Metrics(of_round, split, 0, None, {})
    logits, labels = predict(context, part), context.model.labels
    names, label_type, limits = how.own.names, how.own.label_type, how.limits
    test = split == "test"
    value = entropy(part, logits, label_type) if test else how.loss_on(part, logits, label_type)
    if not bool(torch.isfinite(logits).all()) or not abs(value or 0.0) <= LARGEST:
        raise NonFiniteLoss(
            f"{context.name}: the model of round {of_round} diverged; lower the learning rate"
        )
    return Metrics(
        of_round,
        split,
        len(part),
        rounded(value) if len(part) >= limits.min_loss else None,
        class_scores(part, logits, labels, names, limits, bootstrap=bootstrap, seed=how.seed),
        overall(part, logits, label_type, limits),
        by_attribute(part, logits, labels, names, limits) if test else {},
    )


def class_scores(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    limits: PrivacyConfig | None = None,
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, ClassScore]:
    """Return AUROC, counts and, for multiclass labels, recall of some classes.

    Args:
        part: the samples; the columns of their y, and of the logits ``[n, c]``, are those of `labels`.
        names: the classes to score.
        limits: of a site: the score of a class with too few images is `NOTHING`. None for the server's own
            data.
    """
    columns = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.label_type)[:, columns]
    scores = score_classes(
        tuple(names), part.y[:, columns].numpy(), ranked.numpy(), part.patients, bootstrap, seed
    )
    if labels.label_type == "multiclass":
        recalls = class_recalls(part.y.numpy(), logits.numpy())
        scores = {name: replace(score, recall=recalls[labels.index(name)]) for name, score in scores.items()}
    return scores if limits is None else {name: withheld(score, limits) for name, score in scores.items()}


def entropy(part: Samples, logits: Tensor, label_type: LabelType) -> float | None:
    """Return the cross-entropy of the known labels, by which papers compare models (MIDL 2023, Tables 1, 2).

    For multilabel data it is the mean binary cross-entropy over known labels, for multiclass data the mean
    over labelled images; None where there are none.
    """
    known = ~torch.isnan(part.y)
    some = known if label_type == "multilabel" else part.y == 1
    return float(masked_loss(logits.double(), part.y, known, label_type)) if bool(some.any()) else None


def mean_interval(
    part: Samples, logits: Tensor, labels: LabelSet, names: Sequence[str], bootstrap: int, seed: int
) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean AUROC of some classes; arguments as for `class_scores`."""
    columns = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.label_type)[:, columns]
    return bootstrap_mean(part.y[:, columns].numpy(), ranked.numpy(), part.patients, bootstrap, seed)


def by_attribute(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    limits: PrivacyConfig | None = None,
) -> dict[str, Figures]:
    """Return figures of the images with each value of the attribute; one of too few images is left out."""
    found = {}
    for value in sorted({*part.attributes} - {""}):
        rows = [attribute == value for attribute in part.attributes]
        if limits is not None and sum(rows) < limits.min_count:
            continue
        own, of_own = Samples({}, part.y[rows], tuple(compress(part.patients, rows))), logits[rows]
        scores = class_scores(own, of_own, labels, names, limits)
        area = mean_defined(score.auroc for score in scores.values())
        found[value] = Figures(
            len(own),
            area if limits is None else rounded(area),
            overall(own, of_own, labels.label_type, limits),
        )
    return found


def ranking(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return the scores ``[n, c]`` that rank images: logits, or probabilities for multiclass labels.

    A multiclass label competes with all others, so its logit alone does not rank images.
    """
    return logits if label_type == "multilabel" else torch.softmax(logits.double(), dim=1)


def overall(
    part: Samples, logits: Tensor, label_type: LabelType, limits: PrivacyConfig | None = None
) -> dict[str, float | None]:
    """Return `multiclass_metrics` over the labelled images; {} for multilabel data or too few images."""
    labelled = int((part.y == 1).any(dim=1).sum())
    if label_type == "multilabel" or labelled < max(limits.min_count if limits else 0, 1):
        return {}
    figures = multiclass_metrics(part.y.numpy(), logits.numpy())
    return figures if limits is None else {name: rounded(value) for name, value in figures.items()}


def class_counts(own: LabelSet, train: Samples, limits: PrivacyConfig) -> dict[str, Counts | None]:
    """Return the rounded numbers of training images with and without each class; None below the limit."""
    positives, negatives = (train.y == 1).sum(dim=0).tolist(), (train.y == 0).sum(dim=0).tolist()
    return {
        name: (near(p, limits), near(n, limits)) if min(p, n) >= limits.min_count else None
        for name, p, n in zip(own.names, positives, negatives, strict=True)
    }


def near(count: int, limits: PrivacyConfig) -> int:
    """Return the count of a label, rounded to a multiple of the site's `round_counts`."""
    return round(count / limits.round_counts) * limits.round_counts


def withheld(score: ClassScore, limits: PrivacyConfig) -> ClassScore:
    """Return the score with its counts rounded, or `NOTHING` where a count is below the limit."""
    if min(score.positives or 0, score.negatives or 0) < limits.min_count:
        return NOTHING
    return replace(
        score,
        auroc=rounded(score.auroc),
        low=rounded(score.low),
        high=rounded(score.high),
        recall=rounded(score.recall),
        positives=None if score.positives is None else near(score.positives, limits),
        negatives=None if score.negatives is None else near(score.negatives, limits),
    )
