"""Metrics of scores against labels, and their bootstrap intervals.

Labels are 1, 0 or NaN (unknown, left out). A metric that the labels do not define, because a class has no
positive or no negative, is NaN here and None in a `ClassScore`; it is never 0.

In the 95 % intervals of shares of images each image counts as one of another patient; several images of a
patient make an interval too narrow.

Counts of scores are what a site releases of them. A score is the log-odds of a probability. A site counts
its validation images in the cells between the edges of `GRID`. From below, neighbouring cells are joined
until each holds `round_counts` images, of `min_count` patients, so that none shows the score of an image; a
class with fewer patients on either side is withheld. At a site with `min_count` 0 and exact counts every
cell is kept. What is rounded is the number of images up to the end of a cell: so no cell that holds images
shows none, and all add up to the rounded number of the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from suture.core.errors import DataError
from suture.protocol.decisions import CELLS, GRID, JOINED
from suture.protocol.egress import near
from suture.protocol.messages import FEW, KEYS, ClassScore

_Z = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


class Estimate(NamedTuple):
    """A figure with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, n: int) -> Estimate:
    """Return Wilson's interval of a share of `n` images (JASA 22:209, 1927), which may be rounded.

    >>> [round(bound, 4) for bound in wilson(0.5, 10)]
    [0.5, 0.2366, 0.7634]
    """
    if n < 1:
        return Estimate(share, 0.0, 1.0)
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return a - b of two shares by Newcombe's hybrid score method (Stat. Med. 17:873, 1998, method 10).

    >>> a, b = wilson(56 / 70, 70), wilson(48 / 80, 80)  # the example of his Table II (a)
    >>> [round(bound, 4) for bound in difference(a, b)]
    [0.2, 0.0524, 0.3339]
    """
    d = a.value - b.value
    low = d - math.hypot(a.value - a.low, b.high - b.value)
    return Estimate(d, low, d + math.hypot(a.high - a.value, b.value - b.low))


Floats = NDArray[np.float64]

_T = TypeVar("_T")

Patients = Sequence[str] | NDArray[np.intp] | None
"""The patient of each image, by name or number; None if every image is a patient of its own."""

_CELLS = 2_000_000
"""Draws times images in memory at once: 16 MB of float64."""


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold (an image is predicted positive at or above it) and its metrics; NaN where undefined."""

    threshold: float
    precision: float
    recall: float
    f1: float


def auroc(y: ArrayLike, s: ArrayLike) -> float:
    """Return the area under the ROC curve: how often a positive scores above a negative, ties counting half.

    It is the Mann-Whitney statistic (Hanley & McNeil 1982, Radiology 143:29), which equals the trapezoidal
    area under the empirical ROC curve.

    Args:
        y: labels [n].
        s: scores [n], any scale.

    Returns:
        NaN if there is no positive or no negative.

    Raises:
        DataError: a label that is not 1, 0 or NaN, a score that is not finite, or shapes that differ.
    """
    truth, score = known_only(y, s)
    return float(weighted_auroc(np.ones((1, len(truth))), truth, score)[0])


