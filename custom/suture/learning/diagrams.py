"""What counts of scores show of a class: its ROC, its precision by recall, and its reliability."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from suture.learning.calibration import BINS, calibrate, cells, log_odds
from suture.learning.metrics import Curves, Floats
from suture.protocol.decisions import GRID, Calibration, Decision, Diagrams, Operating, Rule

_STEP = 0.04
"""Points of a curve that lie nearer to the one before, in both rates, are left out."""


def diagrams(curves: Curves, decision: Decision, rule: Rule) -> Diagrams | None:
    """Return the points of a class's curves; None where the counts do not show where the scores lie.

    Args:
        curves: of one site, or of all together.
        decision: by what the site, or somebody without a threshold of their own, decides and calibrates the
            class; without a calibration, probabilities stay as they are.
        rule: whose threshold is chosen.
    """
    if not (curves.defined and curves.shown):
        return None
    rates = np.stack([curves.sensitivity(), curves.specificity()], axis=1)
    ends = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    points = _thin(np.clip(np.concatenate([ends[0], rates, ends[1]]), 0, 1))
    fitted = decision.fitted
    return Diagrams(
        tuple((round(float(a), 4), round(float(b), 4)) for a, b in points),
        curves.prevalence,
        _reliability(curves, fitted.calibration if fitted else None),
        (round(curves.positives.total), round(curves.negatives.total)),
        _at(curves, decision.pooled, rule),
        _at(curves, decision.own, rule),
    )


def _at(curves: Curves, fitted: Operating | None, rule: Rule) -> tuple[float, float] | None:
    """Return sensitivity and specificity at a threshold; None where there is none."""
    threshold = fitted.thresholds.get(rule) if fitted else None
    if threshold is None:
        return None
    edge = log_odds(np.array(threshold))
    sensitivity, specificity = (
        np.interp(edge, GRID, rate) for rate in (curves.sensitivity(), curves.specificity())
    )
    return round(float(sensitivity), 4), round(float(specificity), 4)


def _thin(points: Floats) -> list[Floats]:
    kept = [points[0]]
    for point in points[1:-1]:
        if np.abs(point - kept[-1]).max() >= _STEP:
            kept.append(point)
    return [*kept, points[-1]]


def _reliability(curves: Curves, calibration: Calibration | None) -> tuple[tuple[float, float, int], ...]:
    """Return of each of `BINS` bins with images: mean probability, share of positives, number of images."""
    centres, positives, negatives = cells(curves)
    p = expit(centres)
    p = calibrate(p, calibration) if calibration else p
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    total, ones, mass = (
        np.bincount(bins, weights, minlength=BINS)
        for weights in (positives + negatives, positives, (positives + negatives) * p)
    )
    return tuple(
        (round(float(mass[k] / total[k]), 4), round(float(ones[k] / total[k]), 4), round(float(total[k])))
        for k in range(BINS)
        if round(float(total[k])) > 0  # of joined cells a bin has fractions of images
    )
