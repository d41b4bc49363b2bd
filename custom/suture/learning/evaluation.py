"""What a party measures on labelled data, and what it counts: nothing below its privacy limit leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Samples
from suture.learning.losses import LabelLoss, masked_loss
from suture.learning.metrics import bootstrap_mean, mean_defined, score_classes
from suture.learning.single_label import class_recalls, single_label
from suture.learning.training import NonFiniteLoss, SiteContext, predict
from suture.protocol.messages import ClassScore, Counts, Figures, Metrics, rounded
from suture.protocol.privacy import PrivacyConfig

NOTHING = ClassScore(None, None, None, None, None)


def measure(
    context: SiteContext,
    loss: LabelLoss,
    own: LabelSet,
    split: Literal["validation", "test"],
    of_round: int,
    *,
    bootstrap: int,
    seed: int,
    limits: PrivacyConfig,
) -> Metrics:
    """The model on one split of a site: its loss, and the figures of the site's own classes.

    The loss on validation data is the method's own, which selects rounds; on test data it is `entropy`, the
    same for all methods.

    Args:
        loss: the method's, of validation data.
        own: the classes that the site annotates.
        of_round: the round of the model.
        bootstrap: draws for the intervals; 0 computes none.
        limits: the site's; what rests on too few images is withheld.

    Raises:
        NonFiniteLoss: the model predicts what is no number.
    """
    part = context.samples.get(split)
    if part is None or not len(part):
        return Metrics(of_round, split, 0, None, {})
    logits = predict(context, part)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLoss(
            f"{context.name}: the model of round {of_round} diverged; lower the learning rate"
        )
    if split == "test":
        value = entropy(part, logits, own.label_type)
    else:
        value = float(loss(logits, *part.targets(), own.label_type))
    labels = context.model.labels
    return Metrics(
        of_round,
        split,
        len(part),
        rounded(value) if len(part) >= limits.min_loss else None,
        class_scores(part, logits, labels, own.names, limits, bootstrap=bootstrap, seed=seed),
        overall(part, logits, own.label_type, limits),
        by_attribute(part, logits, labels, own.names, limits) if split == "test" else {},
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
    """AUROC, counts and, in a multiclass task, recall of some classes.

    Args:
        part: its labels, and the logits ``[n, c]``, are those of `labels`.
        names: the classes that are asked for.
        limits: of a site: nothing of a class with too few images; None for the server's own data.
    """
    mine = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.label_type)[:, mine]
    scores = score_classes(
        tuple(names), part.y[:, mine].numpy(), ranked.numpy(), part.patients, bootstrap, seed
    )
    if labels.label_type == "multiclass":
        recalls = class_recalls(part.y.numpy(), logits.numpy())
        scores = {name: replace(score, recall=recalls[labels.index(name)]) for name, score in scores.items()}
    return scores if limits is None else {name: withheld(score, limits) for name, score in scores.items()}


def entropy(part: Samples, logits: Tensor, task: LabelType) -> float | None:
    """The cross-entropy of what is known, by which papers compare models (MIDL 2023, Tables 1 and 2).

    Binary and the mean over known labels of a multilabel task, the mean over labelled images of a multiclass
    one; None where there is none.
    """
    known = ~torch.isnan(part.y)
    some = known if task == "multilabel" else part.y == 1
    return float(masked_loss(logits.double(), part.y, known, task)) if bool(some.any()) else None


def mean_interval(
    part: Samples, logits: Tensor, labels: LabelSet, names: Sequence[str], bootstrap: int, seed: int
) -> tuple[float, float] | None:
    """The 95 % interval of the mean AUROC of some classes; the arguments are those of `class_scores`."""
    mine = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.label_type)[:, mine]
    return bootstrap_mean(part.y[:, mine].numpy(), ranked.numpy(), part.patients, bootstrap, seed)


def by_attribute(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    limits: PrivacyConfig | None = None,
) -> dict[str, Figures]:
    """The figures of the images of each attribute; one with too few images is not even named."""
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


def ranking(logits: Tensor, task: LabelType) -> Tensor:
    """What ranks the images of each class: the logits, or in a multiclass task the probabilities, since there
    a class competes with all others.
    """
    return logits if task == "multilabel" else torch.softmax(logits.double(), dim=1)


def overall(
    part: Samples, logits: Tensor, task: LabelType, limits: PrivacyConfig | None = None
) -> dict[str, float | None]:
    """Accuracy and its like over the labelled images of a multiclass task; {} for multilabel, or too few."""
    labelled = int((part.y == 1).any(dim=1).sum())
    if task == "multilabel" or labelled < max(limits.min_count if limits else 0, 1):
        return {}
    figures = single_label(part.y.numpy(), logits.numpy())
    return figures if limits is None else {name: rounded(value) for name, value in figures.items()}


def class_counts(own: LabelSet, train: Samples, limits: PrivacyConfig) -> dict[str, Counts | None]:
    """Training images with and without each class, rounded; None where either lies below the limit."""
    positives, negatives = (train.y == 1).sum(dim=0).tolist(), (train.y == 0).sum(dim=0).tolist()
    return {
        name: (near(p, limits), near(n, limits)) if min(p, n) >= limits.min_count else None
        for name, p, n in zip(own.names, positives, negatives, strict=True)
    }


def near(count: int, limits: PrivacyConfig) -> int:
    """The count of a label, rounded as the site wants it."""
    return round(count / limits.round_counts) * limits.round_counts


def withheld(score: ClassScore, limits: PrivacyConfig) -> ClassScore:
    """The score with its counts rounded, or nothing of it where a count lies below the limit."""
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