def bootstrap_auroc(
    y: ArrayLike, s: ArrayLike, patients: Patients = None, n: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the AUROC from a bootstrap over patients.

    Efron & Tibshirani 1993, Ch. 13. Images of one patient resemble each other, so whole patients are drawn;
    an interval over images would be too narrow. Draws without a positive or without a negative have no AUROC
    and are left out.

    Args:
        y: labels [m].
        s: scores [m].
        patients: m of them.
        n: number of draws.
        seed: seed of the draws.

    Returns:
        (low, high), NaN if the AUROC is undefined or all images are of one patient.

    Raises:
        DataError: as for `auroc`, or another number of patients than of images.
    """
    truth, score = known_only(y, s)
    one = truth[:, None], score[:, None]
    return bootstrap_mean(*one, patient_numbers(y, patients), n, seed) or (math.nan, math.nan)


def bootstrap_mean(
    y: ArrayLike, s: ArrayLike, patients: Patients = None, n: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of the mean AUROC over classes from a bootstrap over patients.

    Each draw of patients is the same for all classes and gives the mean over those classes whose AUROC it
    defines. Where every label is known the draws are those of `bootstrap_auroc`.

    Args:
        y: labels [m, c].
        s: scores [m, c].
        patients, n, seed: as for `bootstrap_auroc`.

    Returns:
        None if no class, or no draw, has an AUROC, or all images are of one patient.

    Raises:
        DataError: as for `auroc`.
    """
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(s, dtype=np.float64)
    cluster = patient_numbers(np.zeros(len(truth)), patients)
    clusters = int(cluster.max()) + 1 if len(cluster) else 0
    columns = [(~np.isnan(y_), *known_only(y_, s_)) for y_, s_ in zip(truth.T, score.T, strict=True)]
    columns = [column for column in columns if column[1].any() and not column[1].all()]
    if clusters < 2 or not columns:
        return None
    means = [np.empty(0)]
    for drawn in patient_draws(np.random.default_rng(seed), n, clusters, len(truth)):
        areas = np.stack([weighted_auroc(drawn[:, cluster[known]], t, v) for known, t, v in columns])
        defined = (~np.isnan(areas)).sum(axis=0)
        means.append(np.nansum(areas, axis=0)[defined > 0] / defined[defined > 0])
    values = np.concatenate(means)
    if not len(values):
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def score_classes(
    labels: tuple[str, ...],
    y: ArrayLike,
    scores: ArrayLike,
    patients: Patients = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, ClassScore]:
    """Return the AUROC of every class, its 95 % interval and the counts of labels.

    A bootstrap of few patients draws the same ones again; of one it has no spread. So the interval of a class
    with fewer than `FEW` patients of either kind, or without a spread, is at least Wilson's of a share of as
    many as the rarer kind has: the AUROC is a mean over them of numbers from 0 to 1, and none varies more.

    Args:
        labels: names of the c columns.
        y: labels [n, c], NaN where unknown.
        scores: scores [n, c].
        bootstrap: draws for the intervals; 0 computes none.
        seed: seed of the draws.

    Raises:
        DataError: naming the class, a label or score that cannot be used; or shapes that do not fit.
    """

    def score(t: Floats, s: Floats) -> ClassScore:
        low, high = bootstrap_auroc(t, s, patients, bootstrap, seed) if bootstrap else (math.nan, math.nan)
        if (n := rarer(t, patients)) < FEW or low == high:
            share = wilson(auroc(t, s), n)
            low, high = min(low, share.low), max(high, share.high)
        area, lower, upper = (None if math.isnan(value) else value for value in (auroc(t, s), low, high))
        return ClassScore(area, lower, upper, int(np.sum(t == 1)), int(np.sum(t == 0)))

    return by_class(labels, y, scores, score)


def rarer(y: ArrayLike, patients: Patients) -> int:
    """Return how many patients have an image of the rarer kind, of positives and negatives."""
    truth, number = np.asarray(y, dtype=np.float64), patient_numbers(y, patients)
    known = truth[~np.isnan(truth)]
    return min(len(np.unique(number[known == kind])) for kind in (1, 0))


def by_class(
    labels: Sequence[str], y: ArrayLike, scores: ArrayLike, figure: Callable[[Floats, Floats], _T]
) -> dict[str, _T]:
    """Compute a figure of each class from its labels ``[n]`` and scores ``[n]``.

    Raises:
        DataError: of `figure`, with the class named; or shapes other than ``[n, c]``.
    """
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if truth.shape != score.shape or truth.ndim != 2 or truth.shape[1] != len(labels):
        raise DataError(f"labels {truth.shape} and scores {score.shape} must both be [n, {len(labels)}]")
    figures = {}
    for i, name in enumerate(labels):
        try:
            figures[name] = figure(truth[:, i], score[:, i])
        except DataError as error:
            raise DataError(f"class {name!r}: {error}") from error
    return figures


def youden(y: ArrayLike, s: ArrayLike) -> OperatingPoint:
    """Return the operating point of the largest sensitivity + specificity - 1 (Youden 1950, Cancer 3:32).

    Of several such thresholds it is the lowest, with the highest recall: a missed finding is the worse error.

    Args:
        y: labels [n].
        s: scores [n].

    Returns:
        All NaN if there is no positive or no negative.

    Raises:
        DataError: as for `auroc`.
    """
    truth, score = known_only(y, s)
    if truth.all() or not truth.any():
        return OperatingPoint(math.nan, math.nan, math.nan, math.nan)
    thresholds, group = np.unique(score, return_inverse=True)
    tp = _at_or_above(np.bincount(group, truth))
    fp = _at_or_above(np.bincount(group, ~truth))
    # J times positives times negatives is a whole number, so that equal J compare equal.
    best = int(np.argmax(tp * fp[0] - fp * tp[0]))
    return OperatingPoint(
        threshold=float(thresholds[best]),
        precision=float(tp[best] / (tp[best] + fp[best])),
        recall=float(tp[best] / tp[0]),
        f1=float(2 * tp[best] / (tp[0] + tp[best] + fp[best])),
    )


def mean_defined(values: Iterable[float | None]) -> float | None:
    """Return the mean of the defined values (neither None nor NaN), or None if there is none."""
    defined = [v for v in values if v is not None and not math.isnan(v)]
    return math.fsum(defined) / len(defined) if defined else None


def mean_sd(values: Sequence[float | None], *, sample: bool) -> tuple[float, float]:
    """Return mean and standard deviation of the defined values; NaN where there are none.

    Args:
        sample: divide by n - 1 (over runs) rather than by n (over classes, as Kulkarni et al. 2024).
    """
    defined = np.array([v for v in values if v is not None and not math.isnan(v)], dtype=np.float64)
    if not len(defined):
        return math.nan, math.nan
    spread = float(defined.std(ddof=1 if sample else 0)) if len(defined) > sample else math.nan
    return float(defined.mean()), spread


def known_only(y: ArrayLike, s: ArrayLike) -> tuple[NDArray[np.bool_], Floats]:
    """Return labels and scores of the images whose label is known."""
    truth, score = np.asarray(y, dtype=np.float64), np.asarray(s, dtype=np.float64)
    if truth.ndim != 1 or truth.shape != score.shape:
        raise DataError(f"labels {truth.shape} and scores {score.shape} must both be [n]")
    known = ~np.isnan(truth)
    _check(truth, known & ~np.isfinite(score))
    return truth[known] == 1, score[known]


def _check(labels: Floats, broken: NDArray[np.bool_]) -> None:
    """Refuse labels other than 1, 0 and NaN, and rows whose score is not finite.

    Args:
        broken: whether that is so of a row.
    """
    strange = labels[(labels != 0) & (labels != 1) & ~np.isnan(labels)]
    if len(strange):
        raise DataError(f"label {strange[0]:g} is not 1, 0 or NaN (unknown); map it to one of them")
    if broken.any():
        rows = _first(broken)
        raise DataError(
            f"the score of row {rows} is not finite; the model has diverged, lower its learning rate"
        )


def rates(truth: Floats, positive: NDArray[np.bool_]) -> tuple[float | None, float | None]:
    """Return sensitivity and specificity of decisions ``[n]``; None without an image of the kind.

    Args:
        truth: labels ``[n]``: 1, 0 or NaN, which is in neither.
    """
    return share_true(positive[truth == 1]), share_true(~positive[truth == 0])


def share_true(values: NDArray[np.bool_]) -> float | None:
    """Return the share of what is true; None of nothing."""
    return float(values.mean()) if len(values) else None


def patient_numbers(y: ArrayLike, patients: Patients) -> NDArray[np.intp]:
    """Return the patient of each labelled image as a number from 0."""
    known = ~np.isnan(np.asarray(y, dtype=np.float64))
    if patients is None:
        return np.arange(int(known.sum()))
    if len(patients) != len(known):
        raise DataError(f"{len(patients)} patients for {len(known)} images; give one patient to each image")
    return np.unique(np.asarray(patients)[known], return_inverse=True)[1]


def patient_draws(rng: np.random.Generator, n: int, clusters: int, images: int) -> Iterator[Floats]:
    """Yield how often each patient is drawn, [some draws, clusters], n draws in all."""
    step = max(1, _CELLS // max(images, clusters))
    for start in range(0, n, step):
        size = min(step, n - start)
        drawn = rng.integers(clusters, size=(size, clusters)) + clusters * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * clusters).reshape(size, clusters).astype(np.float64)


def weighted_auroc(weights: Floats, truth: NDArray[np.bool_], score: Floats) -> Floats:
    """Return the weighted AUROC for each row of `weights` [draws, n]; NaN where it is undefined."""
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
    """Return the counts at or above each threshold."""
    return np.cumsum(counts[::-1], dtype=np.float64)[::-1]


def multiclass_metrics(y: ArrayLike, scores: ArrayLike) -> dict[str, float | None]:
    """Return metrics of multiclass labels; precision, recall and F1 are means over the classes that occur.

    The prediction is the class of the highest score, the first of equals. A class that is never predicted
    has precision 0. Rows without a 1 (unlabelled, or of none of the classes) are left out. Macro recall and
    balanced accuracy (Fed-MAS's B-acc) are the same number; papers use both names.

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

    truth, guess = _count_decided(y, scores)
    if not len(truth):
        return dict.fromkeys(KEYS)
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, guess, labels=np.unique(truth), average="macro", zero_division=0
    )
    values = (np.mean(truth == guess), recall, precision, recall, f1)
    return dict(zip(KEYS, map(float, values), strict=True))


def class_recalls(y: ArrayLike, scores: ArrayLike) -> list[float | None]:
    """Return the top-1 accuracy of each class: the share of its images that are predicted as the class.

    Args:
        y, scores: as for `multiclass_metrics`.

    Returns:
        one value for each of the c columns, None where no image is of the class.

    Raises:
        DataError: as for `multiclass_metrics`.
    """
    truth, guess = _count_decided(y, scores)
    hits = [guess[truth == column] == column for column in range(np.shape(y)[1])]
    return [float(np.mean(found)) if len(found) else None for found in hits]


def _count_decided(y: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the true and the predicted column of the labelled rows."""
    labels, score = np.asarray(y, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if labels.ndim != 2 or labels.shape != score.shape:
        raise DataError(f"labels {labels.shape} and scores {score.shape} must both be [n, c]")
    _check(labels, np.any(~np.isfinite(score), axis=1))
    ones = np.sum(labels == 1, axis=1)
    if (ones > 1).any():
        raise DataError(
            f"row {_first(ones > 1)} has {ones.max()} labels at once; multiclass labels have one in each row"
        )
    known = ones == 1
    if not known.any():  # there may be no column to take the highest of
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    return np.argmax(labels[known] == 1, axis=1), np.argmax(score[known], axis=1)


def _first(rows: ArrayLike) -> str:
    """Return the numbers of the first three marked rows as text."""
    return ", ".join(map(str, np.flatnonzero(rows)[:3]))


Counts = NDArray[np.int32]


def histogram(
    scores: Floats, patients: NDArray[np.intp], min_count: int, round_counts: int = 1
) -> Counts | None:
    """Return how many images lie in each cell, ``[CELLS]``, or `JOINED`; None for too few patients, or none.

    Args:
        scores: log-odds ``[n]``.
        patients: number of the patient of each image, ``[n]``.
        round_counts: counts are rounded to multiples of it; see `PrivacyConfig`.
    """
    cells = np.searchsorted(GRID, scores, side="right")  # cell k ends at edge k
    exact = not min_count and round_counts == 1
    ends = list(range(CELLS)) if exact else _ends(cells, patients, min_count, round_counts)
    if not ends or not len(scores):
        return None
    found = np.full(CELLS, JOINED, dtype=np.int32)
    counts = np.bincount(np.searchsorted(ends, cells), minlength=len(ends))
    found[ends] = np.diff(near(np.cumsum(counts), round_counts), prepend=0)
    return found


def _ends(cells: NDArray[np.intp], patients: NDArray[np.intp], least: int, images: int) -> list[int]:
    """Return the last cells of the runs that hold so many images, of at least so many patients, if any."""
    numbers = np.unique(patients, return_inverse=True)[1]
    highest = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.intp)
    np.maximum.at(highest, numbers, cells)
    if len(highest) < least:
        return []
    below = np.searchsorted(np.sort(cells), np.arange(len(GRID)), side="right")  # up to each cell's end
    ends: list[int] = []
    inside: set[int] = set()
    before = 0
    for cell, n in enumerate(below.tolist()):
        inside.update(numbers[cells == cell].tolist())
        enough = len(inside) >= least and int((highest > cell).sum()) >= least
        if enough and min(n - before, len(cells) - n) >= images:
            ends.append(cell)
            inside.clear()
            before = n
    return [*ends, CELLS - 1]


@dataclass(frozen=True)
class Curve:
    """How many images score below each edge of `GRID`, as far as counts show it.

    Attributes:
        below: ``[edges]``, increasing. Within a cell images are taken to lie evenly.
        total: number of images.
        known: the lowest and the highest log-odds between which this is more than a guess.
    """

    below: Floats
    total: float
    known: tuple[float, float]

    @classmethod
    def of(cls, counts: Sequence[Counts]) -> Curve:
        """Return the sum over sites, of one or more."""
        parts = [_read(row) for row in counts]
        return cls(
            np.sum([part.below for part in parts], axis=0),
            sum(part.total for part in parts),
            (min(part.known[0] for part in parts), max(part.known[1] for part in parts)),
        )

    def quantile(self, share: float) -> float | None:
        """Return the lowest log-odds below which that share of the images lies; None if it is not known."""
        # A slope on flat parts, where no image lies, because interpolation needs one.
        rising = self.below + np.arange(len(self.below)) * (1e-9 * max(self.total, 1.0))
        found = float(np.interp(share * self.total, rising, GRID))
        return found if self.known[0] <= found <= self.known[1] else None


def _read(counts: Counts) -> Curve:
    """Read a histogram. The outermost cells have no outer edge: they are taken to be as wide as the next."""
    ends = np.flatnonzero(counts != JOINED)
    below, at = np.cumsum(counts[ends], dtype=np.float64), GRID[ends[:-1]]
    total = float(below[-1])
    if not len(at):  # a single cell: nothing is known of where its images lie
        even = np.interp(GRID, GRID[[0, -1]], [0.0, total])
        return Curve(even, total, (np.inf, -np.inf))
    step = GRID[1] - GRID[0]
    first, last = (at[1] - at[0], at[-1] - at[-2]) if len(at) > 1 else (step, step)
    outer = [at[0] - first, *at, at[-1] + last]
    even = np.interp(GRID, outer, [0.0, *below])
    return Curve(even, total, (float(at[0]), float(at[-1])))


@dataclass(frozen=True)
class Curves:
    """The scores of the images with a class, and of those without it."""

    positives: Curve
    negatives: Curve

    @classmethod
    def of(cls, counts: Sequence[tuple[Counts, Counts]]) -> Curves:
        """Return the sum over sites of histograms of positives and negatives."""
        positives, negatives = zip(*counts, strict=True)
        return cls(Curve.of(positives), Curve.of(negatives))

    @property
    def defined(self) -> bool:
        """Whether there are both positives and negatives."""
        return min(self.positives.total, self.negatives.total) > 0

    @property
    def shown(self) -> bool:
        """Whether the counts of both kinds have an edge between cells, as those of few images have not."""
        return all(curve.known[0] <= curve.known[1] for curve in (self.positives, self.negatives))

    @property
    def prevalence(self) -> float:
        """Share of the positives."""
        return self.positives.total / (self.positives.total + self.negatives.total)

    def sensitivity(self) -> Floats:
        """Return the share of the positives at and above each edge."""
        return 1 - self.positives.below / self.positives.total

    def specificity(self) -> Floats:
        """Return the share of the negatives below each edge."""
        return self.negatives.below / self.negatives.total
