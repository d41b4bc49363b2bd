"""Conformal sets: which of "present" and "absent" may be true of a class, with a stated coverage.

Split conformal prediction for each label by itself (Vovk, ACML 2012): of images with the class, and of those
without it, at least the stated share has the true label in its set, if they are exchangeable with the
validation images and no site rounds its counts (`round_counts` moves the rank by up to half a step at each
site). A set may hold both labels, or none.
"""

from __future__ import annotations

import math

from scipy.special import expit

from suture.learning.score_counts import Curve, Curves
from suture.protocol.decisions import GRID


def conformal_set(curves: Curves, coverage: float) -> tuple[float, float]:
    """Return the lowest probability of a possible positive, and the highest of a possible negative.

    The bound of n positives is the score of rank k = floor((n + 1)(1 - coverage)) from below, that of n
    negatives the one of rank k from above: a new image is covered with the probability 1 - k / (n + 1), or
    more where scores are equal. Counts show an edge of the cell instead of the score: it is the outer one, of
    all cells that a site joined, so that the sets are at most wider. Where k is 0, or the counts show no such
    edge, the set always has the label.
    """
    positives, negatives = curves.positives, curves.negatives
    low = GRID[positives.most < _rank(positives, coverage)]
    high = GRID[negatives.total - negatives.least < _rank(negatives, coverage)]
    return float(expit(low[-1])) if len(low) else 0.0, float(expit(high[0])) if len(high) else 1.0


def _rank(curve: Curve, coverage: float) -> int:
    """Return k."""
    return math.floor((curve.total + 1) * (1 - coverage) + 1e-9)
