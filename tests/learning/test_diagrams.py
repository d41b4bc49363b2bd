"""The curves of a class, from counts of scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.learning.diagrams import diagrams
from suture.learning.score_counts import Curves, histogram
from suture.protocol.decisions import Calibration, Operating


def curves(positives: list[float], negatives: list[float], least: int = 0) -> Curves:
    pair = [histogram(np.array(x), np.arange(len(x)), least) for x in (positives, negatives)]
    assert pair[0] is not None
    assert pair[1] is not None
    return Curves.of([(pair[0], pair[1])])


def test_four_images_by_hand() -> None:
    found = diagrams(curves([-1.03, 1.03], [-2.03, 0.53]), Operating({"youden": 0.5}, None, 0.5), "youden")
    # Growing thresholds pass -2.03 (a negative), -1.03 (a positive), 0.53 (a negative), 1.03 (a positive).
    assert found.rates == ((1, 0), (1, 0.5), (0.5, 0.5), (0.5, 1), (0, 1), (0, 1))
    assert found.prevalence == 0.5
    # At a probability of .5 one of each lies above.
    assert found.chosen == (0.5, 0.5)
    assert [(share, n) for _, share, n in found.reliability] == [(0, 1), (1, 1), (0, 1), (1, 1)]
    # 1 / (1 + exp(2.03)) = .116, and so on; a cell is 1/16 of log-odds wide.
    assert [p for p, _, _ in found.reliability] == pytest.approx([0.116, 0.263, 0.629, 0.737], abs=0.005)


def test_reliability_is_of_calibrated_probabilities() -> None:
    shifted = Operating({}, Calibration(1.0, -3.0), 0.5)
    found = diagrams(curves([0.0, 0.01], [0.02, 0.03]), shifted, "youden")
    assert found.reliability == ((pytest.approx(1 / (1 + np.exp(3)), abs=0.003), 0.5, 4),)
    assert found.chosen is None


def test_joined_cells_leave_fractions_of_images_in_bins() -> None:
    rng = np.random.default_rng(1)
    for _ in range(600):
        positives, negatives = (rng.normal(mean, 1.5, rng.integers(6, 60)) for mean in (0.5, -1.5))
        found = diagrams(
            curves(positives.tolist(), negatives.tolist(), least=5), Operating({}, None, 0.5), "youden"
        )
        assert all(n > 0 for *_, n in found.reliability)
        assert len(found.rates) <= 60


scores = st.lists(st.floats(-8, 8), min_size=1, max_size=30)


@given(scores, scores)
def test_curves_fall_and_bins_hold_every_image(positives: list[float], negatives: list[float]) -> None:
    found = diagrams(curves(positives, negatives), Operating({"youden": 0.3}, None, 0.5), "youden")
    sensitivity, specificity = np.array(found.rates).T
    assert (np.diff(sensitivity) <= 0).all()
    assert (np.diff(specificity) >= 0).all()
    assert sum(n for *_, n in found.reliability) == len(positives) + len(negatives)
