"""Operating points: the thresholds that a rule prefers, and what a threshold means for patients.

An image is positive at and above its threshold.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from suture.learning.metrics import Curves, Floats
from suture.protocol.decisions import GRID, Rule


def thresholds(curves: Curves, sensitivity: float, specificity: float, cost: float) -> dict[Rule, float]:
    """Return the threshold of each rule as a probability, of those that the counts show.

    - ``sensitivity``, ``specificity``: where that share of the positives, or negatives, is decided rightly.
    - ``youden``: where sensitivity + specificity is largest (Youden 1950, Cancer 3:32).
    - ``cost``: where the expected cost is least (Metz 1978, Semin Nucl Med 8:283): a missed positive costs
      `cost` times what a false alarm does, at the prevalence of the counts.

    Of equally good thresholds it is the lowest: a missed finding is the worse error.

    Args:
        curves: with positives and negatives.
    """
    sens, spec, prevalence = curves.sensitivity(), curves.specificity(), curves.prevalence
    loss = cost * prevalence * (1 - sens) + (1 - prevalence) * (1 - spec)
    logits: dict[Rule, float | None] = {
        "sensitivity": curves.positives.quantile(1 - sensitivity),
        "specificity": curves.negatives.quantile(specificity),
        "youden": _lowest(curves, -(sens + spec)),
        "cost": _lowest(curves, loss),
    }
    return {rule: float(expit(value)) for rule, value in logits.items() if value is not None}


def _lowest(curves: Curves, loss: Floats) -> float | None:
    """Return the log-odds where a loss, ``[edges]``, is least, if the counts show any."""
    if not curves.shown:
        return None
    low, high = zip(curves.positives.known, curves.negatives.known, strict=True)
    within = (min(low) <= GRID) & (max(high) >= GRID)
    return float(GRID[within][np.argmin(np.round(loss[within], 12))])
