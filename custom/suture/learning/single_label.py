"""How often the highest score is that of the one right class, for tasks where an image has a single label."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from suture.core.errors import DataError
from suture.protocol.messages import KEYS


def single_label(y: ArrayLike, scores: ArrayLike) -> dict[str, float | None]:
    """Accuracy, and precision, recall and F1 as means over the classes that occur in the truth.

    The prediction is the class of the highest score, the first of equals. A class that is never predicted
    has precision 0. Rows without a 1, unlabelled or of none of the classes, are left out. Macro recall is the
    balanced accuracy, Fed-MAS's B-acc: one number under the two names that papers have for it.

    Args:
        y: labels [n, c]: 1, 0 or NaN (unknown), at most one 1 a row.
        scores: scores [n, c]; any scale that all classes share, such as logits or probabilities.

    Returns:
        ``accuracy``, ``balanced_accuracy``, ``precision``, ``recall`` and ``f1``, all None if no row is
        labelled.

    Raises:
        DataError: a label that is not 1, 0 or NaN, a row with two 1s, a score that is not finite, or shapes
            that differ.
    """
    from sklearn.metrics import precision_recall_fscore_support  # a second's import; few runs need it

    truth, guess = _decided(y, scores)
    if not len(truth):
        return dict.fromkeys(KEYS)
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, guess, labels=np.unique(truth), average="macro", zero_division=0
    )
    values = (np.mean(truth == guess), recall, precision, recall, f1)
    return dict(zip(KEYS, map(float, values), strict=True))


def class_recalls(y: ArrayLike, scores: ArrayLike) -> list[float | None]:
    """The top-1 accuracy of each class: of its images, the share that is predicted as it.

    Args:
        y, scores: as for `single_label`.

    Returns:
        one value for each of the c columns, None where no image is of the class.

    Raises:
        DataError: as for `single_label`.
    """
    truth, guess = _decided(y, scores)
    right = [guess[truth == column] == column for column in range(np.shape(y)[1])]
    return [float(np.mean(hits)) if len(hits) else None for hits in right]


def _decided(y: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The right and the predicted column of the labelled rows."""
    labels, score = np.asarray(y, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if labels.ndim != 2 or labels.shape != score.shape:
        raise DataError(f"labels {labels.shape} and scores {score.shape} must both be [n, c]")
    strange = labels[(labels != 0) & (labels != 1) & ~np.isnan(labels)]
    if len(strange):
        raise DataError(f"label {strange[0]:g} is not 1, 0 or NaN (unknown); map it to one of them")
    ones = np.sum(labels == 1, axis=1)
    if (ones > 1).any():
        raise DataError(
            f"row {_first(ones > 1)} has {ones.max()} labels at once; a single-label task takes one a row"
        )
    if not np.isfinite(score).all():
        rows = _first(~np.isfinite(score).all(axis=1))
        raise DataError(
            f"the score of row {rows} is not finite; the model has diverged, lower its learning rate"
        )
    known = ones == 1
    if not known.any():  # there may be no column to take the highest of
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    return np.argmax(labels[known] == 1, axis=1), np.argmax(score[known], axis=1)


def _first(rows: ArrayLike) -> str:
    """The numbers of the first few rows that are marked."""
    return ", ".join(map(str, np.flatnonzero(rows)[:3]))
