import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture.learning.metrics import class_recalls, multiclass_metrics

NOTHING = dict.fromkeys(("accuracy", "balanced_accuracy", "precision", "recall", "f1"))
NAN = math.nan


def test_four_images_by_hand() -> None:
    y = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    scores = [[3, 1, 2], [1, 3, 2], [1, 3, 2], [1, 2, 3]]  # called 0, 1, 1 and 2
    found = multiclass_metrics(y, scores)
    assert found["accuracy"] == 0.5
    assert found["precision"] == pytest.approx((1 + 1 / 2) / 2)  # class 2 does not occur: no mean is over it
    assert found["recall"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found["f1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert class_recalls(y, scores) == [1 / 2, 1 / 2, None]


def test_the_balanced_accuracy_counts_every_class_once() -> None:
    """Of 8 images of the first class 6 are found, of the second the only one, of the third none of 3."""
    y = np.eye(4)[[0] * 8 + [1] + [2] * 3]
    scores = np.eye(4)[[0] * 6 + [3] * 2 + [1] + [0] * 3]
    found = multiclass_metrics(y, scores)
    assert found["accuracy"] == pytest.approx(7 / 12)
    assert found["balanced_accuracy"] == found["recall"] == pytest.approx((6 / 8 + 1 + 0) / 3)
    assert class_recalls(y, scores) == [0.75, 1.0, 0.0, None]


def test_a_class_never_predicted_counts_as_0() -> None:
    assert multiclass_metrics([[1, 0], [0, 1]], [[1, 0], [1, 0]]) == {
        "accuracy": 0.5,
        "balanced_accuracy": pytest.approx(0.5),
        "precision": pytest.approx(0.25),
        "recall": pytest.approx(0.5),
        "f1": pytest.approx(1 / 3),
    }


def test_rows_without_a_label_are_left_out() -> None:
    y = [[1, NAN], [0, 0], [NAN, NAN], [0, NAN]]
    assert multiclass_metrics(y, [[1, 0], [1, 0], [0, 1], [0, 1]]) == dict.fromkeys(NOTHING, 1.0)


def test_the_first_of_equal_scores_is_predicted() -> None:
    assert multiclass_metrics([[1, 0]], [[0.5, 0.5]])["accuracy"] == 1.0
    assert multiclass_metrics([[0, 1]], [[0.5, 0.5]])["accuracy"] == 0.0


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (2, 0), (0, 0)])
def test_nothing_labelled_is_undefined(shape: tuple[int, int]) -> None:
    assert multiclass_metrics(np.zeros(shape), np.zeros(shape)) == NOTHING
    assert class_recalls(np.zeros(shape), np.zeros(shape)) == [None] * shape[1]


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_it_agrees_with_scikit_learn(classes: int, n: int, seed: int) -> None:
    from sklearn.metrics import (
        accuracy_score,
        balanced_accuracy_score,
        f1_score,
        precision_score,
        recall_score,
    )

    rng = np.random.default_rng(seed)
    truth, scores = rng.integers(classes, size=n), rng.normal(size=(n, classes))
    y = np.eye(classes)[truth]
    y[(y == 0) & (rng.random(y.shape) < 0.3)] = NAN
    guess = scores.argmax(axis=1)
    macro = {"labels": np.unique(truth), "average": "macro", "zero_division": 0}
    expected = {
        "accuracy": accuracy_score(truth, guess),
        "balanced_accuracy": balanced_accuracy_score(truth, guess),
        "precision": precision_score(truth, guess, **macro),
        "recall": recall_score(truth, guess, **macro),
        "f1": f1_score(truth, guess, **macro),
    }
    assert multiclass_metrics(y, scores) == pytest.approx(expected)
    # A monotone map of the scores leaves the predictions as they are.
    assert multiclass_metrics(y, 1 / (1 + np.exp(-scores))) == pytest.approx(expected)
    defined = [recall for recall in class_recalls(y, scores) if recall is not None]
    assert np.mean(defined) == pytest.approx(expected["balanced_accuracy"])


@pytest.mark.parametrize(
    ("y", "scores", "problem"),
    [
        ([[1, 0]], [[1, 0, 0]], "must both be"),
        ([1, 0], [1, 0], "must both be"),
        ([[0, 1], [1, 1]], [[1, 0], [1, 0]], "row 1 has 2 labels at once"),
        ([[1, 0]], [[NAN, 0]], "score of row 0 is not finite"),
        ([[1, 0]], [[math.inf, 0]], "score of row 0 is not finite"),
        ([[2, 0]], [[1, 0]], "label 2 is not 1, 0 or NaN"),
    ],
)
def test_what_cannot_be_used_is_refused(y: list, scores: list, problem: str) -> None:
    for figures in (multiclass_metrics, class_recalls):
        with pytest.raises(DataError, match=problem):
            figures(y, scores)
