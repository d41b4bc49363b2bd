import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from suture.core.labels import LabelSet
from suture.data.table import Table
from suture_results.cooccurrence import Frequency, cooccurrence, frequencies

NAN = math.nan
NAMES = ("Edema", "Hernia", "Mass")
Y = [[1, 0, 1], [1, NAN, 0], [0, NAN, 1], [1, 0, NAN], [NAN, 0, 1]]


def table(y: object, patients: tuple[str, ...] | None = None) -> Table:
    labels = np.asarray(y, dtype=np.float32)
    images = tuple(f"{i}.png" for i in range(len(labels)))
    return Table(LabelSet(NAMES), images, patients or images, labels, ("train",) * len(images), Path("."))


def test_every_image_is_counted_once_for_each_class() -> None:
    assert frequencies(table(Y)) == {
        "Edema": Frequency(3, 1, 1),
        "Hernia": Frequency(0, 3, 2),
        "Mass": Frequency(3, 1, 1),
    }


def test_the_share_is_of_the_labelled_images() -> None:
    assert Frequency(3, 1, 6).share == 0.75
    assert math.isnan(Frequency(0, 0, 4).share)


def test_cooccurrence_by_hand() -> None:
    # Of the three images with Edema two know of Hernia (neither has it), and two of Mass (one has it). Of
    # the three with Mass two know of Edema (one has it), and two of Hernia. None has Hernia.
    expected = [[1, 0, 1 / 2], [NAN, NAN, NAN], [1 / 2, 0, 1]]
    np.testing.assert_allclose(cooccurrence(table(Y)), expected)


def test_an_entry_without_a_known_pair_is_undefined() -> None:
    found = cooccurrence(table([[1, NAN, 0], [NAN, 1, 0]]))
    np.testing.assert_array_equal(found, [[1, NAN, 0], [NAN, 1, 0], [NAN, NAN, NAN]])


def test_patients_have_the_classes_of_all_their_images() -> None:
    # p: Edema, no Hernia, Mass. q: Edema, Hernia unknown, no Mass.
    found = cooccurrence(
        table([[1, 0, 0], [0, NAN, 1], [1, NAN, 0]], patients=("p", "p", "q")), per="patient"
    )
    np.testing.assert_array_equal(found, [[1, 0, 0.5], [NAN, NAN, NAN], [1, 0, 1]])


def test_a_table_without_images_has_no_shares() -> None:
    empty = table(np.empty((0, 3)))
    assert frequencies(empty)["Edema"] == Frequency(0, 0, 0)
    assert np.isnan(cooccurrence(empty)).all()
    assert np.isnan(cooccurrence(empty, per="patient")).all()


LABELS = arrays(np.float32, st.tuples(st.integers(0, 12), st.just(3)), elements=st.sampled_from([0, 1, NAN]))


@given(LABELS)
def test_entries_are_those_of_a_loop(y: np.ndarray) -> None:
    found = cooccurrence(table(y))
    for i in range(3):
        for j in range(3):
            rows = [row for row in y if row[i] == 1 and not math.isnan(row[j])]
            expected = sum(row[j] == 1 for row in rows) / len(rows) if rows else NAN
            assert found[i, j] == pytest.approx(expected, nan_ok=True)


@given(LABELS)
def test_of_one_image_each_patients_and_images_are_the_same(y: np.ndarray) -> None:
    np.testing.assert_array_equal(cooccurrence(table(y)), cooccurrence(table(y), per="patient"))
