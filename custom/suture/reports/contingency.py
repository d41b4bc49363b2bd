"""Whether a model calls related findings together: contingency matrices of its predictions.

MIDL 2023, Appendix E: a model merged from sites that annotate related classes under different names may
learn that they belong together, although no site has both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from suture.core.errors import DataError, LabelError
from suture.learning.metrics import Floats, youden

# MIDL 2023, Appendix E: NIH's class, then the class of CheXpert that includes or resembles it.
RELATED: tuple[tuple[str, str], ...] = (("Mass", "Lung Lesion"), ("Consolidation", "Lung Opacity"))

Counts = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Contingency:
    """Predictions of two classes over the same images.

    Attributes:
        first, second: the classes.
        counts: images by prediction; counts[i][j] are those with `first` predicted i and `second`
            predicted j (0 or 1). All NaN if a class has no threshold.
        why: why the counts or a probability are undefined; empty where nothing is.
    """

    first: str
    second: str
    counts: Counts
    why: str = ""

    @property
    def second_given_first(self) -> float:
        """P(second = 1 | first = 1); NaN if `first` is never predicted."""
        return _share(self.counts[1][1], self.counts[1][0])

    @property
    def first_given_second(self) -> float:
        """P(first = 1 | second = 1); NaN if `second` is never predicted."""
        return _share(self.counts[1][1], self.counts[0][1])


def contingency(
    labels: tuple[str, ...], scores: ArrayLike, thresholds: Mapping[str, float], first: str, second: str
) -> Contingency:
    """The contingency matrix of two classes' predictions (MIDL 2023, Appendix E and Fig. 4).

    Args:
        labels: names of the c columns.
        scores: scores [n, c]; an image is called positive at or above its class's threshold.
        thresholds: threshold of each class, NaN where undefined, as `youden_thresholds` gives them.
        first, second: the classes.

    Raises:
        LabelError: a class that has no column or no threshold.
        DataError: scores of another shape, or a score of the two classes that is not finite.
    """
    score = np.asarray(scores, dtype=np.float64)
    if score.ndim != 2 or score.shape[1] != len(labels):
        raise DataError(f"scores {score.shape} must be [n, {len(labels)}]")
    one, two = (_column(labels, score, name) for name in (first, second))
    undefined = [name for name in (first, second) if math.isnan(_threshold(thresholds, name))]
    if undefined:
        blank = (math.nan, math.nan)
        why = f"no threshold: {' and '.join(dict.fromkeys(undefined))} lacks a positive or a negative"
        return Contingency(first, second, (blank, blank), why)
    a, b = one >= thresholds[first], two >= thresholds[second]
    counts = (
        (float(np.sum(~a & ~b)), float(np.sum(~a & b))),
        (float(np.sum(a & ~b)), float(np.sum(a & b))),
    )
    never = [name for name, calls in ((first, a), (second, b)) if not calls.any()]
    why = f"never predicted: {', '.join(dict.fromkeys(never))}" if never else ""
    return Contingency(first, second, counts, why)


def youden_thresholds(labels: tuple[str, ...], y: ArrayLike, scores: ArrayLike) -> dict[str, float]:
    """The threshold of every class by Youden's J (MIDL 2023, Appendix E; see `metrics.youden`).

    The labels need not be those of the images that are then classified: a data set that does not annotate
    a class cannot give its threshold, so a pair of RELATED on NIH's images needs CheXpert's for the second.

    Args:
        labels: names of the c columns.
        y: labels [n, c], NaN where unknown.
        scores: scores [n, c].

    Returns:
        NaN for a class without a positive or a negative.

    Raises:
        DataError: naming the class, a label or score that cannot be used; or shapes that do not fit.
    """
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if truth.shape != score.shape or truth.ndim != 2 or truth.shape[1] != len(labels):
        raise DataError(f"labels {truth.shape} and scores {score.shape} must both be [n, {len(labels)}]")
    result = {}
    for i, name in enumerate(labels):
        try:
            result[name] = youden(truth[:, i], score[:, i]).threshold
        except DataError as error:
            raise DataError(f"class {name!r}: {error}") from error
    return result


def _column(labels: tuple[str, ...], score: Floats, name: str) -> Floats:
    if name not in labels:
        raise LabelError(f"class {name!r} is not among {', '.join(labels)}")
    column = score[:, labels.index(name)]
    if not np.isfinite(column).all():
        row = int(np.flatnonzero(~np.isfinite(column))[0])
        raise DataError(f"class {name!r}: the score of row {row} is not finite; the model has diverged")
    return column


def _threshold(thresholds: Mapping[str, float], name: str) -> float:
    if name not in thresholds:
        raise LabelError(f"class {name!r} has no threshold; give one for it, NaN where it is undefined")
    return thresholds[name]


def _share(both: float, only: float) -> float:
    return both / (both + only) if both + only > 0 else math.nan
