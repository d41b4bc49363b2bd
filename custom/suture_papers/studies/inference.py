"""Cross-validated AUROC: two methods compared over folds of patients, with seeds nested in the folds.

The difference is the mean over folds, and over the seeds of a fold, of the difference in the mean AUROC over
classes. Two things make it vary, and their variances add up:

- the test patients: influence functions of the AUROC, summed by patient (LeDell, Petersen, van der Laan 2015,
  Electron J Statist 9:1583), of the difference of the two methods' means over seeds;
- the seeds: the variance within folds, over the number of runs. What the influence functions of single runs
  scatter about their mean is a part of it, which is taken out of the first so that it does not count twice.

What is estimated: how the methods differ when trained on these patients and tested on new ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from suture.core.errors import DataError
from suture.learning.metrics import Floats, known_only


@dataclass(frozen=True)
class Measured:
    """The test of one run.

    Attributes:
        auroc: mean over the classes that the fold's test images define; NaN where the run learned too few.
        influence: of each test patient on it ``[patients]``; the variance of `auroc` is the sum of squares.
        test: a digest of the test patients and labels.
    """

    auroc: float
    influence: Floats
    test: str


@dataclass(frozen=True)
class Difference:
    """How much one method's AUROC is above another's; NaN where undefined.

    Attributes:
        value: the mean difference.
        low, high: its 95 % interval.
        p: two-sided, of no difference.
        folds: the difference of each fold, mean over seeds.
        error: the standard error.
        detectable: the true difference that would be found four times in five.
    """

    value: float
    low: float
    high: float
    p: float
    folds: tuple[float, ...]
    error: float
    detectable: float


def influence(
    y: ArrayLike, score: ArrayLike, patient: NDArray[np.intp], patients: int
) -> tuple[float, Floats] | None:
    """Return the AUROC of one class, and the influence of each patient on it ``[patients]``.

    A positive image moves the AUROC by (V - AUROC) / positives, where V is the share of negatives below it,
    ties counting half; a negative image alike with the share of positives above it.

    Args:
        y: labels ``[n]``; NaN where unknown.
        score: ``[n]``, any scale.
        patient: the number of each image's patient ``[n]``, below `patients`.

    Returns:
        None without a positive or without a negative image.
    """
    truth, known = known_only(y, score)
    owner = patient[~np.isnan(np.asarray(y, dtype=np.float64))]
    positives, negatives = known[truth], known[~truth]
    if not len(positives) or not len(negatives):
        return None
    below, above = _share_below(positives, negatives), 1 - _share_below(negatives, positives)
    area = float(below.mean())
    moved = np.empty(len(known))
    moved[truth], moved[~truth] = (below - area) / len(positives), (above - area) / len(negatives)
    return area, _by_patient(owner, moved, patients)


def recall_influence(
    y: ArrayLike, hit: Floats, patient: NDArray[np.intp], patients: int
) -> tuple[float, Floats] | None:
    """Return the recall of one class, and the influence of each patient on it, as `influence` does.

    Args:
        hit: 1 where the class is predicted ``[n]``, else 0.
    """
    truth = np.asarray(y, dtype=np.float64) == 1
    if not truth.any():
        return None
    recall = float(hit[truth].mean())
    return recall, _by_patient(patient[truth], (hit[truth] - recall) / truth.sum(), patients)


def _by_patient(patient: NDArray[np.intp], moved: Floats, patients: int) -> Floats:
    return np.bincount(patient, moved, patients).astype(np.float64)


def _share_below(values: Floats, others: Floats) -> Floats:
    """Return the share of `others` below each value; ties count half."""
    ordered = np.sort(others)
    below, not_above = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + not_above) / (2.0 * len(ordered))


def difference(
    a: Mapping[int, Sequence[Measured]], b: Mapping[int, Sequence[Measured]], level: float = 0.95
) -> Difference:
    """Compare two methods over the folds that both have been run on.

    Args:
        a, b: by fold, one measurement for each seed.
        level: of the interval.

    Raises:
        DataError: the two were not tested on the same patients.
    """
    folds, tests = sorted(a.keys() & b.keys()), set[str]()
    shifts, by_patients, within, spare, runs = [], 0.0, 0.0, 0, 0
    for fold in folds:
        found = {one.test for one in (*a[fold], *b[fold])}
        if len(found) > 1 or found <= tests:
            raise DataError(
                f"fold {fold}: its runs have not all the same test patients, or those of another fold; "
                "delete its records, and run it again"
            )
        tests |= found
        both = list(zip(a[fold], b[fold], strict=True))
        pairs = np.array([one.auroc - other.auroc for one, other in both])
        each = np.stack([one.influence - other.influence for one, other in both])  # [seeds, patients]
        n, patients = each.shape
        moved = float((each.mean(axis=0) ** 2).sum())
        scatter = float(each.var(axis=0).sum()) / (n - 1) if n > 1 else 0.0
        by_patients += (moved - scatter) * patients / max(1, patients - 1)
        shifts.append(float(pairs.mean()))
        within += float(pairs.var()) * n
        spare += n - 1
        runs += n
    if not folds or any(math.isnan(shift) for shift in shifts):
        return Difference(math.nan, math.nan, math.nan, math.nan, tuple(shifts), math.nan, math.nan)
    value = float(np.mean(shifts))
    by_patients = max(0.0, by_patients) / len(folds) ** 2
    by_seeds = within / spare / runs if spare else 0.0
    error = math.sqrt(by_patients + by_seeds)
    if error == 0.0:
        return Difference(value, value, value, 1.0 if value == 0.0 else math.nan, tuple(shifts), error, 0.0)
    # Satterthwaite: thousands of patients, but few seeds.
    freedom = (by_patients + by_seeds) ** 2 / (by_seeds**2 / spare) if by_seeds else math.inf
    limit = float(stats.t.ppf((1 + level) / 2, freedom))
    reach, detectable = limit * error, (limit + float(stats.t.ppf(0.8, freedom))) * error
    p = float(2 * stats.t.sf(abs(value) / error, freedom))
    return Difference(value, value - reach, value + reach, p, tuple(shifts), error, detectable)
