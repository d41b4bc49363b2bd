"""What a party measures on labelled data, and what it counts: nothing below its privacy limit leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from suture.config import PrivacyConfig
from suture.data.batch import Samples
from suture.evaluation.metrics import ClassScore, mean_defined, score_classes
from suture.evaluation.single_label import class_recalls, single_label
from suture.labels import LabelSet, Task
from suture.messages import Counts, Figures, Metrics
from suture.methods.contract import Method
from suture.training import NonFiniteLoss, Workbench, predict

NOTHING = ClassScore(None, None, None, None, None)


def measure(
    bench: Workbench,
    method: Method,
    own: LabelSet,
    split: Literal["validation", "test"],
    of_round: int,
    *,
    bootstrap: int,
    seed: int,
    limits: PrivacyConfig,
) -> Metrics:
    """The model on one split of a site: the method's loss, and the figures of the site's own classes.

    Args:
        own: the classes that the site annotates.
        of_round: the round of the model.
        bootstrap: draws for the intervals; 0 computes none.
        limits: the site's; what rests on too few images is withheld.

    Raises:
        NonFiniteLoss: the model predicts what is no number.
    """
    part = bench.samples.get(split)
    if part is None or not len(part):
        return Metrics(of_round, split, 0, None, {})
    logits = predict(bench, part)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLoss(f"{bench.name}: the model of round {of_round} diverged; lower the learning rate")
    loss = method.loss(logits, torch.nan_to_num(part.y), ~torch.isnan(part.y), own.task)
    labels, min_count = bench.model.labels, limits.min_count
    return Metrics(
        of_round,
        split,
        len(part),
        rounded(float(loss)) if len(part) >= limits.min_loss else None,
        class_scores(part, logits, labels, own.names, bootstrap=bootstrap, seed=seed, min_count=min_count),
        overall(part, logits, own.task, min_count),
        by_attribute(part, logits, labels, own.names, min_count) if split == "test" else {},
    )


def class_scores(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    *,
    bootstrap: int = 0,
    seed: int = 0,
    min_count: int = 0,
) -> dict[str, ClassScore]:
    """AUROC, counts and, in a multiclass task, recall of some classes; nothing of those with too few images.

    Args:
        part: its labels, and the logits ``[n, c]``, are those of `labels`.
        names: the classes that are asked for.
    """
    mine = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.task)[:, mine]
    scores = score_classes(
        tuple(names), part.y[:, mine].numpy(), ranked.numpy(), part.patients, bootstrap, seed
    )
    if labels.task == "multiclass":
        recalls = class_recalls(part.y.numpy(), logits.numpy())
        scores = {name: replace(score, recall=recalls[labels.index(name)]) for name, score in scores.items()}
    return {name: withheld(score, min_count) for name, score in scores.items()}


def by_attribute(
    part: Samples, logits: Tensor, labels: LabelSet, names: Sequence[str], min_count: int = 0
) -> dict[str, Figures]:
    """The figures of the images of each attribute; one with too few images is not even named."""
    found = {}
    for value in sorted({*part.attributes} - {""}):
        rows = [attribute == value for attribute in part.attributes]
        if sum(rows) < min_count:
            continue
        own, of_own = Samples({}, part.y[rows], tuple(compress(part.patients, rows))), logits[rows]
        scores = class_scores(own, of_own, labels, names, min_count=min_count)
        found[value] = Figures(
            len(own),
            mean_defined(score.auroc for score in scores.values()),
            overall(own, of_own, labels.task, min_count),
        )
    return found


def rounded(value: float) -> float:
    """A number that leaves a site, to six digits: the rest would tell more than anybody needs."""
    return float(f"{value:.6g}")


def ranking(logits: Tensor, task: Task) -> Tensor:
    """What ranks the images of each class: the logits, or in a multiclass task the probabilities, since there
    a class competes with all others.
    """
    return logits if task == "multilabel" else torch.softmax(logits.double(), dim=1)


def overall(part: Samples, logits: Tensor, task: Task, min_count: int = 0) -> dict[str, float | None]:
    """Accuracy and its like over the labelled images of a multiclass task; {} for multilabel, or too few."""
    labelled = int((part.y == 1).any(dim=1).sum())
    if task == "multilabel" or labelled < max(min_count, 1):
        return {}
    return single_label(part.y.numpy(), logits.numpy())


def class_counts(own: LabelSet, train: Samples, limits: PrivacyConfig) -> dict[str, Counts | None]:
    """Training images with and without each class, rounded; None where either lies below the limit."""

    def near(count: int) -> int:
        return round(count / limits.round_counts) * limits.round_counts

    positives, negatives = (train.y == 1).sum(dim=0).tolist(), (train.y == 0).sum(dim=0).tolist()
    return {
        name: (near(p), near(n)) if min(p, n) >= limits.min_count else None
        for name, p, n in zip(own.names, positives, negatives, strict=True)
    }


def withheld(score: ClassScore, min_count: int) -> ClassScore:
    """The score, or nothing of it where a count lies below the limit."""
    return score if min(score.positives or 0, score.negatives or 0) >= min_count else NOTHING
