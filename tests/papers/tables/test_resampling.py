"""The metrics of a run on draws of its test patients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture.learning.metrics import bootstrap_mean
from suture_papers.tables.resampling import DRAWS, TestScores, draw, weighted_ap


def test_average_precision_by_hand() -> None:
    """Positives at ranks 1 and 3 of 4: (1/1 + 2/3) / 2; two draws of the second positive: 1/3 + 2/3 x 3/4."""
    truth, score = np.array([True, False, True, False]), np.array([0.9, 0.8, 0.7, 0.1])
    weights = np.array([[1.0, 1, 1, 1], [1, 1, 2, 1], [0, 1, 0, 1]])
    assert weighted_ap(weights, truth, score)[:2] == pytest.approx([5 / 6, 1 / 3 + 2 / 3 * 3 / 4])
    assert math.isnan(weighted_ap(weights, truth, score)[2])


@pytest.mark.complete
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=20).filter(
        lambda rows: any(y and w for y, _, w in rows)
    )
)
def test_it_is_that_of_scikit_learn(rows: list[tuple[bool, int, int]]) -> None:
    from sklearn.metrics import average_precision_score

    truth, score, weight = (np.array(column) for column in zip(*rows, strict=True))
    known = average_precision_score(truth, score, sample_weight=weight.astype(float))
    assert weighted_ap(weight[None].astype(float), truth, score.astype(float))[0] == pytest.approx(known)


def scores(seed: int = 0, n: int = 60) -> TestScores:
    rng = np.random.default_rng(seed)
    y = (rng.random((n, 3)) < 0.4).astype(float)
    patients = tuple(str(i // 2) for i in range(n))
    return TestScores(y, ("A", "B", "C"), "multilabel", patients, (rng.normal(size=(n, 3)) + y,))


def test_the_spread_of_the_draws_is_that_of_the_bootstrap_over_patients() -> None:
    of = scores()
    found = draw(of, "auroc", draws=2000)
    assert len(draw(of, "auroc")["draws"]) == DRAWS
    interval = bootstrap_mean(of.y, of.scores[0], of.patients, n=2000)
    assert np.quantile(found["draws"], [0.025, 0.975]) == pytest.approx(interval, abs=0.01)


def test_rows_with_one_test_set_have_the_same_draws() -> None:
    """A model that scores as another plus a constant has the same AUROC in every draw, not in others'."""
    of = scores()
    same, others = replace(of, scores=(of.scores[0] + 7,)), tuple(f"other {name}" for name in of.patients)
    assert draw(of, "auroc") == draw(same, "auroc")
    assert draw(of, "auroc")["draws"] != draw(replace(of, patients=others), "auroc")["draws"]


def test_a_patient_is_drawn_as_often_in_the_test_set_of_another_seed() -> None:
    """Whose order and other patients are different: those whom both have give the same draws."""
    of = scores()
    order = np.random.default_rng(1).permutation(len(of.y))
    turned = replace(
        of, y=of.y[order], scores=(of.scores[0][order],), patients=tuple(of.patients[i] for i in order)
    )
    assert draw(of, "auroc") == draw(turned, "auroc")
    unknown = replace(of, y=np.concatenate([of.y, np.full((4, 3), math.nan)]))
    more = replace(
        unknown,
        scores=(np.concatenate([of.scores[0], np.zeros((4, 3))]),),
        patients=(*of.patients, *"wxyz"),
    )
    assert draw(of, "auroc") == draw(more, "auroc")


def test_a_class_has_the_mean_of_the_models_that_know_it() -> None:
    of = scores()
    first, second = of.scores[0].copy(), -of.scores[0]
    first[:, 0] = math.nan  # only the second model knows A
    both = replace(of, scores=(first, second))
    a = 1 - draw(replace(of, labels=("A",), y=of.y[:, :1], scores=(of.scores[0][:, :1],)), "auroc")["value"]
    # Of B and C the two models have areas that add up to 1.
    assert draw(both, "auroc")["value"] == pytest.approx((a + 0.5 + 0.5) / 3, abs=1e-5)
    neither = replace(of, scores=(first,))
    assert draw(neither, "auroc")["value"] is None
    assert set(draw(neither, "auroc")["draws"]) == {None}


def test_balanced_accuracy_is_that_of_scikit_learn_and_for_multiclass_labels_only() -> None:
    from sklearn.metrics import balanced_accuracy_score

    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, 60)
    of = replace(scores(), y=np.eye(3)[truth], label_type="multiclass")
    known = balanced_accuracy_score(truth, of.scores[0].argmax(axis=1))
    assert draw(of, "balanced_accuracy")["value"] == pytest.approx(known, abs=1e-6)
    with pytest.raises(DataError, match="multiclass"):
        draw(scores(), "balanced_accuracy")
