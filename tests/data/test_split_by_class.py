"""suture.data.split: divisions class by class, with lesions kept whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesions import ROWS, table, together
from suture.core.errors import DataError
from suture.data.split import classes, cross_strata, divide, in_turn, stratify
from suture.data.table import SPLITS


def test_the_class_of_a_row() -> None:
    y = np.array([[0, 1, 0], [0, 0, 0], [np.nan] * 3, [1, 0, 0]], dtype=np.float32)
    assert classes(y).tolist() == [1, 3, 3, 0]


def test_codings_are_crossed() -> None:
    codes = cross_strata(["b", "a", "b", "a"], np.array([1, 1, 0, 1]))
    assert codes.tolist() == [2, 0, 1, 0]


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


@pytest.mark.complete
@given(ROWS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_class_is_in_training_and_no_lesion_is_torn(
    rows: list[tuple[int, int]], seed: int, random: object
) -> None:
    whole = table(rows)
    split = divide(whole, (0.7, 0.1, 0.2), seed)
    assert together(whole.patients, np.array(split))
    # A lesion counts for the first of its classes, and each of these trains.
    first = {lesion: min(k % 4 for other, k in rows if other == lesion) for lesion, _ in rows}
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
def test_parts_assigned_in_turn_are_alike_and_no_lesion_is_torn(
    rows: list[tuple[int, int]], k: int, seed: int
) -> None:
    whole = table(rows)
    part = in_turn(classes(whole.y), k, seed, whole.patients)
    assert together(whole.patients, part)
    of = dict(zip(whole.patients, part.tolist(), strict=True))
    first = {lesion: min(kind % 4 for other, kind in rows if other == lesion) for lesion, _ in rows}
    for lesions in (list(first), *([x for x in first if first[x] == kind] for kind in range(4))):
        sizes = [sum(of[f"L{lesion}"] == j for lesion in lesions) for j in range(k)]
        assert max(sizes) - min(sizes) <= 1


def test_shares_add_up() -> None:
    with pytest.raises(DataError, match="at least 0 and add up to 1"):
        stratify(np.zeros(3, dtype=np.intp), (0.5, 0.6), seed=0)
