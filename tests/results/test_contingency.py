import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError, LabelError
from suture.core.vocabulary import read_word_list
from suture_results.cooccurrence import RELATED, contingency, youden_thresholds

NAN = math.nan
LABELS = ("Mass", "Edema", "Lung Lesion")
SCORES = [
    [0.9, 0.1, 0.8],
    [0.5, 0.1, 0.3],  # 0.5 is at the threshold of Mass
    [0.7, 0.1, 0.6],
    [0.2, 0.9, 0.9],
    [0.1, 0.9, 0.2],
    [0.4, 0.9, 0.1],
]
THRESHOLDS = {"Mass": 0.5, "Edema": NAN, "Lung Lesion": 0.55}


def test_the_papers_pairs_are_in_the_vocabulary() -> None:
    assert all(name in read_word_list("cxr-lt") for pair in RELATED for name in pair)


def test_the_matrix_by_hand() -> None:
    found = contingency(LABELS, SCORES, THRESHOLDS, "Mass", "Lung Lesion")
    assert found.counts == ((2, 1), (1, 2))
    assert found.second_given_first == pytest.approx(2 / 3)
    assert found.first_given_second == pytest.approx(2 / 3)
    assert found.why == ""


def test_the_conditions_are_not_symmetric() -> None:
    found = contingency(LABELS, SCORES, {"Mass": 0.6, "Lung Lesion": 0.25}, "Mass", "Lung Lesion")
    assert found.counts == ((2, 2), (0, 2))
    assert (found.second_given_first, found.first_given_second) == (1.0, 0.5)


def test_a_class_that_is_never_predicted_conditions_nothing() -> None:
    found = contingency(LABELS, SCORES, {"Mass": 2.0, "Lung Lesion": 0.55}, "Mass", "Lung Lesion")
    assert found.counts == ((3, 3), (0, 0))
    assert math.isnan(found.second_given_first)
    assert found.first_given_second == 0
    assert found.why == "never predicted: Mass"


def test_without_a_threshold_there_are_no_counts() -> None:
    found = contingency(LABELS, SCORES, THRESHOLDS, "Mass", "Edema")
    assert all(math.isnan(n) for row in found.counts for n in row)
    assert math.isnan(found.second_given_first)
    assert math.isnan(found.first_given_second)
    assert "Edema" in found.why


def test_no_image_is_no_prediction() -> None:
    found = contingency(LABELS, np.empty((0, 3)), THRESHOLDS, "Mass", "Lung Lesion")
    assert found.counts == ((0, 0), (0, 0))
    assert math.isnan(found.second_given_first)


def test_thresholds_are_youdens() -> None:
    y = [[0, NAN, 1], [0, 0, 1], [1, 0, NAN], [1, NAN, 1]]
    scores = [[0.1, 0.1, 0.4], [0.4, 0.2, 0.1], [0.35, 0.3, 0.2], [0.8, 0.4, 0.3]]
    found = youden_thresholds(("Mass", "Edema", "Lung Lesion"), y, scores)
    assert found["Mass"] == 0.35  # J is 1/2 here and at 0.8; the lower one misses nothing
    assert math.isnan(found["Edema"])
    assert math.isnan(found["Lung Lesion"])


def test_bad_input_is_named() -> None:
    with pytest.raises(LabelError, match="'Hernia' is not one of Mass, Edema, Lung Lesion"):
        contingency(LABELS, SCORES, THRESHOLDS, "Mass", "Hernia")
    with pytest.raises(DataError, match="'Mass': the score of row 1 is not finite"):
        contingency(("Mass", "Edema"), [[0.1, 0.2], [NAN, 0.2]], THRESHOLDS, "Mass", "Edema")
    with pytest.raises(DataError, match="class 'Edema': label 3"):
        youden_thresholds(("Mass", "Edema"), [[0, 3]], [[0.1, 0.2]])
    with pytest.raises(DataError, match=r"must both be \[n, 1\]"):
        youden_thresholds(("Mass",), [0, 1], [0.1, 0.2])


ROWS = st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=30)


@pytest.mark.complete
@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_the_images_changes_nothing(
    rows: list[tuple[float, float, float]], shuffler: random.Random
) -> None:
    mixed = list(rows)
    shuffler.shuffle(mixed)
    one = contingency(LABELS, rows, THRESHOLDS, "Mass", "Lung Lesion")
    assert contingency(LABELS, mixed, THRESHOLDS, "Mass", "Lung Lesion") == one
    assert sum(n for row in one.counts for n in row) == len(rows)


@given(ROWS)
def test_the_other_order_of_the_classes_turns_the_matrix(rows: list[tuple[float, float, float]]) -> None:
    one = contingency(LABELS, rows, THRESHOLDS, "Mass", "Lung Lesion")
    other = contingency(LABELS, rows, THRESHOLDS, "Lung Lesion", "Mass")
    assert other.counts == tuple(zip(*one.counts, strict=True))
    assert one.second_given_first == pytest.approx(other.first_given_second, nan_ok=True)
