"""Conformal sets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from suture.learning.decisions import conformal_set
from suture.learning.score_counts import Curves, histogram
from suture.protocol.decisions import GRID

COVERAGE = st.sampled_from([0.5, 0.75, 0.8, 0.9, 0.95, 0.99])


def curves(*sites: tuple[np.ndarray, np.ndarray], min_count: int = 0, round_counts: int = 1) -> Curves:
    """Of the positives and negatives of each site."""
    rows = []
    for both in sites:
        one, other = (histogram(x, np.arange(len(x)), min_count, round_counts) for x in both)
        if one is not None and other is not None:
            rows.append((one, other))
    return Curves.of(rows)


def covered(
    scores: np.ndarray, coverage: float, cut: Sequence[int] = (), **limits: int
) -> tuple[float, float]:
    """The share of n + 1 images, positive ones and then negative ones, that the sets of the others cover.

    Exact, by leaving out each of them in turn: a new image is any of them with the same probability.

    Args:
        cut: where the scores are divided among sites.
    """
    hits = np.zeros(2)
    for i in range(len(scores)):
        sites = [np.delete(part, np.flatnonzero(part == i)) for part in np.split(np.arange(len(scores)), cut)]
        found = curves(*((scores[part], scores[part]) for part in sites if len(part)), **limits)
        low, high = conformal_set(found, coverage)
        hits += expit(scores[i]) >= low, expit(scores[i]) <= high
    return tuple(hits / len(scores))


@pytest.mark.parametrize(
    ("n", "coverage", "rank"),
    [(20, 0.9, 2), (20, 0.95, 1), (19, 0.9, 2), (9, 0.9, 1), (8, 0.9, 0), (99, 0.9, 10)],
)
def test_by_hand(n: int, coverage: float, rank: int) -> None:
    """Of 20 images asked for 90 % the second lowest score is the bound: 19 of 21 are covered, .905."""
    scores = GRID[100] + np.arange(n) / 8 + 0.03  # each in a cell of its own that begins .03 lower
    low, high = conformal_set(curves((scores, scores)), coverage)
    if not rank:
        assert (low, high) == (0.0, 1.0)
        return
    assert low == pytest.approx(expit(scores[rank - 1] - 0.03), abs=1e-12)
    assert high == pytest.approx(expit(scores[-rank] - 0.03 + 1 / 16), abs=1e-12)
    more = np.append(scores, scores[-1] + 1 / 8)
    assert covered(more, coverage) == pytest.approx([1 - rank / (n + 1)] * 2)


@given(st.lists(st.integers(1, 380), min_size=3, max_size=30, unique=True), COVERAGE)
def test_the_coverage_is_what_was_asked_and_at_most_one_image_more(cells: list[int], coverage: float) -> None:
    """Scores in cells of their own, as continuous scores are to a fine grid."""
    n = len(cells) - 1
    for share in covered(GRID[cells] + 0.03, coverage):
        assert share == pytest.approx(1 - math.floor((n + 1) * (1 - coverage) + 1e-9) / (n + 1))
        assert coverage - 1e-9 <= share < coverage + 1 / (n + 1) - 1e-9


@pytest.mark.complete
@given(
    st.lists(st.integers(1, 12), min_size=6, max_size=30),
    COVERAGE,
    st.lists(st.integers(0, 30), max_size=2),
    st.integers(0, 3),
)
def test_ties_cells_and_sites_never_cover_less(
    cells: list[int], coverage: float, cut: list[int], least: int
) -> None:
    """Equal scores, several in a cell or in joined ones, at up to three sites."""
    scores = GRID[cells] + np.arange(len(cells)) % 3 / 64
    inside = sorted(min(c, len(cells)) for c in cut)
    assert min(covered(scores, coverage, inside)) >= coverage - 1e-9
    if not cut:
        assert min(covered(scores, coverage, min_count=least)) >= coverage - 1e-9


@pytest.mark.complete
@pytest.mark.parametrize("least", [0, 5])
@pytest.mark.parametrize(("n", "coverage"), [(20, 0.9), (500, 0.9), (20, 0.95)])
def test_the_coverage_of_fresh_images(n: int, coverage: float, least: int) -> None:
    """Over many draws. A cell is 1/16 wide, which is at most .025 of the images here."""
    rng, found = np.random.default_rng(0), []
    for _ in range(300 if n < 100 else 60):
        low, high = conformal_set(
            curves((rng.normal(1, 1, n), rng.normal(-1, 1, n)), min_count=least), coverage
        )
        fresh = rng.normal(1, 1, 4_000), rng.normal(-1, 1, 4_000)
        found.append([(expit(fresh[0]) >= low).mean(), (expit(fresh[1]) <= high).mean()])
    for share in np.mean(found, axis=0):
        assert coverage - 0.005 < share
        if not least:
            assert share < coverage + 1 / (n + 1) + 0.01
        elif n == 500:
            assert share < coverage + 0.02


def test_what_the_counts_do_not_show_is_always_in_the_set() -> None:
    rng = np.random.default_rng(0)
    found = curves((rng.normal(1, 1, 40), rng.normal(-1, 1, 400)), min_count=5)
    low, high = conformal_set(found, 0.9)
    assert low == 0.0
    assert high < 1.0
