"""suture.data.split: patients and lesions, never images; class by class where a class is rare."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesions import ROWS, table, together
from suture.core.errors import DataError
from suture.data.readers import load_table
from suture.data.split import (
    by_patient,
    by_rarest,
    classes,
    cross_strata,
    divide,
    in_turn,
    long_tail_groups,
    strata,
    stratify,
    training_counts,
)
from suture.data.table import SPLITS
from suture_papers.fedmas.hyperkvasir import FOLDS, HyperKvasirConfig

Lesions = list[tuple[int, int]]


def column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


def test_a_patient_is_abnormal_if_any_image_is() -> None:
    abnormal, none = strata(["a", "b", "a", "c"], column([0, 0, 1, np.nan]), seed=0)
    assert (set(abnormal), set(none)) == ({"a"}, {"b", "c"})


def test_twenty_patients_are_cut_by_stratum() -> None:
    patients, y = [f"p{i}" for i in range(20)], column([1.0] * 10 + [0.0] * 10)
    split = by_patient(patients, y)
    for half in (split[:10], split[10:]):
        assert [half.count(s) for s in ("train", "validation", "test")] == [7, 1, 2]
    assert by_patient(patients, y, seed=1) == by_patient(patients, y, seed=1)
    assert by_patient(patients, y, seed=1) != by_patient(patients, y, seed=2)
    # Of a damaged table: numpy's strings lose a NUL at their end.
    assert len(by_patient(["p", "p\0", "q"], column([1, 0, 0]))) == 3


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


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.0, 1.0, np.nan])), min_size=1, max_size=120),
    st.integers(0, 5),
)
def test_each_patient_is_tested_in_one_of_five_folds(rows: list[tuple[int, float]], seed: int) -> None:
    patients, y = [str(p) for p, _ in rows], column([v for _, v in rows])
    tested = []
    for fold in range(1, 6):
        split = by_patient(patients, y, seed=seed, fold=fold)
        of = dict(zip(patients, split, strict=True))
        assert [of[p] for p in patients] == list(split), "no patient is torn"
        tested += [p for p, part in of.items() if part == "test"]
    assert sorted(tested) == sorted(set(patients))


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
        assert [*by_rarest(patients[::-1], y[::-1], seed)[::-1]] == [*split]


def test_shares_must_add_up() -> None:
    with pytest.raises(DataError):
        by_patient(["a"], column([0.0]), fractions=(0.7, 0.1, 0.1))
    with pytest.raises(DataError):
        stratify(np.zeros(3, dtype=np.intp), (0.5, 0.6), seed=0)


def test_the_class_of_a_row_and_codings_that_are_crossed() -> None:
    y = np.array([[0, 1, 0], [0, 0, 0], [np.nan] * 3, [1, 0, 0]], dtype=np.float32)
    assert classes(y).tolist() == [1, 3, 3, 0]
    assert cross_strata(["b", "a", "b", "a"], np.array([1, 1, 0, 1])).tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("n", "shares", "expected"),
    [
        (10, (0.9, 0.1), [9, 1]),
        (5, (0.9, 0.1), [5, 0]),  # a half each: the larger share has it
        (15, (0.9, 0.1), [14, 1]),
        (6, (0.9, 0.1), [5, 1]),
        (1, (0.7, 0.1, 0.2), [1, 0, 0]),
        (4, (0.7, 0.1, 0.2), [3, 0, 1]),
        (4, (0.7, 0.15, 0.15), [3, 0, 1]),
        (20, (0.7, 0.15, 0.15), [14, 3, 3]),
        (0, (0.5, 0.5), [0, 0]),
    ],
)
def test_a_class_is_cut_by_largest_remainders(n: int, shares: tuple[float, ...], expected: list[int]) -> None:
    part = stratify(np.zeros(n, dtype=np.intp), shares, seed=1)
    assert np.bincount(part, minlength=len(shares)).tolist() == expected


def first_classes(rows: Lesions) -> dict[int, int]:
    """A lesion counts for the first of its classes."""
    return {lesion: min(k % 4 for other, k in rows if other == lesion) for lesion, _ in rows}


@pytest.mark.complete
@given(ROWS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_class_is_in_training_and_no_lesion_is_torn(rows: Lesions, seed: int, random: object) -> None:
    whole = table(rows)
    split = divide(whole, (0.7, 0.1, 0.2), seed)
    assert together(whole.patients, np.array(split))
    first = first_classes(rows)
    trained = {lesion for (lesion, _), part in zip(rows, split, strict=True) if part == "train"}
    assert {first[lesion] for lesion in trained} == set(first.values())
    of = dict(zip(whole.patients, split, strict=True))
    for kind, n in Counter(first.values()).items():
        parts = Counter(of[f"L{lesion}"] for lesion in first if first[lesion] == kind)
        assert all(abs(parts[p] - s * n) < 1 for p, s in zip(SPLITS, (0.7, 0.1, 0.2), strict=True))

    random.shuffle(rows)  # type: ignore[attr-defined]
    again = table(rows)
    assert dict(zip(again.patients, divide(again, (0.7, 0.1, 0.2), seed), strict=True)) == of


@given(ROWS, st.integers(1, 6), st.integers(0, 5))
def test_parts_assigned_in_turn_are_alike_and_no_lesion_is_torn(rows: Lesions, k: int, seed: int) -> None:
    whole = table(rows)
    part = in_turn(classes(whole.y), k, seed, whole.patients)
    assert together(whole.patients, part)
    of = dict(zip(whole.patients, part.tolist(), strict=True))
    first = first_classes(rows)
    for lesions in (list(first), *([x for x in first if first[x] == kind] for kind in range(4))):
        sizes = [sum(of[f"L{lesion}"] == j for lesion in lesions) for j in range(k)]
        assert max(sizes) - min(sizes) <= 1


def test_head_medium_and_tail() -> None:
    counts = {"a": 701, "b": 700, "c": 70, "d": 69, "e": 0}
    assert long_tail_groups(counts) == {"head": ("a",), "medium": ("b", "c"), "tail": ("d", "e")}


@pytest.mark.data
@pytest.mark.parametrize("fold", range(5))
def test_the_groups_of_hyperkvasir_are_those_of_the_paper(data_root: Path, fold: int) -> None:
    """7, 9 and 7 classes: with these the printed means add up, and with the counts of all images they do not.

    Table 1, Fed-MAS, IID: head 94.3, medium 72.9, tail 15.9, balanced accuracy 62.08.
    """
    path = data_root / "hyperkvasir_splits" / f"{FOLDS}.gz"
    read = load_table(HyperKvasirConfig(root=path.parent, table=path, fold=fold))
    sizes = {name: len(own) for name, own in long_tail_groups(training_counts(read)).items()}
    assert sizes == {"head": 7, "medium": 9, "tail": 7}
    mean = sum(sizes[name] * v for name, v in (("head", 94.3), ("medium", 72.9), ("tail", 15.9))) / 23
    assert mean == pytest.approx(62.08, abs=0.05)
    whole = dict(zip(read.labels, (read.y == 1).sum(axis=0).tolist(), strict=True))
    assert [len(own) for own in long_tail_groups(whole).values()] == [8, 8, 7]
