"""Conformal sets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from suture.learning.conformal import conformal_set
from suture.learning.score_counts import Curves, histogram


def curves(positives: np.ndarray, negatives: np.ndarray, min_count: int = 0) -> Curves:
    rows = [histogram(one, np.arange(len(one)), min_count) for one in (positives, negatives)]
    assert rows[0] is not None
    assert rows[1] is not None
    return Curves.of([(rows[0], rows[1])])


def test_by_hand() -> None:
    """Of 19 positives at 0.1, 1.1, ... one may lie outside of a set of 90 % (floor(20 x .1) - 1)."""
    positives = np.arange(19) / 2 + 0.1
    low, high = conformal_set(curves(positives, -positives), 0.9)
    assert ((expit(positives) >= low).sum(), (expit(-positives) <= high).sum()) == (18, 18)
    assert conformal_set(curves(positives[:9], -positives), 0.9)[0] == 0.0  # floor(10 x .1) - 1 is none


@pytest.mark.parametrize("least", [0, 5])
def test_the_coverage_is_that_stated(least: int) -> None:
    """Over many draws of 500 images with and without a class, the sets of fresh images cover 90 %."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        low, high = conformal_set(curves(rng.normal(1, 1, 500), rng.normal(-1, 1, 500), least), 0.9)
        fresh = rng.normal(1, 1, 4_000), rng.normal(-1, 1, 4_000)
        covered.append([(expit(fresh[0]) >= low).mean(), (expit(fresh[1]) <= high).mean()])
    assert np.mean(covered, axis=0) == pytest.approx([0.9, 0.9], abs=0.01)


def test_what_the_counts_do_not_show_is_always_in_the_set() -> None:
    rng = np.random.default_rng(0)
    low, high = conformal_set(curves(rng.normal(1, 1, 40), rng.normal(-1, 1, 400), 5), 0.9)
    assert low == 0.0
    assert high < 1.0
