"""The arithmetic of the benchmarks' figures, by hand numbers; what they call, they try with `--quick`."""

from __future__ import annotations

import dataclasses

import pytest
from figures import Figure, cells
from harness import interval

ROUND = Figure("rounds", "a round", "s", (2.0, 3.0, 8.0), "flwr", (4.0, 2.0, 4.0))


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    """2/4, 3/2 and 8/4: the median is 1.5, where that of the medians, 3/4, is 0.75."""
    assert ROUND.ratios == (0.5, 1.5, 2.0)
    assert cells(ROUND)[3:8] == ["3", "3.00 (2.00-8.00)", "flwr", "4.00 (2.00-4.00)", "1.50 (0.500-2.00)"]
    assert dataclasses.replace(ROUND, beside=(2.0,)).ratios == (1.0, 1.5, 4.0)  # one sample for all
    with pytest.raises(ValueError, match="a round: 3 samples"):
        dataclasses.replace(ROUND, beside=(1.0, 2.0))


def test_an_interval_is_of_students_t() -> None:
    """Of 1, 2 and 3: mean 2, deviation 1, and 4.303 of 1 / sqrt(3) on either side."""
    assert interval([1, 2, 3]) == "+2.000 (-0.484 to +4.484)"
    assert interval([0.5]) == "+0.500"
