"""The interval of a difference over runs, what it says of a claim, and Holm's correction: by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from suture_papers.tables.claims import average, decision, verdict
from suture_papers.tables.statistics import corrected_resampled, detectable
from suture_results.comparison import holm

FIVE = [0.02, 0.03, 0.01, 0.025, 0.02]


# Differences of runs


def test_the_corrected_test_by_hand() -> None:
    """Mean .021, s = .0074162; sqrt(1/5 + 1/4) s = .004975; t(.975, 4) = 2.77645: .021 ± .01381."""
    found = corrected_resampled(FIVE, share=1 / 4)
    assert found.mean == pytest.approx(0.021)
    assert (found.low, found.high) == pytest.approx((0.00719, 0.03481), abs=5e-6)


def test_without_overlap_it_is_the_paired_t_test() -> None:
    found, known = corrected_resampled(FIVE, 0), stats.ttest_1samp(FIVE, 0.0)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval(0.95)))


def test_one_run_or_equal_runs_are_not_tested() -> None:
    assert math.isnan(corrected_resampled([], 1 / 4).mean)
    one = corrected_resampled([0.1], 1 / 4)
    assert one.mean == 0.1
    assert math.isnan(one.low)
    equal = corrected_resampled([0.1, 0.1], 1 / 4)
    assert (equal.low, equal.high) == (0.1, 0.1)
    assert math.isnan(equal.detectable)


def test_what_can_be_detected() -> None:
    """z(.975) + z(.8) = 2.8016 standard errors for many runs; 3.150 for ten (Cohen's d .996 for n = 10)."""
    assert detectable(1.0, 100_000) == pytest.approx(2.8016, abs=1e-3)
    assert detectable(1.0, 9) / math.sqrt(10) == pytest.approx(0.996, abs=1e-3)
    assert detectable(0.5, 9) == pytest.approx(detectable(1.0, 9) / 2)


def test_holm_by_hand() -> None:
    """.005 x 4, .01 x 3, .03 x 2; .04 x 1 is raised to .06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    kept = holm([math.nan, 0.02])
    assert math.isnan(kept[0])
    assert kept[1] == 0.02


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_lowers_nothing(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert all(adjusted[i] <= adjusted[j] for i, j in product(range(len(p)), repeat=2) if p[i] < p[j])


# Claims


@pytest.mark.parametrize(
    ("low", "high", "more", "equal"),
    [
        (0.011, 0.05, "confirmed", "refuted"),
        (0.010, 0.05, "open", "open"),
        (-0.010, 0.010, "equivalent", "confirmed"),
        (-0.008, -0.002, "equivalent", "confirmed"),  # too small to matter
        (-0.030, -0.002, "refuted", "open"),
        (-0.030, -0.011, "refuted", "refuted"),
        (-0.030, 0.0, "open", "open"),
        (-0.030, 0.030, "open", "open"),
    ],
)
def test_each_verdict_by_hand(low: float, high: float, more: str, equal: str) -> None:
    assert verdict(low, high, 0.01, "more") == more
    assert verdict(low, high, 0.01, "equal") == equal


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0.001, 0.2))
def test_a_wider_interval_never_decides_what_a_narrower_one_leaves_open(
    middle: float, half: float, margin: float
) -> None:
    for expects in ("more", "equal"):
        if verdict(middle - half, middle + half, margin, expects) == "open":
            continue
        narrow = verdict(middle - half / 2, middle + half / 2, margin, expects)
        assert narrow != "open"


def test_three_differences_by_hand() -> None:
    """.02, .03, .04: mean .03, SD .01; t(.975, 2) = 4.302653: half the interval is 4.302653 x .01 / sqrt(3).

    The noncentral t of 2 degrees that exceeds 4.302653 with probability .8 has 5.6535: x .01 / sqrt(3).
    Half a SD is found four times in five with 34 pairs.
    """
    found = decision([0.02, 0.03, 0.04], 0.005, "more")
    assert (found.difference.low, found.difference.high) == pytest.approx((0.005159, 0.054841), abs=1e-6)
    assert found.difference.detectable == pytest.approx(0.032640, abs=1e-6)
    assert (found.difference.n, found.needed, found.verdict) == (3, 34, "confirmed")
    assert decision([0.02, 0.03, 0.04], 0.006, "more").verdict == "open"
    assert decision([0.02, 0.03, 0.04], 0.06, "more").verdict == "equivalent"
    assert decision([-0.02, -0.03, -0.04], 0.005, "more").verdict == "refuted"


def test_overlapping_splits_widen_the_interval() -> None:
    """30 tested on over 70 trained on: SD sqrt(1/3 + 3/7) = .0087287, times 4.302653."""
    found = decision([0.02, 0.03, 0.04], 0.005, "more", tested=30 / 70)
    assert found.difference.high - found.difference.mean == pytest.approx(0.0375563, abs=1e-6)
    assert (found.needed, found.verdict) == (None, "open")


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5]])
def test_few_runs_decide_nothing(values: list[float]) -> None:
    found = decision(values, 0.01, "more")
    assert (found.verdict, found.difference.n) == ("open", len(values))
    assert math.isnan(found.difference.low)


def test_equal_differences_have_no_power_to_tell_of() -> None:
    found = decision([0.5, 0.5, 0.5], 0.01, "more")
    assert (found.difference.low, found.difference.high, found.verdict) == (0.5, 0.5, "confirmed")
    assert math.isnan(found.difference.detectable)


def test_studies_are_averaged_over_the_pairs_that_all_have() -> None:
    a = {("None", 1, 0): 0.1, ("None", 1, 1): 0.2, ("None", 1, 2): 0.3}
    b = {("None", 1, 0): 0.3, ("None", 1, 2): 0.5}
    assert average([a, b]) == pytest.approx([0.2, 0.4])
    assert average([a, {}]) == []
