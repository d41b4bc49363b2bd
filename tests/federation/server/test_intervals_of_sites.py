"""Intervals over sites by hand, against simulated patients, and against any correlation of classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.federation.server.selection import interval_of_mean, interval_over_sites
from suture.learning.metrics import score_classes
from suture.protocol.messages import ClassScore


def score(auroc: float | None, half: float | None = None) -> ClassScore:
    if auroc is None or half is None:
        return ClassScore(auroc, None, None, 5, 5)
    return ClassScore(auroc, auroc - half, auroc + half, 5, 5)


def test_variances_of_sites_add() -> None:
    """Half-widths .03 and .04 of two sites make .05 of their sum, and .025 of their mean."""
    assert interval_over_sites([score(0.8, 0.03), score(0.9, 0.04)]) == (
        pytest.approx(0.825),
        pytest.approx(0.875),
    )
    assert interval_over_sites([score(0.8, 0.03)]) == (pytest.approx(0.77), pytest.approx(0.83))
    # Four equal sites halve the interval of one.
    assert interval_over_sites([score(0.7, 0.08)] * 4) == (pytest.approx(0.66), pytest.approx(0.74))


def test_without_every_interval_there_is_none() -> None:
    assert interval_over_sites([]) is None
    assert interval_over_sites([score(0.8, 0.03), score(0.9)]) is None
    assert interval_over_sites([score(0.8)]) is None
    assert interval_of_mean({}) is None
    assert interval_of_mean({"a": {"x": score(None)}}) is None
    assert interval_of_mean({"a": {"x": score(0.8, 0.1), "y": score(0.7)}}) is None


def test_the_mean_over_classes_by_hand() -> None:
    """a: x (.8 ± .04) and y (.6 ± .02), b: x (.9 ± .08): x weighs 1/4 at each site, y 1/2 at a.

    The mean is (.85 + .6) / 2 = .725; a adds at most .01 + .01, b .02: the root of .0004 + .0004.
    """
    sites = {
        "a": {"x": score(0.8, 0.04), "y": score(0.6, 0.02)},
        "b": {"x": score(0.9, 0.08), "z": score(None)},
    }
    half = math.sqrt(0.0008)
    assert interval_of_mean(sites) == (pytest.approx(0.725 - half), pytest.approx(0.725 + half))


def test_an_interval_stays_between_0_and_1() -> None:
    assert interval_over_sites([score(0.98, 0.1), score(0.97, 0.1)]) == (
        pytest.approx(0.975 - math.hypot(0.1, 0.1) / 2),
        1.0,
    )


@given(
    st.lists(st.floats(0.001, 0.05), min_size=2, max_size=5),
    st.lists(st.floats(-1, 1), min_size=30, max_size=30),
)
def test_no_correlation_of_the_classes_makes_the_mean_wider(halves: list[float], loads: list[float]) -> None:
    """One site: the exact half-width under any correlation matrix is at most the one that is given."""
    factors = np.array(loads[: 6 * len(halves)]).reshape(len(halves), -1) + 1e-3
    factors /= np.linalg.norm(factors, axis=1, keepdims=True)
    weighted = np.array(halves) / len(halves)
    exact = math.sqrt(weighted @ (factors @ factors.T) @ weighted)
    found = interval_of_mean({"a": {str(i): score(0.5, half) for i, half in enumerate(halves)}})
    assert found is not None
    assert (found[1] - found[0]) / 2 >= exact - 1e-12


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    """Two sites of 60 and 40 normal scores whose true AUROC is .7602 (a shift of 1 SD)."""
    rng, truth, hits = np.random.default_rng(1), 0.7602, 0
    for draw in range(120):
        scores = []
        for n in (30, 20):
            y = np.repeat([0.0, 1.0], n)
            s = rng.normal(size=2 * n) + y
            scores.append(score_classes(("x",), y[:, None], s[:, None], bootstrap=200, seed=draw)["x"])
        low, high = interval_over_sites(scores) or (1.0, 0.0)
        hits += low <= truth <= high
    assert 0.88 <= hits / 120 <= 0.995
