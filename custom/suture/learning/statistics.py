"""Comparing methods: paired t-tests as the papers state them, and their marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from suture.core.errors import DataError

_MARKS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


@dataclass(frozen=True)
class Comparison:
    """A paired, two-tailed t-test of a - b.

    Attributes:
        n: pairs in which both are defined.
        difference: mean of a - b.
        p: of the t-test; NaN with fewer than two pairs, 1 where all differences are 0.
        normal_p: of the Shapiro-Wilk test on the differences; NaN with fewer than three pairs.
        why: why the test is undefined; empty where it is not.
    """

    n: int
    difference: float
    p: float
    normal_p: float
    why: str = ""

    @property
    def significant(self) -> bool:
        """p < .05 on differences that may be normal (Kulkarni et al. 2024, Sec. 4.3)."""
        return self.p < 0.05 and self.normal_p >= 0.05

    @property
    def mark(self) -> str:
        """The papers' marks: ns, *, **, ***; a dagger where the differences are not normal."""
        if math.isnan(self.p):
            return "–"
        stars = next((mark for limit, mark in _MARKS if self.p < limit), "ns")
        return stars if stars == "ns" or self.significant else f"{stars}†"


def paired(a: Sequence[float | None], b: Sequence[float | None]) -> Comparison:
    """Paired t-test over runs or classes, with Shapiro-Wilk on the differences.

    Args:
        a, b: values of the same runs or classes, in the same order; None or NaN where undefined.

    Raises:
        DataError: they are not equally many.
    """
    if len(a) != len(b):
        raise DataError(f"{len(a)} and {len(b)} values are no pairs")
    pairs = [(x, y) for x, y in zip(_numbers(a), _numbers(b), strict=True) if x == x and y == y]
    if not pairs:
        return Comparison(0, math.nan, math.nan, math.nan, "no pair is defined")
    d = np.array([x - y for x, y in pairs], dtype=np.float64)
    mean = float(d.mean())
    if len(d) < 2:
        return Comparison(len(d), mean, math.nan, math.nan, "a single pair has no spread")
    if np.ptp(d) < 1e-12:
        return Comparison(len(d), mean, 1.0 if abs(mean) < 1e-12 else 0.0, math.nan, "all pairs differ alike")
    p = float(stats.ttest_1samp(d, 0.0).pvalue)
    normal = float(stats.shapiro(d).pvalue) if len(d) > 2 else math.nan
    return Comparison(
        len(d), mean, p, normal, "" if len(d) > 2 else "two pairs cannot be tested for normality"
    )


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def mean_sd(values: Sequence[float | None], *, sample: bool) -> tuple[float, float]:
    """Mean and standard deviation of the defined values; NaN where there are none.

    Args:
        sample: divide by n - 1 (over runs) rather than by n (over classes, as Kulkarni et al. 2024).
    """
    defined = np.array([v for v in _numbers(values) if v == v], dtype=np.float64)
    if not len(defined):
        return math.nan, math.nan
    spread = float(defined.std(ddof=1 if sample else 0)) if len(defined) > sample else math.nan
    return float(defined.mean()), spread
