"""Calibration from counts, and how well probabilities are calibrated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from suture.learning.calibration import (
    at_prevalence,
    brier,
    calibrate,
    expected_calibration_error,
    fit,
    log_odds,
)
from suture.learning.metrics import Curves, histogram
from suture.protocol.decisions import Calibration


def curves(scores: np.ndarray, y: np.ndarray) -> Curves:
    rows = [histogram(scores[y == kind], np.arange(int((y == kind).sum())), 0) for kind in (1, 0)]
    assert rows[0] is not None
    assert rows[1] is not None
    return Curves.of([(rows[0], rows[1])])


def drawn(n: int, slope: float, intercept: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose true probability is expit(slope * score + intercept)."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(-1, 2, n)
    return scores, (rng.random(n) < expit(slope * scores + intercept)).astype(float)


def test_platts_line_is_found_again() -> None:
    found = fit(curves(*drawn(200_000, 0.6, -0.8)), "platt")
    assert found is not None
    assert found.slope == pytest.approx(0.6, abs=0.02)
    assert found.intercept == pytest.approx(-0.8, abs=0.02)
    cooled = fit(curves(*drawn(200_000, 0.5, 0.0)), "temperature")
    assert cooled is not None
    assert cooled.intercept == 0
    assert cooled.slope == pytest.approx(0.5, abs=0.02)


def test_the_line_is_that_of_the_largest_likelihood() -> None:
    """Moving it in any direction makes the counts less likely."""
    scores, y = drawn(3_000, 1.4, 0.5)
    centres = (np.floor(scores * 4) + 0.5) / 4
    found = fit(curves(scores, y), "platt")
    assert found is not None
    ones, zeros = (y == 1).sum(), (y == 0).sum()
    target = np.where(y == 1, (ones + 1) / (ones + 2), 1 / (zeros + 2))

    def loss(slope: float, intercept: float) -> float:
        p = expit(slope * centres + intercept)
        return float(-(target * np.log(p) + (1 - target) * np.log1p(-p)).mean())

    best = loss(found.slope, found.intercept)
    for step in ((1e-2, 0), (-1e-2, 0), (0, 1e-2), (0, -1e-2)):
        assert best < loss(found.slope + step[0], found.intercept + step[1])


def test_what_is_apart_stays_finite_and_what_is_no_better_than_chance_has_none() -> None:
    scores = np.repeat([-3.0, 3.0], 20)
    found = fit(curves(scores, np.repeat([0.0, 1.0], 20)), "platt")
    assert found is not None
    assert 0 < found.slope < 10
    assert fit(curves(scores, np.repeat([1.0, 0.0], 20)), "platt") is None
    assert fit(curves(np.zeros(40), np.tile([1.0, 0.0], 20)), "platt") is None


@pytest.mark.complete
@given(st.integers(0, 2**32 - 1))
def test_a_line_changes_no_auroc(seed: int) -> None:
    from sklearn.metrics import roc_auc_score

    scores, y = drawn(400, 0.7, -0.5, seed)
    for kind in ("platt", "temperature"):
        found = fit(curves(scores, y), kind)  # type: ignore[arg-type]
        if found:
            p = expit(scores)
            assert roc_auc_score(y, calibrate(p, found)) == pytest.approx(roc_auc_score(y, p), abs=1e-12)


def test_calibration_lowers_the_error() -> None:
    scores, y = drawn(20_000, 0.4, -1.0)
    fresh, truth = drawn(20_000, 0.4, -1.0, seed=1)
    found = fit(curves(scores, y), "platt")
    assert found is not None
    before, after = expit(fresh), calibrate(expit(fresh), found)
    error = expected_calibration_error(truth, before), expected_calibration_error(truth, after)
    assert error[0] is not None
    assert error[1] is not None
    assert error[1] < 0.02 < 0.1 < error[0]


def test_errors_by_hand() -> None:
    """Bins [.0, .1) with .05 and no positive, [.9, 1] with .9 and 1.0 and one positive of two."""
    from sklearn.metrics import brier_score_loss

    y, p = np.array([0.0, 0.0, 1.0]), np.array([0.05, 0.9, 1.0])
    assert expected_calibration_error(y, p) == pytest.approx((0.05 + abs(1 - 1.9)) / 3)
    assert brier(y, p) == pytest.approx((0.05**2 + 0.9**2) / 3) == pytest.approx(brier_score_loss(y, p))
    assert expected_calibration_error(y[:0], p[:0]) is None
    assert brier(y[:0], p[:0]) is None


def test_another_prevalence_by_hand() -> None:
    """Odds of 1 at a prevalence of 1/2 are odds of 1/9 where one of ten is positive."""
    assert at_prevalence(np.array([0.5]), 0.5, 0.1)[0] == pytest.approx(0.1)
    assert at_prevalence(np.array([0.2, 0.9]), 0.3, 0.3) == pytest.approx([0.2, 0.9])


def test_log_odds_stay_finite() -> None:
    assert np.isfinite(log_odds(np.array([0.0, 1.0]))).all()
    assert log_odds(np.array([0.3]))[0] == pytest.approx(logit(0.3))


def test_a_map_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="slope"):
        Calibration(slope=0.0)
