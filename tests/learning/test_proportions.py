"""Intervals of shares, by hand and against scipy; how often they hold what they are about."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from suture.learning.metrics import Estimate, difference, wilson
from suture.learning.operating_points import predictive, predictive_values


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_that_of_scipy(case: tuple[int, int]) -> None:
    k, n = case
    other = binomtest(k, n).proportion_ci(method="wilson")
    found = wilson(k / n, n)
    assert found == pytest.approx((k / n, other.low, other.high), abs=1e-9)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_of_no_image_nothing_is_known() -> None:
    assert wilson(0.7, 0) == (0.7, 0, 1)


def test_newcombes_interval_of_his_own_examples() -> None:
    """Table II of the paper, method 10: (a) 56/70 - 48/80, (c) 6/7 - 2/7, (e) 0/10 - 0/20."""
    assert difference(wilson(56 / 70, 70), wilson(48 / 80, 80))[1:] == pytest.approx(
        (0.0524, 0.3339), abs=5e-5
    )
    assert difference(wilson(6 / 7, 7), wilson(2 / 7, 7))[1:] == pytest.approx((0.0582, 0.8062), abs=5e-5)
    assert difference(wilson(0, 10), wilson(0, 20))[1:] == pytest.approx((-0.1611, 0.2775), abs=5e-5)


def test_predictive_values_by_hand() -> None:
    """Se .9, Sp .9 at 2 %: PPV .018 / (.018 + .098) and NPV .882 / (.882 + .002)."""
    ppv, npv = predictive(Estimate(0.9, 0.8, 0.95), Estimate(0.9, 0.85, 0.95), 0.02)
    assert ppv == pytest.approx((0.018 / 0.116, 0.016 / (0.016 + 0.147), 0.019 / (0.019 + 0.049)))
    assert npv == pytest.approx((0.882 / 0.884, 0.833 / 0.837, 0.931 / 0.932))
    assert all(math.isnan(bound) for bound in predictive(Estimate(0, 0, 0), Estimate(1, 1, 1), 0.1)[0])


Shares = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(Shares, Shares, st.floats(0.01, 0.99), st.floats(0, 1), st.floats(0, 1))
def test_predictive_values_of_rates_within_their_bounds_lie_within_theirs(
    se: list[int], sp: list[int], prevalence: float, a: float, b: float
) -> None:
    """So the interval is never narrower than one of both rates together would have to be."""
    bounds = [(low / 60, high / 60) for low, high in (se, sp)]
    found = predictive(*(Estimate(low, low, high) for low, high in bounds), prevalence)
    inside = [low + (high - low) * share for (low, high), share in zip(bounds, (a, b), strict=True)]
    for one, value in zip(found, predictive_values(*inside, prevalence), strict=True):
        if not any(map(math.isnan, (*one, value))):
            assert one.low - 1e-9 <= value <= one.high + 1e-9


def test_the_intervals_hold_the_truth_in_95_of_100_runs() -> None:
    rng = np.random.default_rng(0)
    inside = {"gap": 0, "ppv": 0}
    for _ in range(2000):
        a, b = rng.binomial(60, 0.85), rng.binomial(60, 0.7)
        low, high = difference(wilson(a / 60, 60), wilson(b / 60, 60))[1:]
        inside["gap"] += low <= 0.15 <= high
        se, sp = rng.binomial(60, 0.85), rng.binomial(400, 0.9)
        _, low, high = predictive(wilson(se / 60, 60), wilson(sp / 400, 400), 0.1)[0]
        inside["ppv"] += low <= 0.085 / (0.085 + 0.09) <= high
    assert inside["gap"] >= 0.94 * 2000
    assert inside["ppv"] >= 0.95 * 2000
