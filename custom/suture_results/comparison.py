"""Whether two models, or two methods, differ: a paired bootstrap of the AUROC, and paired t-tests.

MIDL 2023, Sec. 3.3, compares classes "using bootstrapping and two-tailed paired t-test" without details. A
paired t-test over the draws themselves would divide by the standard error of their mean: its p falls with
the number of draws, and with 1,000 of them nearly any difference would be significant. The printed p
(Appendix B: .10 at .73 against .75, .95 at no difference) instead fit the difference divided by its bootstrap
standard deviation. So t = difference / SD, two-tailed, with (draws - 1) degrees of freedom: more draws make
p steadier, not smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from suture.core.errors import DataError
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.metrics import (
    Patients,
    auroc,
    known_only,
    patient_draws,
    patient_numbers,
    weighted_auroc,
)
from suture.protocol.messages import FEW, ClassScore, few
from suture_results.comparison_page import Difference
from suture_results.formatting import area, interval
from suture_results.saved_models import PerPatient, evaluate

_ROUNDING = 1e-12
"""A smaller difference or standard deviation is rounding."""

_MARKS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


@dataclass(frozen=True)
class AurocComparison:
    """The AUROCs of two models on the same images; an undefined value is NaN.

    Attributes:
        n: draws in which the AUROC is defined.
        auroc_a, auroc_b: on the images as they are.
        difference: auroc_a - auroc_b.
        low, high: 95 % interval of the difference.
        p: two-sided p of no difference, by the same distribution.
        why: why a value is undefined; empty if all are defined.
    """

    n: int
    auroc_a: float
    auroc_b: float
    difference: float
    low: float
    high: float
    p: float
    why: str = ""


@dataclass(frozen=True)
class Compared:
    """One class: the AUROC of each model with its interval, and the paired difference."""

    a: ClassScore
    b: ClassScore
    difference: AurocComparison


@dataclass(frozen=True)
class ModelComparison:
    """Two models on the same images: each class, and the mean over the classes with an AUROC."""

    classes: dict[str, Compared]
    mean: AurocComparison

    def lines(self) -> list[Difference]:
        """Return the classes, with p after Holm's correction, and the mean, a test of its own, as lines."""
        found = [one.difference for one in self.classes.values()]
        adjusted = [*holm([one.p for one in found]), self.mean.p]
        shown = [(_with_interval(one.a), _with_interval(one.b)) for one in self.classes.values()]
        shown.append((area(self.mean.auroc_a), area(self.mean.auroc_b)))
        of = zip((*self.classes, MEAN), (*found, self.mean), adjusted, shown, strict=True)
        return [Difference(name, d.difference, d.low, d.high, p, values) for name, d, p, values in of]


MEAN = "Mean"
"""The name of the last line."""


def _with_interval(score: ClassScore) -> str:
    bounds = None if score.low is None or score.high is None else (score.low, score.high)
    return area(score.auroc) + (f" ({interval(bounds)})" if bounds else "")


@dataclass(frozen=True)
class Comparison:
    """A paired, two-tailed t-test of a - b.

    Attributes:
        n: pairs in which both values are defined.
        difference: mean of a - b.
        p: of the t-test; NaN with fewer than two pairs, 1 where all differences are 0.
        normal_p: of the Shapiro-Wilk test on the differences; NaN with fewer than three pairs.
        why: why the test is undefined; empty if it is defined.
        low, high: 95 % interval of the mean difference, of the same t distribution; NaN with the test.
    """

    n: int
    difference: float
    p: float
    normal_p: float
    why: str = ""
    low: float = math.nan
    high: float = math.nan

    @property
    def significant(self) -> bool:
        """Whether p < .05, with differences that may be normal (Kulkarni et al. 2024, Sec. 4.3)."""
        return self.p < 0.05 and self.normal_p >= 0.05

    @property
    def mark(self) -> str:
        """The papers' marks: ns, *, **, ***; with a dagger where the differences are not normal."""
        if math.isnan(self.p):
            return "–"
        stars = next((mark for limit, mark in _MARKS if self.p < limit), "ns")
        return stars if stars == "ns" or self.significant else f"{stars}†"


