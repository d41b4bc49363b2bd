"""How often classes occur, and with which others: in the labels of a data set and in a model's predictions.

A model merged from sites that annotate related classes under different names may learn that they belong
together, although no site has both (MIDL 2023, Appendix E).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from suture.core.errors import DataError, LabelError
from suture.data.config import SiteConfig
from suture.data.table import Split, Table
from suture.learning.metrics import Floats, by_class, youden
from suture_results.saved_models import evaluate

# MIDL 2023, Appendix E: NIH's class, then the class of CheXpert that includes or resembles it.
RELATED: tuple[tuple[str, str], ...] = (("Mass", "Lung Lesion"), ("Consolidation", "Lung Opacity"))

Counts = tuple[tuple[float, float], tuple[float, float]]

Unit = Literal["image", "patient"]


@dataclass(frozen=True)
class Frequency:
    """The number of images with a class, without it, and of unknown label."""

    positives: int
    negatives: int
    unknown: int

    @property
    def share(self) -> float:
        """The share of the labelled images that have the class; NaN where none is labelled."""
        known = self.positives + self.negatives
        return self.positives / known if known else float("nan")


def frequencies(table: Table) -> dict[str, Frequency]:
    """Return how often each class of the table occurs (Kulkarni et al. 2024, Fig. 4a), in its order."""
    positives, negatives = (table.y == 1).sum(axis=0), (table.y == 0).sum(axis=0)
    unknown = np.isnan(table.y).sum(axis=0)
    return {
        name: Frequency(int(positives[i]), int(negatives[i]), int(unknown[i]))
        for i, name in enumerate(table.labels)
    }


def unit_of(table: Table) -> Unit:
    """Return the unit of co-occurrence: images if each has a patient of its own, else patients."""
    return "image" if len(set(table.patients)) == len(table) else "patient"


def cooccurrence(table: Table, *, per: Unit = "image") -> Floats:
    """Return which classes occur together (MIDL 2023, Appendix A and Fig. 3).

    Args:
        table: n images with c classes.
        per: the unit that is counted. The paper counts patients: a patient has a class if any of their
            images has it, lacks it if none has it and some are known to lack it, and is unknown otherwise.

    Returns:
        [c, c]: entry (i, j) is the share of the images with class i that have class j, among those where
        j is known; NaN where there are none. The diagonal is 1 wherever class i occurs.
    """
    y = table.y if per == "image" else _by_patient(table)
    positive = (y == 1).astype(np.float64)
    known = (~np.isnan(y)).astype(np.float64)
    both, of = positive.T @ positive, positive.T @ known
    shares = np.full(both.shape, np.nan)
    np.divide(both, of, out=shares, where=of > 0)
    return shares


def _by_patient(table: Table) -> NDArray[np.float32]:
    """Return the labels of each patient over all their images, [patients, c]."""
    names, patient = np.unique(np.asarray(table.patients, dtype=np.str_), return_inverse=True)
    y = np.full((len(names), len(table.labels)), np.nan, dtype=np.float32)
    np.fmax.at(y, patient, table.y)
    return y


@dataclass(frozen=True)
class Contingency:
    """Predictions of two classes over the same images.

    Attributes:
        first, second: the classes.
        counts: number of images by prediction; counts[i][j] is that of images with `first` predicted i
            and `second` predicted j (0 or 1). All NaN if a class has no threshold.
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
    """Return the contingency matrix of the predictions of two classes (MIDL 2023, Appendix E and Fig. 4).

    Args:
        labels: names of the c columns.
        scores: scores [n, c]; an image is predicted positive at or above the threshold of the class.
        thresholds: threshold of each class, NaN where undefined, as `youden_thresholds` gives them.
        first, second: the classes.

    Raises:
        LabelError: a class that has no column.
        DataError: a score of the two classes that is not finite.
    """
    score = np.asarray(scores, dtype=np.float64)
    one, two = (_column(labels, score, name) for name in (first, second))
    undefined = [name for name in (first, second) if math.isnan(thresholds[name])]
    if undefined:
        blank = (math.nan, math.nan)
        why = f"no threshold: {' and '.join(dict.fromkeys(undefined))} has no positive or no negative"
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
    """Return the threshold of every class by Youden's J (MIDL 2023, Appendix E; see `metrics.youden`).

    The labels need not be those of the images that are classified afterwards. A data set that does not
    annotate a class defines no threshold of it, so a pair of RELATED on NIH's images needs CheXpert's
    threshold of the second class.

    Args:
        labels: names of the c columns.
        y: labels [n, c], NaN where unknown.
        scores: scores [n, c].

    Returns:
        NaN for a class without a positive or a negative.

    Raises:
        DataError: naming the class, a label or score that cannot be used; or shapes that do not fit.
    """
    return by_class(labels, y, scores, lambda t, s: youden(t, s).threshold)


def _column(labels: tuple[str, ...], score: Floats, name: str) -> Floats:
    if name not in labels:
        raise LabelError(f"class {name!r} is not one of {', '.join(labels)}")
    column = score[:, labels.index(name)]
    if not np.isfinite(column).all():
        row = int(np.flatnonzero(~np.isfinite(column))[0])
        raise DataError(f"class {name!r}: the score of row {row} is not finite; the model has diverged")
    return column


def _share(both: float, only: float) -> float:
    return both / (both + only) if both + only > 0 else math.nan


def predicted_together(
    model: Path,
    configs: Sequence[SiteConfig],
    split: Split,
    pairs: Sequence[tuple[str, str]] = RELATED,
    device: str = "cpu",
) -> list[Contingency]:
    """Return the contingency matrices of a model's predictions of pairs of classes (MIDL 2023, Appendix E).

    Args:
        configs: data sets. The model predicts the images of the first. The threshold of a class is Youden's
            on the first data set that defines one: NIH does not annotate lung lesions, so that threshold
            comes from CheXpert.

    Raises:
        ConfigError: there is no model.
        LabelError: the model does not know a class.
        DataError: the data cannot be read.
    """
    done = [evaluate(model, config, split, device) for config in configs]
    thresholds: dict[str, float] = {}
    for one in done:
        for name, value in youden_thresholds(one.labels, one.y, one.scores).items():
            if math.isnan(thresholds.get(name, math.nan)):
                thresholds[name] = value
    first = done[0]
    return [contingency(first.labels, first.scores, thresholds, a, b) for a, b in pairs]
