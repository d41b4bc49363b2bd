"""Thresholds by rule, and predictive values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from suture.learning.calibration import log_odds
from suture.learning.metrics import Curves, histogram
from suture.learning.operating_points import exact_thresholds, predictive_values, thresholds


def curves(positives: np.ndarray, negatives: np.ndarray, min_count: int = 0) -> Curves:
    rows = [histogram(one, np.arange(len(one)), min_count) for one in (positives, negatives)]
    assert rows[0] is not None
    assert rows[1] is not None
    return Curves.of([(rows[0], rows[1])])


def test_each_rule_by_hand() -> None:
    """Positives at 0.1, 1.1, ..., 9.1; negatives at -4.9, ..., 4.1, each in the first half of its cell.

    Below x.0 lie exactly the images of the whole numbers before it: a sensitivity of .8 is had at 2, a
    specificity of .7 at 2. Sensitivity + specificity is 1.5 from 0 to 5. A missed positive costs four false
    alarms: at 0 the cost is 5 alarms, at 1 one missed positive and 4 alarms.
    """
    positives, negatives = np.arange(10) + 0.1, np.arange(10) - 4.9
    found = thresholds(curves(positives, negatives), sensitivity=0.8, specificity=0.7, cost=4.0)
    odds = {rule: float(log_odds(np.array(p))) for rule, p in found.items()}
    assert odds["sensitivity"] == pytest.approx(1.125, abs=1e-6)  # nobody lies between 1.125 and 2
    assert odds["specificity"] == pytest.approx(1.125, abs=1e-6)
    assert odds["youden"] == pytest.approx(-0.875, abs=1e-9)  # five negatives lie below it
    assert odds["cost"] == pytest.approx(-0.875, abs=1e-9)


@pytest.mark.parametrize(("cost", "counted", "exact"), [(2.0, 0.125, 0.65), (4.0, -4.875, 0.2)])
def test_the_least_cost_by_hand_where_positives_are_rare(cost: float, counted: float, exact: float) -> None:
    """Two positives among ten: one beyond the three negatives between them, one below these, five far below.

    Above the three one positive is missed, at the price of `cost` false alarms; below them there are three.
    """
    positives, negatives = np.array([2.1, -2.9]), np.array([0.1] * 3 + [-4.9] * 5)
    odds = log_odds(np.array(thresholds(curves(positives, negatives), 0.9, 0.9, cost)["cost"]))
    assert float(odds) == pytest.approx(counted, abs=1e-6)
    y, p = np.array([1.0] * 2 + [0.0] * 8), np.array([0.8, 0.3] + [0.5] * 3 + [0.1] * 5)
    assert exact_thresholds(y, p, 0.9, 0.9, cost)["cost"] == pytest.approx(exact)


@given(st.integers(0, 2**32 - 1), st.floats(0.6, 0.95), st.sampled_from([0, 5]))
def test_a_target_is_met_within_a_cell(seed: int, target: float, least: int) -> None:
    """The share at the threshold differs from the target by no more than the images of one joined cell."""
    rng = np.random.default_rng(seed)
    positives, negatives = rng.normal(0, 1.5, 300), rng.normal(-2, 1.5, 900)
    found = thresholds(curves(positives, negatives, least), target, target, 1.0)
    for rule, scores, right in (
        ("sensitivity", positives, lambda p, t: p >= t),
        ("specificity", negatives, lambda p, t: p < t),
    ):
        share = right(expit(scores), found[rule]).mean()  # type: ignore[index]
        assert abs(share - target) < 0.06, (rule, share)


def test_what_the_counts_do_not_show_has_no_threshold() -> None:
    """Of 40 positives, four lie below a sensitivity of .9; with five patients a cell, nobody knows where."""
    rng = np.random.default_rng(0)
    positives, negatives = rng.normal(0, 1, 40), rng.normal(-2, 1, 400)
    assert "sensitivity" not in thresholds(curves(positives, negatives, 5), 0.9, 0.9, 1.0)
    assert "sensitivity" in thresholds(curves(positives, negatives, 5), 0.8, 0.9, 1.0)
    assert "sensitivity" in thresholds(curves(positives, negatives, 0), 0.9, 0.9, 1.0)
    # Nor where those of seven lie: one cell, of which no rule knows more than its number of images.
    assert thresholds(curves(positives[:7], negatives, 5), 0.9, 0.9, 1.0).keys() == {"specificity"}


@given(st.integers(0, 2**32 - 1), st.integers(5, 60), st.floats(0.1, 100))
def test_no_threshold_lies_beyond_the_edges_of_the_counts(seed: int, n: int, cost: float) -> None:
    rng = np.random.default_rng(seed)
    found = curves(rng.normal(0, 2, n), rng.normal(-2, 2, 2 * n), 5)
    known = [found.positives.known, found.negatives.known]
    low, high = min(k[0] for k in known), max(k[1] for k in known)
    for rule, p in thresholds(found, 0.9, 0.9, cost).items():
        assert low - 1e-6 <= log_odds(np.array(p)) <= high + 1e-6, rule


def test_predictive_values_by_hand() -> None:
    """Of 1,000 patients 100 are ill: 90 found, 10 missed, 180 false alarms, 720 cleared."""
    ppv, npv = predictive_values(0.9, 0.8, 0.1)
    assert ppv == pytest.approx(90 / 270)
    assert npv == pytest.approx(720 / 730)
    assert math.isnan(predictive_values(0.0, 1.0, 0.1)[0])