def compare(
    a: Path,
    b: Path,
    config: SiteConfig,
    split: Split | Literal["all"],
    device: str = "cpu",
    draws: int = 1000,
    per_patient: PerPatient | None = None,
) -> ModelComparison:
    """Compare two saved models on every class that both have and the data label (MIDL 2023, Appendix B).

    Arguments as for `evaluate`; the classes have the data's names. One with fewer than `FEW` positives or
    negatives has no interval of the difference and no p, because draws of so few patients say too little.

    Raises:
        ConfigError: a folder holds no model.
        DataError: the data cannot be read, or there is no such class.
    """
    one, two = (evaluate(folder, config, split, device, per_patient=per_patient) for folder in (a, b))
    names = [name for name in one.columns if name in two.columns]
    if not names:
        raise DataError(f"{a} and {b} have no learned class in common that {config.data.table} labels")
    found = {}
    for name in names:
        i, j = one.columns[name], two.columns[name]
        difference = compare_auroc(one.y[:, i], one.scores[:, i], two.scores[:, j], one.patients, draws)
        a_score, b_score = one.classes[one.labels[i]], two.classes[two.labels[j]]
        if few(a_score.positives, a_score.negatives):
            why = f"fewer than {FEW} positives or negatives"
            difference = replace(difference, low=math.nan, high=math.nan, p=math.nan, why=why)
        found[name] = Compared(a_score, b_score, difference)
    columns = [(one.columns[name], two.columns[name]) for name in names]
    classes = [(one.y[:, i], one.scores[:, i], two.scores[:, j]) for i, j in columns]
    return ModelComparison(found, compare_means(classes, one.patients, draws))


def compare_means(
    classes: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]],
    patients: Patients,
    n: int = 1000,
    seed: int = 0,
) -> AurocComparison:
    """Compare two models' mean AUROC over classes by a paired bootstrap over patients.

    A draw is the same for every class and both models; its mean is over the classes that have an AUROC in it.

    Args:
        classes: of each its labels, and the scores of either model, as in `compare_auroc`.
        patients, n, seed: as in `compare_auroc`.
    """
    defined = [one for one in classes if not math.isnan(auroc(one[0], one[1]))]
    a, b = (float(np.mean([auroc(one[0], one[k]) for one in defined] or [math.nan])) for k in (1, 2))
    undefined = AurocComparison(0, a, b, a - b, math.nan, math.nan, math.nan)
    if not defined:
        return replace(undefined, why="no class has positive and negative images")
    patient = patient_numbers(np.zeros(np.shape(defined[0][0])), patients)
    if not patient.any():
        return replace(undefined, why="a single patient cannot be resampled")
    parts = [np.empty(0)]
    for drawn in patient_draws(np.random.default_rng(seed), n, int(patient.max()) + 1, len(patient)):
        gaps = []
        for y, *scores in defined:
            weights = drawn[:, patient[~np.isnan(np.asarray(y, dtype=np.float64))]]
            one, two = (weighted_auroc(weights, *known_only(y, of)) for of in scores)
            gaps.append(one - two)
        parts.append(np.ma.masked_invalid(gaps).mean(axis=0).filled(math.nan))
    draws = np.concatenate(parts)
    draws = draws[~np.isnan(draws)]
    if len(draws) < 2:
        return replace(undefined, n=len(draws), why="fewer than two resamples have a positive and a negative")
    spread = float(draws.std(ddof=1))
    p, why = _test(undefined.difference, spread, len(draws) - 1)
    half = spread * float(stats.t.ppf(0.975, len(draws) - 1))
    low, high = max(undefined.difference - half, -1.0), min(undefined.difference + half, 1.0)
    return replace(undefined, n=len(draws), low=low, high=high, p=p, why=why)


