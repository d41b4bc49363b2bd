"""suture.data.split: patients, never images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture.data.split import by_patient, by_rarest, strata


def column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


def test_a_patient_is_abnormal_if_any_image_is() -> None:
    abnormal, none = strata(["a", "b", "a", "c"], column([0, 0, 1, np.nan]), seed=0)
    assert set(abnormal) == {"a"}
    assert set(none) == {"b", "c"}


def test_twenty_patients_are_cut_by_stratum() -> None:
    patients = [f"p{i}" for i in range(20)]
    split = by_patient(patients, column([1.0] * 10 + [0.0] * 10))
    for half in (split[:10], split[10:]):
        assert [half.count(s) for s in ("train", "validation", "test")] == [7, 1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.0, 1.0, np.nan])), min_size=1, max_size=120),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_no_patient_is_torn_and_row_order_does_not_matter(
    rows: list[tuple[int, float]], seed: int, random: object
) -> None:
    patients = [str(p) for p, _ in rows]
    split = by_patient(patients, column([v for _, v in rows]), seed=seed)
    of = dict(zip(patients, split, strict=True))
    assert [of[p] for p in patients] == list(split)

    random.shuffle(rows)  # type: ignore[attr-defined]
    again = by_patient([str(p) for p, _ in rows], column([v for _, v in rows]), seed=seed)
    assert dict(zip((str(p) for p, _ in rows), again, strict=True)) == of


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 5))
def test_fractions_of_patients_are_within_rounding(abnormal: int, none: int, seed: int) -> None:
    n = abnormal + none
    split = by_patient([str(i) for i in range(n)], column([1.0] * abnormal + [0.0] * none), seed=seed)
    for name, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        assert abs(split.count(name) - share * n) <= 2  # at most one per stratum


def test_another_seed_gives_another_split() -> None:
    patients, y = [str(i) for i in range(50)], column([0.0] * 50)
    assert by_patient(patients, y, seed=1) == by_patient(patients, y, seed=1)
    assert by_patient(patients, y, seed=1) != by_patient(patients, y, seed=2)


@pytest.mark.parametrize(("positive", "splits"), [(1, 1), (2, 2), (3, 3), (12, 3)])
@pytest.mark.parametrize("common", [0, 40])
def test_a_rare_class_is_in_each_split_where_its_patients_are_enough(
    positive: int, splits: int, common: int
) -> None:
    patients = [str(i // 2) for i in range(150)]
    y = np.zeros((150, 2), dtype=np.float32)
    y[: 2 * positive, 0], y[: 2 * common, 1] = 1, 1
    for seed in range(20):
        split = np.array(by_rarest(patients, y, seed))
        assert len({*split[y[:, 0] == 1]}) == splits
        assert (split[::2] == split[1::2]).all()
        counts = [(split == name).sum() for name in ("train", "validation", "test")]
        assert np.abs(np.array(counts) - 150 * np.array([0.7, 0.1, 0.2])).max() <= 4
        again = by_rarest(patients[::-1], y[::-1], seed)
        assert [*again[::-1]] == [*split]


def test_fractions_must_add_up() -> None:
    with pytest.raises(DataError, match="add up to 1"):
        by_patient(["a"], column([0.0]), fractions=(0.7, 0.1, 0.1))


def test_a_patient_whose_name_ends_with_a_nul_has_a_split() -> None:
    """A damaged table: numpy's strings lose a NUL at their end."""
    assert len(by_patient(["p", "p\0", "q"], column([1, 0, 0]))) == 3
