"""How well the scores of a class rank its images, and how sure that is.

Labels are 1, 0 or NaN (unknown, left out). A metric that the labels do not define, because a class has no
positive or no negative, is NaN here and None in a `ClassScore`; it is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from suture.core.errors import DataError
from suture.protocol.messages import ClassScore

Floats = NDArray[np.float64]

_CELLS = 2_000_000
"""Draws times images that are held in memory at once: 16 MB of float64."""


@dataclass(frozen=True)
class Operating:
    """A threshold (an image is called positive at or above it) and what it gives; NaN where undefined."""

    threshold: float
    precision: float
    recall: float
    f1: float


def auroc(y: ArrayLike, s: ArrayLike) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties counting half.

    The Mann-Whitney statistic (Hanley & McNeil 1982, Radiology 143:29), which the trapezoids under the
    empirical ROC curve add up to.

    Args:
        y: labels [n].
        s: scores [n], any scale.

    Returns:
        NaN if there is no positive or no negative.

    Raises:
        DataError: a label that is not 1, 0 or NaN, a score that is not finite, or shapes that differ.
    """
    truth, score = _known(y, s)
    return float(_area(np.ones((1, len(truth))), truth, score)[0])


def bootstrap_auroc(
    y: ArrayLike,
    s: ArrayLike,
    patients: Sequence[str] | None = None,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of the AUROC from a bootstrap over patients (Efron & Tibshirani 1993, Ch. 13).

    Images of one patient resemble each other, so whole patients are drawn; an interval over images would
    be too narrow. Draws without a positive or without a negative have no AUROC and are left out.

    Args:
        y: labels [m].
        s: scores [m].
        patients: patient of each image, m of them; None if every image is a patient of its own.
        n: number of draws.
        seed: seed of the draws.
        level: share of the draws between the bounds.

    Returns:
        (low, high), NaN if the AUROC is undefined or a single patient leaves nothing to draw from.

    Raises:
        DataError: as for `auroc`, or another number of patients than of images.
    """
    truth, score = _known(y, s)
    cluster = _clusters(y, patients)
    clusters = int(cluster.max()) + 1 if len(cluster) else 0
    if clusters < 2 or truth.all() or not truth.any():
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    areas = np.concatenate([_area(w[:, cluster], truth, score) for w in _draws(rng, n, clusters, len(truth))])
    areas = areas[~np.isnan(areas)]
    if not len(areas):
        return math.nan, math.nan
    low, high = np.quantile(areas, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_mean(
    y: ArrayLike,
    s: ArrayLike,
    patients: Sequence[str] | None = None,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile interval of the mean AUROC over classes, from a bootstrap over patients.

    Each draw of patients, the same for all classes, gives one mean: over the classes that it defines. Where
    every label is known these are the draws of `bootstrap_auroc`.

    Args:
        y: labels [m, c].
        s: scores [m, c].
        patients, n, seed, level: as of `bootstrap_auroc`.

    Returns:
        None if no class, or no draw, has an AUROC, or a single patient leaves nothing to draw from.

    Raises:
        DataError: as for `auroc`.
    """
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(s, dtype=np.float64)
    cluster = _clusters(np.zeros(len(truth)), patients)
    clusters = int(cluster.max()) + 1 if len(cluster) else 0
    columns = [(~np.isnan(y_), *_known(y_, s_)) for y_, s_ in zip(truth.T, score.T, strict=True)]
    columns = [column for column in columns if column[1].any() and not column[1].all()]
    if clusters < 2 or not columns:
        return None
    means = [np.empty(0)]
    for drawn in _draws(np.random.default_rng(seed), n, clusters, len(truth)):
        areas = np.stack([_area(drawn[:, cluster[known]], t, v) for known, t, v in columns])
        defined = (~np.isnan(areas)).sum(axis=0)
        means.append(np.nansum(areas, axis=0)[defined > 0] / defined[defined > 0])
    found = np.concatenate(means)
    if not len(found):
        return None
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def score_classes(
    labels: tuple[str, ...],
    y: ArrayLike,
    scores: ArrayLike,
    patients: Sequence[str] | None = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, ClassScore]:
    """AUROC, its 95 % interval and the counts of every class.

    Args:
        labels: names of the c columns.
        y: labels [n, c], NaN where unknown.
        scores: scores [n, c].
        patients: patient of each image; None if every image is a patient of its own.
        bootstrap: draws for the intervals; 0 computes none.
        seed: seed of the draws.

    Raises:
        DataError: naming the class, a label or score that cannot be used; or shapes that do not fit.
    """
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if truth.shape != score.shape or truth.ndim != 2 or truth.shape[1] != len(labels):
        raise DataError(f"labels {truth.shape} and scores {score.shape} must both be [n, {len(labels)}]")
    result = {}
    for i, name in enumerate(labels):
        try:
            result[name] = _score_class(truth[:, i], score[:, i], patients, bootstrap, seed)
        except DataError as error:
            raise DataError(f"class {name!r}: {error}") from error
    return result


def youden(y: ArrayLike, s: ArrayLike) -> Operating:
    """The operating point of the largest sensitivity + specificity - 1 (Youden 1950, Cancer 3:32).

    Of several such thresholds the lowest, that of the highest recall: a missed finding is the worse error.

    Args:
        y: labels [n].
        s: scores [n].

    Returns:
        All NaN if there is no positive or no negative.

    Raises:
        DataError: as for `auroc`.
    """
    truth, score = _known(y, s)
    if truth.all() or not truth.any():
        return Operating(math.nan, math.nan, math.nan, math.nan)
    thresholds, group = np.unique(score, return_inverse=True)
    tp = _at_or_above(np.bincount(group, truth))
    fp = _at_or_above(np.bincount(group, ~truth))
    # J times positives times negatives is a whole number, so that equal J compare equal.
    best = int(np.argmax(tp * fp[0] - fp * tp[0]))
    return Operating(
        threshold=float(thresholds[best]),
        precision=float(tp[best] / (tp[best] + fp[best])),
        recall=float(tp[best] / tp[0]),
        f1=float(2 * tp[best] / (tp[0] + tp[best] + fp[best])),
    )


def mean_defined(values: Iterable[float | None]) -> float | None:
    """The mean of those values that are defined (neither None nor NaN), None if none is."""
    defined = [v for v in values if v is not None and not math.isnan(v)]
    return math.fsum(defined) / len(defined) if defined else None


def _score_class(
    y: Floats, s: Floats, patients: Sequence[str] | None, bootstrap: int, seed: int
) -> ClassScore:
    area = auroc(y, s)
    low, high = bootstrap_auroc(y, s, patients, bootstrap, seed) if bootstrap else (math.nan, math.nan)
    return ClassScore(_defined(area), _defined(low), _defined(high), int(np.sum(y == 1)), int(np.sum(y == 0)))


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _known(y: ArrayLike, s: ArrayLike) -> tuple[NDArray[np.bool_], Floats]:
    """Labels and scores of the images whose label is known."""
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(s, dtype=np.float64)
    if truth.ndim != 1 or truth.shape != score.shape:
        raise DataError(f"labels {truth.shape} and scores {score.shape} must both be [n]")
    known = ~np.isnan(truth)
    truth, score = truth[known], score[known]
    strange = truth[(truth != 0) & (truth != 1)]
    if len(strange):
        raise DataError(f"label {strange[0]:g} is not 1, 0 or NaN (unknown); map it to one of them")
    if not np.isfinite(score).all():
        rows = ", ".join(map(str, np.flatnonzero(known)[~np.isfinite(score)][:3]))
        raise DataError(
            f"the score of row {rows} is not finite; the model has diverged, lower its learning rate"
        )
    return truth == 1, score


def _clusters(y: ArrayLike, patients: Sequence[str] | None) -> NDArray[np.intp]:
    """The patient of each labelled image, numbered from 0."""
    known = ~np.isnan(np.asarray(y, dtype=np.float64))
    if patients is None:
        return np.arange(int(known.sum()))
    if len(patients) != len(known):
        raise DataError(f"{len(patients)} patients for {len(known)} images; give one patient to each image")
    return np.unique(np.asarray(patients)[known], return_inverse=True)[1]


def _draws(rng: np.random.Generator, n: int, clusters: int, images: int) -> Iterator[Floats]:
    """How often each patient is drawn, [some draws, clusters], n draws in all."""
    step = max(1, _CELLS // max(images, clusters))
    for start in range(0, n, step):
        size = min(step, n - start)
        drawn = rng.integers(clusters, size=(size, clusters)) + clusters * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * clusters).reshape(size, clusters).astype(np.float64)


def _area(weights: Floats, truth: NDArray[np.bool_], score: Floats) -> Floats:
    """Weighted AUROC of each row of `weights` [draws, n]; NaN without a positive or a negative."""
    negatives = np.sort(score[~truth])
    lower = np.searchsorted(negatives, score[truth], side="left")
    not_higher = np.searchsorted(negatives, score[truth], side="right")
    order = np.flatnonzero(~truth)[np.argsort(score[~truth], kind="stable")]
    below = np.zeros((len(weights), len(order) + 1))  # [:, k]: weight of the k lowest negatives
    np.cumsum(weights[:, order], axis=1, out=below[:, 1:])
    pos = weights[:, truth]
    wins = np.sum(pos * (below[:, lower] + below[:, not_higher]), axis=1) / 2
    pairs = pos.sum(axis=1) * below[:, -1]
    areas = np.full(len(weights), math.nan)
    np.divide(wins, pairs, out=areas, where=pairs > 0)
    return areas


def _at_or_above(counts: NDArray[np.generic]) -> Floats:
    """Counts at each threshold and every higher one."""
    return np.cumsum(counts[::-1], dtype=np.float64)[::-1]
