"""Whether two models rank the images of one class differently: a paired bootstrap of the AUROC.

MIDL 2023, Sec. 3.3, compares classes "using bootstrapping and two-tailed paired t-test" and says no more. A
paired t-test over the draws themselves would divide by the standard error of their mean: its p falls with
the number of draws, and with 1,000 of them nearly any difference would be significant. The printed p
(Appendix B: .10 at .73 against .75, .95 at no difference) fit the difference over its bootstrap standard
deviation instead. So t = difference / SD, two-tailed, with (draws - 1) degrees of freedom: more draws make
p steadier, not smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from suture.learning.metrics import Floats, _area, _clusters, _draws, _known, auroc

_NONE = 1e-12
"""A spread below this is rounding."""


@dataclass(frozen=True)
class AurocComparison:
    """The AUROCs of two models on the same images; what is undefined is NaN.

    Attributes:
        n: draws in which the AUROC is defined.
        auroc_a, auroc_b: on the images as they are.
        difference: auroc_a - auroc_b.
        low, high: 95 % percentile interval of the difference.
        p: two-sided p of no difference.
        why: why something is undefined; empty where nothing is.
    """

    n: int
    auroc_a: float
    auroc_b: float
    difference: float
    low: float
    high: float
    p: float
    why: str = ""


def compare_auroc(
    y: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    patients: Sequence[str] | None = None,
    n: int = 1000,
    seed: int = 0,
) -> AurocComparison:
    """Compares two models' AUROCs of one class by a paired bootstrap over patients (MIDL 2023, Sec. 3.3).

    Every draw of patients serves both models, so what makes a draw easy or hard for both cancels out; the
    draws are those of `bootstrap_auroc` with the same seed.

    Args:
        y: labels [m]: 1, 0 or NaN (unknown, left out).
        a: scores [m] of one model, any scale.
        b: scores [m] of the other, in the same order.
        patients: patient of each image, m of them; None if every image is a patient of its own.
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
    if _clusters(y, patients).max() < 1:
        return replace(undefined, why="a single patient leaves nothing to draw from")
    draws = _differences(y, a, b, patients, n, seed)
    if len(draws) < 2:
        return replace(undefined, n=len(draws), why="fewer than two draws have a positive and a negative")
    low, high = (float(v) for v in np.quantile(draws, [0.025, 0.975]))
    p, why = _test(undefined.difference, draws)
    return replace(undefined, n=len(draws), low=low, high=high, p=p, why=why)


def _differences(
    y: ArrayLike, a: ArrayLike, b: ArrayLike, patients: Sequence[str] | None, n: int, seed: int
) -> Floats:
    """The difference of the AUROCs in each draw that defines them."""
    truth, first = _known(y, a)
    second = _known(y, b)[1]
    cluster = _clusters(y, patients)
    rng = np.random.default_rng(seed)
    parts = [np.empty(0)]
    for drawn in _draws(rng, n, int(cluster.max()) + 1, len(truth)):
        weights = drawn[:, cluster]
        parts.append(_area(weights, truth, first) - _area(weights, truth, second))
    differences = np.concatenate(parts)
    return differences[~np.isnan(differences)]


def _test(difference: float, draws: Floats) -> tuple[float, str]:
    """p of the difference over the standard deviation of its draws, and why it is undefined."""
    spread = float(draws.std(ddof=1))
    if spread < _NONE:
        # Not p = 0: two images suffice for draws that all differ alike, and they prove nothing.
        same = abs(difference) < _NONE
        return (1.0, "") if same else (math.nan, "all draws differ alike, so the difference has no spread")
    return float(2 * stats.t.sf(abs(difference) / spread, len(draws) - 1)), ""
