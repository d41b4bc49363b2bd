"""Calibration of probabilities from counts of scores, and how well probabilities are calibrated."""

from __future__ import annotations

import numpy as np
from scipy.special import expit, logit

from suture.learning.metrics import Curves, Floats
from suture.protocol.decisions import GRID, Calibration, Kind

BINS = 10
"""Bins of equal width of a reliability diagram and of the expected calibration error."""


def fit(curves: Curves, kind: Kind) -> Calibration | None:
    """Fit a calibration to counts of scores; None where the model ranks no better than chance.

    - ``platt``: the line in log-odds of the largest likelihood, with Platt's targets, which keep it finite
      where positives and negatives are apart (Platt 1999).
    - ``temperature``: the same line without an intercept (Guo et al., ICML 2017), of each class by itself.

    Args:
        curves: with positives and negatives.
    """
    from sklearn.linear_model import LogisticRegression  # a second's import

    centres, positives, negatives = cells(curves)
    ones, zeros = curves.positives.total, curves.negatives.total
    most, least = (ones + 1) / (ones + 2), 1 / (zeros + 2)
    weights = positives * most + negatives * least, positives * (1 - most) + negatives * (1 - least)
    model = LogisticRegression(C=np.inf, fit_intercept=kind == "platt", tol=1e-8, max_iter=1_000)
    y = np.repeat([1, 0], len(centres))
    model.fit(np.tile(centres, 2)[:, None], y, sample_weight=np.concatenate(weights))
    slope, shift = float(model.coef_[0, 0]), float(model.intercept_[0]) if kind == "platt" else 0.0
    return Calibration(slope, shift) if slope > 0 else None


def cells(curves: Curves) -> tuple[Floats, Floats, Floats]:
    """Return centres of the cells of `GRID` and their positives and negatives, ``[edges + 1]`` each."""
    half = (GRID[1] - GRID[0]) / 2
    centres = np.append(GRID - half, GRID[-1] + half)
    positives, negatives = (
        np.diff(curve.below, prepend=0.0, append=curve.total)
        for curve in (curves.positives, curves.negatives)
    )
    return centres, positives, negatives


def calibrate(p: Floats, calibration: Calibration) -> Floats:
    """Return calibrated probabilities, of any shape."""
    return np.asarray(expit(calibration.slope * log_odds(p) + calibration.intercept))


def log_odds(p: Floats) -> Floats:
    """Return the log-odds of probabilities; those of 0 and 1 lie beyond the grid, and stay finite."""
    tiny = np.finfo(np.float64).eps
    return np.asarray(logit(np.clip(np.asarray(p, dtype=np.float64), tiny, 1 - tiny)))


def at_prevalence(p: Floats, fitted: float, prevalence: float) -> Floats:
    """Return probabilities as they are where a class has another prevalence (Saerens et al. 2002, Eq. 4).

    Args:
        fitted: the prevalence for which `p` is calibrated, in (0, 1).
        prevalence: that of the images at hand, in (0, 1).
    """
    return np.asarray(expit(log_odds(p) + float(logit(prevalence)) - float(logit(fitted))))


def expected_calibration_error(y: Floats, p: Floats) -> float | None:
    """Return the ECE: the mean, over images, of |share of positives - mean probability| of their bin.

    Naeini et al., AAAI 2015, with `BINS` bins of equal width. None without an image.

    Args:
        y: labels ``[n]``, 1 or 0.
        p: probabilities ``[n]``.
    """
    if not len(y):
        return None
    gaps = np.bincount(np.minimum((p * BINS).astype(int), BINS - 1), y - p, minlength=BINS)
    return float(np.abs(gaps).sum() / len(y))


def brier(y: Floats, p: Floats) -> float | None:
    """Return the mean squared error of probabilities (Brier 1950); arguments as for the ECE."""
    return float(np.mean((y - p) ** 2)) if len(y) else None
