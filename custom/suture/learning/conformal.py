"""Conformal sets: which of "present" and "absent" may be true of a class, with a stated coverage.

Split conformal prediction for each label by itself (Vovk, ACML 2012): of images with the class, and of those
without it, at least the stated share has the true label in its set, if they are exchangeable with the
validation images. A set may hold both labels, or none.
"""

from __future__ import annotations

import math

from scipy.special import expit

from suture.learning.score_counts import Curve, Curves


def conformal_set(curves: Curves, coverage: float) -> tuple[float, float]:
    """Return the lowest probability of a possible positive, and the highest of a possible negative.

    Of n images floor((n + 1)(1 - coverage)) - 1 may lie outside. Where that is none, or the counts do not
    show where they lie, the set always has the label. Within a cell scores are taken to lie evenly, so the
    coverage is exact up to what a cell hides.
    """
    missed, alarmed = _outside(curves.positives, coverage), _outside(curves.negatives, coverage)
    lowest = curves.positives.quantile(missed) if missed else None
    highest = curves.negatives.quantile(1 - alarmed) if alarmed else None
    return (
        0.0 if lowest is None else float(expit(lowest)),
        1.0 if highest is None else float(expit(highest)),
    )


def _outside(curve: Curve, coverage: float) -> float:
    """Return the share of the images that may lie outside of a set."""
    return max(math.floor((curve.total + 1) * (1 - coverage) + 1e-9) - 1, 0) / curve.total