def compare_auroc(
    y: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    patients: Patients = None,
    n: int = 1000,
    seed: int = 0,
) -> AurocComparison:
    """Compare two models' AUROCs of one class by a paired bootstrap over patients (MIDL 2023, Sec. 3.3).

    Both models use the same draws of patients, so an easy or a hard draw cancels out; the draws are those of
    `bootstrap_auroc` with the same seed.

    Args:
        y: labels [m]: 1, 0 or NaN (unknown, left out).
        a: scores [m] of one model, any scale.
        b: scores [m] of the other, in the same order.
        patients: m of them.
        n: number of draws.
        seed: seed of the draws.

    Raises:
        DataError: a label that is not 1, 0 or NaN, a score that is not finite, shapes that differ, or
            another number of patients than of images.
    """
    areas = auroc(y, a), auroc(y, b)
    undefined = AurocComparison(0, *areas, areas[0] - areas[1], math.nan, math.nan, math.nan)
    if math.isnan(undefined.difference):
        kind = "negative" if np.nansum(np.asarray(y, dtype=np.float64)) else "positive"
        return replace(undefined, why=f"no {kind} image")
    known = ~np.isnan(np.asarray(y, dtype=np.float64))
    of_known = [np.asarray(part)[known] for part in (y, a, b)]
    return compare_means([(of_known[0], of_known[1], of_known[2])], patient_numbers(y, patients), n, seed)


def _test(difference: float, spread: float, freedom: int) -> tuple[float, str]:
    """Return p of the difference over the standard deviation of its draws, and why it is undefined."""
    if spread < _ROUNDING and abs(difference) < _ROUNDING:
        return 1.0, ""
    if spread < _ROUNDING:
        # Not p = 0: with two images all draws can have the same difference, which proves nothing.
        return math.nan, "the difference is the same in all resamples, so it has no spread"
    return float(2 * stats.t.sf(abs(difference) / spread, freedom)), ""


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p of each test (Holm 1979, Scand J Statist 6:65); NaN, no test, stays.

    The k-th smallest of m is multiplied by m - k + 1, and is at least as large as those before it.
    """
    adjusted, tested = list(p), [i for i, value in enumerate(p) if not math.isnan(value)]
    largest = 0.0
    for before, i in enumerate(sorted(tested, key=lambda i: p[i])):
        largest = max(largest, min(1.0, p[i] * (len(tested) - before)))
        adjusted[i] = largest
    return adjusted


def compare_pairs(a: Sequence[float | None], b: Sequence[float | None]) -> Comparison:
    """Return the paired t-test over runs or classes, with Shapiro-Wilk on the differences.

    Args:
        a, b: values of the same runs or classes, in the same order; None or NaN where undefined.

    Raises:
        DataError: they differ in number.
    """
    if len(a) != len(b):
        raise DataError(f"{len(a)} and {len(b)} values cannot be paired")
    numbers = ([math.nan if v is None else float(v) for v in values] for values in (a, b))
    d = np.array([x - y for x, y in zip(*numbers, strict=True)], dtype=np.float64)
    d = d[~np.isnan(d)]
    if not len(d):
        return Comparison(0, math.nan, math.nan, math.nan, "no pair is defined")
    mean = float(d.mean())
    if len(d) < 2:
        return Comparison(len(d), mean, math.nan, math.nan, "a single pair has no spread")
    if np.ptp(d) < _ROUNDING:
        p = 1.0 if abs(mean) < _ROUNDING else 0.0
        return Comparison(len(d), mean, p, math.nan, "the difference is the same for all pairs")
    test = stats.ttest_1samp(d, 0.0)
    low, high = (float(bound) for bound in test.confidence_interval(0.95))
    normal = float(stats.shapiro(d).pvalue) if len(d) > 2 else math.nan
    why = "" if len(d) > 2 else "two pairs cannot be tested for normality"
    return Comparison(len(d), mean, float(test.pvalue), normal, why, low, high)
