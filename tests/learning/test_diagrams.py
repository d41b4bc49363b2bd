"""The curves of a class, from counts of scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import examples
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Curves, histogram
from suture.protocol.decisions import GRID, JOINED, Calibration, Decision, Operating, Rule


def curves(positives: list[float], negatives: list[float], least: int = 0) -> Curves:
    pair = [histogram(np.array(x), np.arange(len(x)), least) for x in (positives, negatives)]
    assert pair[0] is not None
    assert pair[1] is not None
    return Curves.of([(pair[0], pair[1])])


def decided(thresholds: dict[Rule, float], own: dict[Rule, float] | None = None) -> Decision:
    """By thresholds of all sites, and of one, uncalibrated."""
    return Decision(own and Operating(own, None, 0.5), Operating(thresholds, None, 0.5))


def test_four_images_by_hand() -> None:
    found = diagrams(curves([-1.03, 1.03], [-2.03, 0.53]), decided({"youden": 0.5}), "youden")
    # Growing thresholds pass -2.03 (a negative), -1.03 (a positive), 0.53 (a negative), 1.03 (a positive).
    assert found
    assert found.rates == ((1, 0), (1, 0.5), (0.5, 0.5), (0.5, 1), (0, 1), (0, 1))
    assert found.prevalence == 0.5
    # At a probability of .5 one of each lies above.
    assert found.chosen == (0.5, 0.5)
    assert [(share, n) for _, share, n in found.reliability] == [(0, 1), (1, 1), (0, 1), (1, 1)]
    # 1 / (1 + exp(2.03)) = .116, and so on; a cell is 1/16 of log-odds wide.
    assert [p for p, _, _ in found.reliability] == pytest.approx([0.116, 0.263, 0.629, 0.737], abs=0.005)


def test_reliability_is_of_calibrated_probabilities() -> None:
    shifted = Decision(None, Operating({}, Calibration(1.0, -3.0), 0.5))
    found = diagrams(curves([0.0, 0.01], [0.02, 0.03]), shifted, "youden")
    assert found
    assert found.reliability == ((pytest.approx(1 / (1 + np.exp(3)), abs=0.003), 0.5, 4),)
    assert found.chosen is None


@pytest.mark.complete
def test_joined_cells_leave_fractions_of_images_in_bins() -> None:
    rng = np.random.default_rng(1)
    for _ in range(600):
        positives, negatives = (rng.normal(mean, 1.5, rng.integers(6, 60)) for mean in (0.5, -1.5))
        found = diagrams(curves(positives.tolist(), negatives.tolist(), least=5), decided({}), "youden")
        if found is None:
            assert min(len(positives), len(negatives)) < 10
            continue
        assert all(n > 0 for *_, n in found.reliability)
        assert len(found.rates) <= 60


scores = st.lists(st.floats(-8, 8), min_size=1, max_size=30)


@pytest.mark.complete
@given(scores, scores)
def test_curves_fall_and_bins_hold_every_image(positives: list[float], negatives: list[float]) -> None:
    found = diagrams(curves(positives, negatives), decided({"youden": 0.3}), "youden")
    assert found
    sensitivity, specificity = np.array(found.rates).T
    assert (np.diff(sensitivity) <= 0).all()
    assert (np.diff(specificity) >= 0).all()
    assert sum(n for *_, n in found.reliability) == len(positives) + len(negatives)


def test_a_site_has_its_own_point_and_that_of_all_sites() -> None:
    found = diagrams(
        curves([-1.03, 1.03], [-2.03, 0.53, -3.0]), decided({"youden": 0.5}, {"youden": 0.1}), "youden"
    )
    assert found
    # log(.1 / .9) = -2.2: all but one negative lie above.
    assert (found.chosen, found.own, found.images) == ((0.5, 0.6667), (1, 0.3333), (2, 3))


def test_counts_of_a_single_cell_show_no_curve() -> None:
    """Seven positives and a `min_count` of 5 are one cell: nothing is known of where they lie."""
    few, many = np.linspace(-1, 1, 7).tolist(), np.linspace(-3, 1, 40).tolist()
    assert diagrams(curves(few, many, 5), decided({"youden": 0.5}), "youden") is None
    assert diagrams(curves(many, few, 5), decided({"youden": 0.5}), "youden") is None
    assert diagrams(curves(many, many, 5), decided({"youden": 0.5}), "youden")


def shares_above(counts: np.ndarray) -> list[float]:
    """The share of the images above each edge, one edge after the other: within a cell they lie evenly."""
    ends = [k for k, n in enumerate(counts) if n != JOINED]
    at = [float(GRID[k]) for k in ends[:-1]]
    before = at[0] - (at[1] - at[0] if len(at) > 1 else 1 / 16)
    after = at[-1] + (at[-1] - at[-2] if len(at) > 1 else 1 / 16)
    places, total, found = [before, *at, after], int(counts[ends].sum()), []
    for edge in GRID:
        below = 0.0
        for low, high, k in zip(places[:-1], places[1:], ends, strict=True):
            below += counts[k] * min(max((edge - low) / (high - low), 0.0), 1.0)
        found.append(1 - below / total)
    return found


@pytest.mark.complete
@examples(30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 5]), st.integers(12, 60), st.integers(20, 90))
def test_a_drawn_point_lies_on_the_curve_of_the_counts(seed: int, least: int, ones: int, zeros: int) -> None:
    rng = np.random.default_rng(seed)
    counts = [histogram(rng.normal(mean, 2, n), np.arange(n), least) for mean, n in ((1, ones), (-1, zeros))]
    assert counts[0] is not None
    assert counts[1] is not None
    found = diagrams(Curves.of([(counts[0], counts[1])]), decided({"youden": 0.4}), "youden")
    assert found
    sensitivity, alarms = (np.array(shares_above(row)) for row in (counts[0], counts[1]))
    for sens, spec in found.rates[1:-1]:
        assert np.maximum(np.abs(sensitivity - sens), np.abs(1 - alarms - spec)).min() <= 1e-4
    assert (found.rates[0], found.rates[-1]) == ((1, 0), (0, 1))
    assert found.chosen == pytest.approx(
        [np.interp(np.log(0.4 / 0.6), GRID, rate) for rate in (sensitivity, 1 - alarms)], abs=1e-4
    )


@pytest.mark.complete
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(5, 60), st.integers(5, 90)), min_size=1, max_size=4
    ),
    st.sampled_from([0, 5]),
    st.floats(0.05, 0.95),
)
def test_the_sites_add_up_to_the_curve_of_all(
    sites: list[tuple[int, int, int]], least: int, threshold: float
) -> None:
    """At each edge, and at a threshold, the images called positive at the sites are those of the whole."""
    pairs = []
    for seed, ones, zeros in sites:
        rng = np.random.default_rng(seed)
        rows = [histogram(rng.normal(m, 2, n), np.arange(n), least) for m, n in ((1, ones), (-1, zeros))]
        assert rows[0] is not None
        assert rows[1] is not None
        pairs.append((rows[0], rows[1]))
    whole, parts = Curves.of(pairs), [Curves.of([pair]) for pair in pairs]
    for kind in ("positives", "negatives"):
        below = np.sum([getattr(one, kind).below for one in parts], axis=0)
        np.testing.assert_allclose(below, getattr(whole, kind).below, atol=1e-9)
    assert len(whole.sensitivity()) == len(GRID)
    drawn = [diagrams(one, decided({"youden": threshold}), "youden") for one in (whole, *parts)]
    if not all(drawn):
        return
    everyone, *each = [(one.chosen, one.images) for one in drawn if one and one.chosen and one.images]
    for kind in (0, 1):
        called = sum(rates[kind] * n[kind] for rates, n in each)
        assert called == pytest.approx(everyone[0][kind] * everyone[1][kind], abs=1e-4 * everyone[1][kind])
