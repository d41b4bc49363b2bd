"""Statistics of a study: differences over runs whose splits overlap, tests of many rows, and of one pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from suture.core.errors import DataError
from suture.learning.metrics import Floats, known_only, patient_numbers
from suture_results.comparison import holm

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
        p: two-sided p of no difference.
        detectable: the smallest true difference that such a design finds with power .8 at p < .05.
        holm: p after Holm's correction for the other rows of the table.
        spread: standard deviation of the differences.
        share: the part of spread² that more runs do not take away, test/train; see `corrected_resampled`.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float
    detectable: float
    holm: float = math.nan
    spread: float = math.nan
    share: float = math.nan


def corrected_resampled(differences: Sequence[float], test: float, train: float) -> Difference:
    """Return the corrected resampled t-test: t = mean / sqrt((1/J + test/train) s²), with J - 1 degrees.

    Source: Nadeau and Bengio 2003, Machine Learning 52:239, Sec. 3. J runs on random splits of the same
    patients share training data, so that s²/J is too small; test/train estimates how much.

    Args:
        differences: of the J runs.
        test, train: numbers of test and training images; 0 and 1 give the ordinary paired t-test.
    """
    d = np.asarray(differences, dtype=np.float64)
    if not len(d):
        return Difference(0, *[math.nan] * 5)
    mean, runs = float(d.mean()), len(d)
    if runs < 2:
        return Difference(runs, mean, *[math.nan] * 4)
    spread, share = float(d.std(ddof=1)), test / train
    error = spread * math.sqrt(1 / runs + share)
    if error < _ROUNDING:  # the same in all runs: equal rows, or too few digits
        return Difference(runs, mean, mean, mean, 1.0 if abs(mean) < _ROUNDING else math.nan, math.nan)
    reach = float(stats.t.ppf(0.975, runs - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, runs - 1))
    found = detectable(error, runs - 1)
    return Difference(runs, mean, mean - reach, mean + reach, p, found, spread=spread, share=share)


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
        spread, share: as in `Difference`.

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


FEWEST_SEEDS = 10


def two_level(draws: ArrayLike, n: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean difference over seeds and test patients.

    Each of the `n` replicates adds two parts: the mean of as many seeds as there are, drawn with replacement,
    and what one draw of test patients, the same in all seeds, changes of the mean over all seeds. A patient
    is in the test sets of several seeds: drawn for each seed anew, patients would seem to be more than there
    are. Seeds that differ by their patients count these in both parts, so that the interval is rather wide.
    Where they differ otherwise, drawing from a few makes it narrow: 95 % are 78 at three seeds and 83 at
    five. So there is no interval with fewer than `FEWEST_SEEDS`.

    Args:
        draws: differences ``[seeds, draws of patients]``; a column is one draw.
    """
    d = np.asarray(draws, dtype=np.float64)
    d = d[:, ~np.isnan(d).all(axis=0)] if d.ndim == 2 else np.empty((0, 0))
    if len(d) < FEWEST_SEEDS or not d.size or np.isnan(d).all(axis=1).any():
        return math.nan, math.nan
    rng, (seeds, columns) = np.random.default_rng(seed), d.shape
    each = np.nanmean(d, axis=1)
    change = np.nanmean(d - each[:, None], axis=0)
    means = each[rng.integers(seeds, size=(n, seeds))].mean(axis=1) + change[rng.integers(columns, size=n)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def with_holm(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the differences of a table's rows with their adjusted p."""
    adjusted = holm([one.p for one in found.values()])
    return {row: replace(one, holm=p) for (row, one), p in zip(found.items(), adjusted, strict=True)}


@dataclass(frozen=True)
class OverStudies:
    """A row against the control over blocks of studies; a block counts once.

    Attributes:
        blocks: number of them.
        median: of the differences.
        p, holm: of Wilcoxon's signed-rank test, two-sided and exact; and after Holm's correction over rows.
    """

    blocks: int
    median: float
    p: float
    holm: float = math.nan


def over_studies(effects: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, OverStudies]:
    """Compare each row with the control over data sets (Demsar 2006, JMLR 7:1, Sec. 3.1.3 and 3.2.2).

    With b blocks p is at least 2 / 2^b, so five cannot give p < .05, and six only if all agree.

    Args:
        effects: by row and block, the difference from the control in each study of the block; their mean
            stands for the block, because studies on the same images are not independent.
    """
    found = {}
    every = stats.PermutationMethod(2**16)  # all signs of up to 16 blocks: scipy's "exact" is wrong with ties
    for row, blocks in effects.items():
        d = np.round([np.mean(values) for values in blocks.values() if len(values)], 12)
        moved = d[d != 0]
        p = 1.0 if len(moved) == 1 else math.nan  # either sign is as likely
        if len(moved) > 1:
            p = float(stats.wilcoxon(moved, method=every).pvalue)
        found[row] = OverStudies(len(d), float(np.median(d)) if len(d) else math.nan, p)
    adjusted = holm([one.p for one in found.values()])
    return {row: replace(one, holm=p) for (row, one), p in zip(found.items(), adjusted, strict=True)}


def clustered_delong(
    y: ArrayLike, a: ArrayLike, b: ArrayLike, patients: Sequence[str] | None = None
) -> Difference:
    """Compare two models' AUROCs of one class without draws, with several images of a patient.

    Source: Obuchowski 1997, Biometrics 53:567; with one image a patient it is DeLong et al. 1988, Biometrics
    44:837. V10 of a positive image is the share of negatives below it, V01 of a negative one the share of
    positives above it (ties count half); they are summed within patients, and

        S10 = I10 / ((I10 - 1) M) sum_i (V10_i - m_i A) (V10_i - m_i A)'     over patients with a positive
        S01   alike with N and n_i;   S11 = I / (I - 1) sum_i (V10_i - m_i A) (V01_i - n_i A)'
        cov   = S10 / M + S01 / N + (S11 + S11') / (M N)

    Args:
        y: labels ``[n]``: 1, 0 or NaN (left out).
        a, b: scores ``[n]`` of the two models.
        patients: of each image; None if every image is a patient of its own.

    Returns:
        The difference a - b, its normal interval and p, and the number of patients; `detectable` alike.

    Raises:
        DataError: no positive, no negative, or a single patient with one of them.
    """
    truth, first = known_only(y, a)
    scores = np.stack([first, known_only(y, b)[1]])
    cluster = patient_numbers(y, patients)
    clusters, positives, negatives = int(cluster.max(initial=-1)) + 1, int(truth.sum()), int((~truth).sum())
    having = [len({*cluster[truth]}), len({*cluster[~truth]})]
    if min(having) < 2:
        raise DataError("DeLong's test needs two patients with the class and two without it")
    placed = np.stack([_placements(one, truth) for one in scores])  # [2, n]: V10 or V01 of each image
    areas = placed[:, truth].mean(axis=1)
    off = placed - areas[:, None]
    sums = [
        np.stack([np.bincount(cluster[part], one[part], clusters) for one in off]) for part in (truth, ~truth)
    ]
    inner = [
        i / (i - 1) * s @ s.T / n**2 for i, s, n in zip(having, sums, (positives, negatives), strict=True)
    ]
    cross = clusters / (clusters - 1) * sums[0] @ sums[1].T / (positives * negatives)
    covariance = inner[0] + inner[1] + cross + cross.T
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    mean, error = float(areas[0] - areas[1]), math.sqrt(max(variance, 0.0))
    if error < _ROUNDING:
        return Difference(clusters, mean, mean, mean, 1.0 if abs(mean) < _ROUNDING else math.nan, math.nan)
    reach = float(stats.norm.ppf(0.975)) * error
    p = float(2 * stats.norm.sf(abs(mean) / error))
    return Difference(clusters, mean, mean - reach, mean + reach, p, SHIFT * error)


def _placements(score: Floats, truth: np.ndarray) -> Floats:
    """Return V10 of each positive and V01 of each negative image, ``[n]``."""
    found = np.empty(len(score))
    positives, negatives = np.sort(score[truth]), np.sort(score[~truth])
    for own, others, turned in ((truth, negatives, False), (~truth, positives, True)):
        sides = [np.searchsorted(others, score[own], side) for side in ("left", "right")]
        below = (sides[0] + sides[1]) / 2 / len(others)
        found[own] = 1 - below if turned else below
    return found
