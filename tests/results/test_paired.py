import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture.learning.metrics import mean_sd
from suture_results.comparison import Comparison, compare_pairs

NAN = math.nan


def test_the_t_test_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, SD 1, t = 2 sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t² + 2).
    found = compare_pairs([2, 4, 6], [1, 2, 3])
    t = 2 * math.sqrt(3)
    assert (found.n, found.difference) == (3, 2)
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2)) == pytest.approx(0.0742, abs=5e-5)
    assert found.normal_p == pytest.approx(1.0)  # three evenly spaced values are as normal as three can be
    assert (found.mark, found.why) == ("ns", "")


def test_pairs_that_agree_do_not_differ() -> None:
    found = compare_pairs([0.7, 0.8, 0.9], [0.7, 0.8, 0.9])
    assert (found.difference, found.p, found.mark) == (0, 1, "ns")


def test_a_constant_difference_is_beyond_doubt_and_beyond_the_normality_test() -> None:
    found = compare_pairs([0.8, 0.9], [0.7, 0.8])
    assert found.p == 0
    assert "the same for all pairs" in found.why
    assert math.isnan(found.normal_p)
    assert found.mark == "***†"


def test_one_pair_is_no_test() -> None:
    found = compare_pairs([0.8], [0.7])
    assert found.n == 1
    assert found.difference == pytest.approx(0.1)
    assert math.isnan(found.p)
    assert (found.mark, found.why) == ("–", "a single pair has no spread")


def test_no_pair_is_no_difference() -> None:
    found = compare_pairs([None, 0.8], [0.7, None])
    assert found.n == 0
    assert math.isnan(found.difference)
    assert math.isnan(found.p)
    assert found.why == "no pair is defined"


def test_two_pairs_have_a_p_and_no_normality() -> None:
    # Differences 1 and 3: t = 2 with one degree of freedom, the Cauchy distribution.
    found = compare_pairs([2, 5], [1, 2])
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    assert math.isnan(found.normal_p)
    assert not found.significant


def test_undefined_values_are_left_out_with_their_partners() -> None:
    assert compare_pairs([2, None, 4, 6, 9], [1, 5, 2, 3, None]) == compare_pairs([2, 4, 6], [1, 2, 3])


def test_values_must_be_pairs() -> None:
    with pytest.raises(DataError, match="3 and 2 values"):
        compare_pairs([1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("p", "normal_p", "mark"),
    [
        (0.05, 0.5, "ns"),
        (0.0499, 0.5, "*"),
        (0.01, 0.5, "*"),
        (0.0099, 0.5, "**"),
        (0.001, 0.5, "**"),
        (0.0009, 0.05, "***"),
        (0.0009, 0.049, "***†"),
        (0.03, 0.01, "*†"),
        (0.03, NAN, "*†"),
        (0.2, 0.01, "ns"),  # there is nothing to doubt
        (NAN, NAN, "–"),
    ],
)
def test_marks_are_the_papers(p: float, normal_p: float, mark: str) -> None:
    found = Comparison(7, 0.1, p, normal_p)
    assert found.mark == mark
    assert found.significant == (mark in ("*", "**", "***"))


def test_the_spread_is_of_a_sample_or_of_all_there_is() -> None:
    assert mean_sd([1, None, 3], sample=True) == (2, pytest.approx(math.sqrt(2)))
    assert mean_sd([1, None, 3], sample=False) == (2, 1)


def test_one_value_has_a_spread_only_as_all_there_is() -> None:
    assert mean_sd([0.8], sample=False) == (0.8, 0)
    mean, spread = mean_sd([0.8], sample=True)
    assert mean == 0.8
    assert math.isnan(spread)
    assert all(math.isnan(v) for v in mean_sd([None], sample=False))


VALUES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


@pytest.mark.complete
@given(VALUES)
def test_swapping_the_methods_turns_the_sign(pairs: list[tuple[int, int]]) -> None:
    a, b = zip(*pairs, strict=True)
    one, other = compare_pairs(a, b), compare_pairs(b, a)
    assert one.difference == -other.difference
    assert one.p == pytest.approx(other.p, nan_ok=True)
