"""Cross-validated AUROC: influences by hand, the difference of two methods, the coverage of its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from suture.core.errors import DataError
from suture_papers.studies.inference import Measured, difference, influence, recall_influence


def test_influences_of_four_images_by_hand() -> None:
    """Positives .8 and .4, negatives .5 and .1: shares below 1 and .5, so an AUROC of .75."""
    y, score = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0.8, 0.4, 0.5, 0.1])

    found = influence(y, score, np.array([0, 1, 1, 2]), 3)

    assert found is not None
    area, moved = found
    assert area == 0.75
    # Positives move it by (1 - .75) / 2 and (.5 - .75) / 2; negatives, with .5 and 1 above, by -.125, .125.
    assert moved.tolist() == [0.125, -0.25, 0.125]


def test_unknown_labels_and_ties_count_as_in_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y, score = rng.integers(0, 2, 300).astype(float), rng.integers(0, 9, 300).astype(float)
    y[::7] = np.nan
    known = ~np.isnan(y)

    found = influence(y, score, rng.integers(0, 40, 300), 40)

    assert found is not None
    assert found[0] == pytest.approx(roc_auc_score(y[known], score[known]), abs=1e-12)
    assert found[1].sum() == pytest.approx(0.0, abs=1e-12)


def test_a_class_without_positives_has_no_influence() -> None:
    assert influence([0.0, math.nan], [0.1, 0.2], np.array([0, 1]), 2) is None
    assert recall_influence([0.0, 0.0], np.array([1.0, 0.0]), np.array([0, 1]), 2) is None


def test_recall_of_three_images_by_hand() -> None:
    found = recall_influence([1.0, 1.0, 0.0], np.array([1.0, 0.0, 1.0]), np.array([0, 1, 1]), 2)

    assert found is not None
    assert (found[0], found[1].tolist()) == (0.5, [0.25, -0.25])


def test_difference_of_two_folds_by_hand() -> None:
    """Two folds, two seeds: variances of patients and of seeds add up."""
    zero = np.zeros(2)

    def runs(*areas: float, moved: float) -> list[Measured]:
        return [Measured(area, np.array([moved, -moved]), "1" if moved else "2") for area in areas]

    a = {1: runs(0.71, 0.73, moved=0.02), 2: runs(0.75, 0.75, moved=0.0)}
    b = {1: [Measured(0.7, zero, "1")] * 2, 2: [Measured(0.7, zero, "2")] * 2}

    found = difference(a, b)

    assert found.folds == pytest.approx((0.02, 0.05))
    assert found.value == pytest.approx(0.035)
    # Patients: (2 * .02**2) * 2/1 / 2**2; seeds: (.01**2 + .01**2) over 2 degrees, over 4 runs.
    patients, seeds = 0.0004, 0.0001 / 4
    assert found.error == pytest.approx(math.sqrt(patients + seeds))
    assert found.low == pytest.approx(0.035 - 1.9602 * found.error, abs=1e-4)  # 578 degrees of freedom


def test_equal_runs_do_not_differ() -> None:
    same = {1: [Measured(0.7, np.array([0.1, -0.1]), "1")] * 2}

    found = difference(same, same)

    assert (found.value, found.p, found.error) == (0.0, 1.0, 0.0)


def test_other_test_patients_or_those_of_another_fold_are_refused() -> None:
    own, other = ([Measured(0.7, np.zeros(3), test)] * 2 for test in ("own", "other"))

    with pytest.raises(DataError, match="fold 1"):
        difference({1: own}, {1: other})
    with pytest.raises(DataError, match="fold 2"):
        difference({1: own, 2: own}, {1: own, 2: own})


def test_a_row_that_learned_too_few_classes_has_no_difference() -> None:
    a, b = ({1: [Measured(area, np.zeros(2), "1")] * 2} for area in (math.nan, 0.7))

    assert math.isnan(difference(a, b).value)


@pytest.mark.complete
def test_intervals_cover_the_true_difference() -> None:
    """Three classes, patients of one to five images, models that differ by fold and seed: 93 to 97 %."""
    rng, covered, times = np.random.default_rng(3), 0, 600
    rates, spread = (0.25, 0.08, 0.03), 0.08

    def measure(skill: float, y: np.ndarray, shared: np.ndarray, patient: np.ndarray, fold: int) -> Measured:
        skills = skill + rng.normal(0, spread, len(rates))
        score = skills * y + 0.8 * shared + 0.6 * rng.normal(size=y.shape)
        each = [influence(y[:, c], score[:, c], patient, 300) for c in range(len(rates))]
        found = [one for one in each if one is not None]
        return Measured(
            float(np.mean([a for a, _ in found])), np.mean([m for _, m in found], axis=0), str(fold)
        )

    def true_area(skill: float) -> float:
        return float(norm.cdf(skill / math.sqrt(2) / math.sqrt(1 + spread**2 / 2)))

    for _ in range(times):
        a: dict[int, list[Measured]] = {}
        b: dict[int, list[Measured]] = {}
        truth = []
        for fold in range(5):
            patient = np.repeat(np.arange(300), rng.integers(1, 6, 300))
            ill = rng.normal(size=(300, 3)) > norm.ppf(1 - np.array(rates))
            noisy = rng.random((len(patient), 3)) < rates
            y = np.where(rng.random((len(patient), 3)) < 0.2, noisy, ill[patient]).astype(float)
            own = rng.normal(size=(300, 3))[patient]
            shared = 0.6 * own + 0.8 * rng.normal(size=y.shape)
            better, worse = 0.9 + 0.05 * fold, 0.7 + 0.05 * fold
            a[fold] = [measure(better, y, shared, patient, fold) for _ in range(2)]
            b[fold] = [measure(worse, y, shared, patient, fold) for _ in range(2)]
            truth.append(true_area(better) - true_area(worse))
        found = difference(a, b)
        covered += found.low <= np.mean(truth) <= found.high

    assert 0.93 <= covered / times <= 0.97
