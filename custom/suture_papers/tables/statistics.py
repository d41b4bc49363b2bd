"""The interval of a difference over runs whose splits may overlap, and how many runs would tell of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

_ROUNDING = 1e-12

SHIFT = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))
"""The true difference, in standard errors, that a normal test finds with power .8 at p < .05: 2.80."""


@dataclass(frozen=True)
class Difference:
    """A mean difference over runs; NaN where undefined.

    Attributes:
        n: runs.
        mean: of the differences.
        low, high: 95 % interval of the mean.
        spread: standard deviation of the differences.
        detectable: the smallest true difference that such a design finds with power .8 at p < .05.
    """

    n: int
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    spread: float = math.nan
    detectable: float = math.nan


def corrected_resampled(differences: Sequence[float], share: float) -> Difference:
    """Return the interval of the corrected resampled t-test: variance (1/J + test/train) s², J - 1 degrees.

    Source: Nadeau and Bengio 2003, Machine Learning 52:239, Sec. 3. J runs on random splits of the same
    patients share training data, so that s²/J is too small; test/train estimates how much.

    Args:
        differences: of the J runs.
        share: test/train, the numbers of test and training examples; 0 gives the ordinary paired t-test.
    """
    d = np.asarray(differences, dtype=np.float64)
    runs, mean = len(d), float(d.mean()) if len(d) else math.nan
    if runs < 2:
        return Difference(runs, mean)
    spread = float(d.std(ddof=1))
    error = spread * math.sqrt(1 / runs + share)
    if error < _ROUNDING:  # the same in all runs: equal rows, or too few digits
        return Difference(runs, mean, mean, mean)
    reach = float(stats.t.ppf(0.975, runs - 1)) * error
    return Difference(runs, mean, mean - reach, mean + reach, spread, detectable(error, runs - 1))


def detectable(error: float, freedom: int, power: float = 0.8, level: float = 0.05) -> float:
    """Return the smallest true difference that a two-sided t-test finds with the given power.

    Args:
        error: the standard error of the mean difference.
        freedom: its degrees of freedom.

    Returns:
        error times the noncentrality at which the test of that level has the power.
    """
    limit = float(stats.t.ppf(1 - level / 2, freedom))
    # The other tail has less than a millionth at a power of .8.
    shift = optimize.brentq(lambda at: float(stats.nct.sf(limit, freedom, at)) - power, 0.0, 2 * limit)
    return error * float(shift)


def runs_needed(spread: float, share: float, effect: float) -> int | None:
    """Return how many runs the corrected test needs to find `effect` with power .8.

    Args:
        spread, share: as of `corrected_resampled`.

    Returns:
        None where more than a thousand are needed, or no number is enough: the error stays above
        spread * sqrt(share).
    """
    room = (effect / (SHIFT * spread)) ** 2 - share  # 1/n with a normal distribution in place of t
    if room < 1e-3:
        return None
    n = max(2, math.floor(1 / room))
    while detectable(spread * math.sqrt(1 / n + share), n - 1) > effect:
        n += 1
    return n
