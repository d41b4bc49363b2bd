"""Operating points: the thresholds that a rule prefers, and what a threshold means for patients.

An image is positive at and above its threshold.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit

from suture.learning.metrics import Curves, Estimate, Floats
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


def exact_thresholds(
    y: Floats, p: Floats, sensitivity: float, specificity: float, cost: float
) -> dict[Rule, float]:
    """Return the thresholds of `thresholds` from the scores themselves, halfway to the next lower score.

    Args:
        y: labels ``[n]``: 1 and 0, of both at least one.
        p: probabilities ``[n]``.
    """
    cutoffs = np.append(np.unique(p), 1.0)  # at and above the last no image is positive, but for a score of 1
    sens = 1 - np.searchsorted(np.sort(p[y == 1]), cutoffs) / (y == 1).sum()
    spec = np.searchsorted(np.sort(p[y == 0]), cutoffs) / (y == 0).sum()
    prevalence = float((y == 1).mean())
    loss = cost * prevalence * (1 - sens) + (1 - prevalence) * (1 - spec)
    places: dict[Rule, int] = {
        "sensitivity": int(np.flatnonzero(sens >= sensitivity - 1e-12)[-1]),
        "specificity": int(np.argmax(spec >= min(specificity, spec[-1]) - 1e-12)),
        "youden": int(np.argmax(np.round(sens + spec, 12))),
        "cost": int(np.argmin(np.round(loss, 12))),
    }
    below = np.append(0.0, cutoffs[:-1])
    return {rule: float((cutoffs[i] + below[i]) / 2) for rule, i in places.items()}


def _lowest(curves: Curves, loss: Floats) -> float | None:
    """Return the log-odds where a loss, ``[edges]``, is least, if the counts show any."""
    if not curves.shown:
        return None
    low, high = zip(curves.positives.known, curves.negatives.known, strict=True)
    within = (min(low) <= GRID) & (max(high) >= GRID)
    return float(GRID[within][np.argmin(np.round(loss[within], 12))])


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """Return PPV and NPV at a prevalence, by Bayes' rule; NaN where no image would be decided so."""
    hits, alarms = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
    misses, clear = (1 - sensitivity) * prevalence, specificity * (1 - prevalence)
    return _share(hits, alarms), _share(clear, misses)


def predictive(sensitivity: Estimate, specificity: Estimate, prevalence: float) -> tuple[Estimate, Estimate]:
    """Return PPV and NPV at a prevalence, NaN where no image would be decided so.

    Both grow with sensitivity and with specificity, so the bounds are those of the lower and of the upper
    bounds of the two, which covers at least as often.
    """
    at = [predictive_values(se, sp, prevalence) for se, sp in zip(sensitivity, specificity, strict=True)]
    ppv, npv = zip(*at, strict=True)
    return Estimate(*ppv), Estimate(*npv)


def _share(part: float, other: float) -> float:
    return part / (part + other) if part + other > 0 else math.nan
