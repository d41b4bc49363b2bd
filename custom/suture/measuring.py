"""What a party measures on labelled data, and what it counts: nothing below its privacy limit leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from suture.data.batch import Samples
from suture.evaluation.metrics import ClassScore, score_classes
from suture.evaluation.single_label import single_label
from suture.labels import LabelSet, Task
from suture.messages import Counts, Metrics
from suture.methods.contract import Method
from suture.privacy import PrivacyConfig
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
    mine = [bench.model.labels.index(name) for name in own.names]
    ranked = ranking(logits, own.task)
    scores = score_classes(
        own.names, part.y[:, mine].numpy(), ranked[:, mine].numpy(), part.patients, bootstrap, seed
    )
    shown = {name: withheld(score, limits) for name, score in scores.items()}
    told = float(loss) if len(part) >= limits.min_loss else None
    figures = overall(part, logits, own.task, limits.min_count)
    return Metrics(
        of_round,
        split,
        len(part),
        rounded(told),
        shown,
        {name: rounded(value) for name, value in figures.items()},
    )


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """A number that leaves a site, to six digits: the rest would tell more than anybody needs."""
    return None if value is None else float(f"{value:.6g}")


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
        positives=None if score.positives is None else near(score.positives, limits),
        negatives=None if score.negatives is None else near(score.negatives, limits),
    )
