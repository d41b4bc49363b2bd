"""Counts of scores: what leaves a site, and what is read out of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import examples
from suture.learning.metrics import Curve, Curves, histogram
from suture.protocol.decisions import CELLS, GRID, JOINED
from suture.protocol.egress import near


def everyone(n: int) -> np.ndarray:
    return np.arange(n)


def test_every_image_is_counted_in_its_cell() -> None:
    """The edges are -12, -11.9375, ..., 12; an image on an edge belongs to the cell above it."""
    counts = histogram(np.array([-30.0, -12.0, -11.95, 0.0, 0.05, 40.0]), everyone(6), min_count=0)
    assert counts is not None
    assert {k: n for k, n in enumerate(counts.tolist()) if n} == {0: 1, 1: 2, 193: 2, 385: 1}


def test_cells_are_joined_until_each_has_enough_patients() -> None:
    """Three images below -.5, two of them of one patient; two in [-.5, .125), and three above."""
    scores = np.array([-1.0, -0.9, -0.6, 0.0, 0.1, 0.3, 0.4, 2.0])
    patients = np.array([0, 0, 1, 2, 3, 4, 5, 6])
    counts = histogram(scores, patients, min_count=2)
    assert counts is not None
    ends = {k: n for k, n in enumerate(counts.tolist()) if n != JOINED}
    assert [GRID[cell] for cell in list(ends)[:-1]] == [-0.5625, 0.125]
    assert list(ends.values()) == [3, 2, 3]


def test_a_class_of_few_patients_is_withheld() -> None:
    scores = np.linspace(-1, 1, 40)
    assert histogram(scores, everyone(40) % 4, min_count=5) is None
    assert histogram(scores, everyone(40) % 5, min_count=5) is not None
    assert histogram(np.empty(0), everyone(0), min_count=0) is None
    assert histogram(np.empty(0), everyone(0), min_count=5) is None


@st.composite
def limits(draw: st.DrawFn) -> tuple[int, int]:
    """Any `min_count` and `round_counts` that a site may have together, but for none."""
    least = draw(st.integers(0, 9))
    return least, draw(st.integers(1 if least else 2, max(2, 2 * least)))


@pytest.mark.complete
@examples(200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 30), limits())
def test_no_count_is_of_fewer_patients_than_the_limit(
    seed: int, n: int, people: int, limits: tuple[int, int]
) -> None:
    """And none is 0: a cell that shows no image holds none."""
    rng = np.random.default_rng(seed)
    scores, patients = rng.normal(0, 4, n), rng.integers(people, size=n)
    least, step = limits
    counts = histogram(scores, patients, least, step)
    if counts is None:
        assert len(set(patients)) < least
        return
    ends = np.flatnonzero(counts != JOINED)
    assert ends[-1] == CELLS - 1
    assert (counts[ends] >= step).all()
    assert (counts[ends] % step == 0).all()
    assert counts[ends].sum() == near(n, step)
    bounds = [-math.inf, *GRID[ends[:-1]], math.inf]
    for low, high, so_far in zip(bounds[:-1], bounds[1:], np.cumsum(counts[ends]), strict=True):
        inside = (scores >= low) & (scores < high)
        assert len(set(patients[inside])) >= least
        assert inside.sum() >= step or len(ends) == 1
        assert abs((scores < high).sum() - so_far) <= step / 2


def test_rounded_cells_lie_on_both_sides_of_the_number_of_images() -> None:
    """Each of 8 cells of 5 images, rounded by itself to tens, would show 10 or none: 80 or 0 images of 40."""
    scores = np.repeat(np.arange(8) - 3.5, 5)
    counts = histogram(scores, everyone(40), 5, 10)
    assert counts is not None
    assert counts[counts != JOINED].tolist() == [10, 10, 10, 10]


def test_one_image_changes_no_more_than_the_cells_beside_it() -> None:
    """A canary: its own score is in no release; any score of the same cell gives the same counts."""
    others = np.random.default_rng(0).normal(0, 1, 200)
    releases = {
        histogram(np.append(others, score), everyone(201), min_count=5).tobytes()  # type: ignore[union-attr]
        for score in np.linspace(2.9375, 3.0, 20, endpoint=False)
    }
    assert len(releases) == 1


def test_images_lie_evenly_within_a_cell() -> None:
    """Four images below the second edge, eight up to the fourth, of which half lie below the third."""
    row = np.full(CELLS, JOINED)
    row[1], row[3], row[-1] = 4, 8, 12
    curve = Curve.of([row])
    assert (curve.total, curve.known) == (24, (GRID[1], GRID[3]))
    assert curve.below[[1, 2, 3]].tolist() == [4.0, 8.0, 12.0]
    assert curve.quantile(8 / 24) == pytest.approx(GRID[2], abs=1e-6)
    assert curve.quantile(1 / 24) is None
    assert curve.quantile(20 / 24) is None


def test_sites_add_up() -> None:
    rng = np.random.default_rng(1)
    sites = [rng.normal(m, 1, 50) for m in (-1, 0, 2)]
    rows = [histogram(one, everyone(50), 0) for one in sites]
    together = histogram(np.concatenate(sites), everyone(150), 0)
    assert all(row is not None for row in rows)
    assert together is not None
    curve, whole = Curve.of([row for row in rows if row is not None]), Curve.of([together])
    np.testing.assert_allclose(curve.below, whole.below, atol=1e-12)
    assert (curve.total, curve.known) == (whole.total, whole.known) == (150, (-12, 12))


def test_rates_are_those_of_the_images() -> None:
    positives, negatives = np.array([-1.0, 1.0, 1.0, 1.0]), np.array([-1.0, -1.0, 1.0])
    rows = [histogram(one, everyone(len(one)), 0) for one in (positives, negatives)]
    assert rows[0] is not None
    assert rows[1] is not None
    curves = Curves.of([(rows[0], rows[1])])
    at = GRID.tolist().index(0.0)
    assert curves.sensitivity()[at] == 3 / 4
    assert curves.specificity()[at] == 2 / 3
    assert curves.prevalence == 4 / 7
    assert curves.defined
