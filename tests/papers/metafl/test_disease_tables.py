"""suture_papers.metafl.single_target: the disease tables of PMFL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError, LabelError
from suture.core.labels import LabelSet
from suture.data.table import Table
from suture_papers.metafl.single_target import build_disease_tables

CLASSES = ("A", "B", "C")


def table(*columns: list[float]) -> Table:
    y = np.array(columns, dtype=np.float32).T
    names = tuple(f"r{i}" for i in range(len(y)))
    texts = tuple(f"text {name}" for name in names)
    return Table(
        LabelSet(CLASSES[: len(columns)]), names, names, y, ("train",) * len(y), Path("t.csv"), texts
    )


def names(own: Table, value: float) -> set[str]:
    return {name for name, y in zip(own.images, own.y[:, 0], strict=True) if y == value}


def test_the_first_class_takes_its_positives_and_the_next_what_is_left() -> None:
    nan = float("nan")
    data = table([1, 1, 0, 0, 0, nan], [1, 0, 0, 0, 1, 1])
    tables = build_disease_tables(data, ("A", "B"), seed=1)
    assert list(tables) == ["A", "B"]
    assert tables["A"].labels.names == ("A",)
    assert names(tables["A"], 1) == {"r0", "r1"}
    assert len(names(tables["A"], 0)) == 2
    assert "r5" not in tables["A"].images
    assert tables["A"].texts == tuple(f"text {name}" for name in tables["A"].images)
    # Of B's negatives r1 to r3, at most one is left; of its positives r0 is gone.
    other = tables["B"]
    assert names(other, 1) <= {"r4", "r5"} - set(tables["A"].images)
    assert len(names(other, 1)) == len(names(other, 0)) == 1


def test_a_cap_and_the_rule_of_eicu() -> None:
    data = table([1] * 5 + [0] * 9)
    assert [len(build_disease_tables(data, ("A",), 1, cap)["A"]) for cap in (None, 3, 20)] == [10, 6, 10]
    own = build_disease_tables(data, ("A",), 1, 3, "negatives")["A"]
    assert (len(names(own, 1)), len(names(own, 0))) == (3, 3)
    own = build_disease_tables(data, ("A",), 1, 7, "negatives")["A"]
    assert (len(names(own, 1)), len(names(own, 0))) == (5, 7)


def test_a_seed_decides_what_is_drawn() -> None:
    data = table([1] * 5 + [0] * 50)
    first = build_disease_tables(data, ("A",), 1)["A"]
    assert build_disease_tables(data, ("A",), 1)["A"].images == first.images
    assert build_disease_tables(data, ("A",), 2)["A"].images != first.images
    assert first.y[:, 0].tolist() not in ([1] * 5 + [0] * 5, [0] * 5 + [1] * 5)


def test_a_class_of_which_nothing_is_left_is_named() -> None:
    with pytest.raises(DataError, match=r"t\.csv: no positive row is left for 'B'"):
        build_disease_tables(table([1, 0, 0], [1, 0, 0]), ("A", "B"), 1)
    with pytest.raises(DataError, match="no negative row is left for 'B'"):
        build_disease_tables(table([1, 0, 0], [0, 0, 1], [0, 0, 0]), ("A", "B"), seed=_leaving("r2"))
    with pytest.raises(LabelError, match="'C' is not among A, B"):
        build_disease_tables(table([1, 0], [1, 0]), ("C",), 1)


def _leaving(row: str) -> int:
    """A seed with which the table of A leaves this row."""
    data = table([1, 0, 0], [0, 0, 1], [0, 0, 0])
    return next(
        seed for seed in range(100) if row not in build_disease_tables(data, ("A",), seed)["A"].images
    )


VALUES = st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=3, max_size=3)


@given(st.lists(VALUES, min_size=1, max_size=40), st.none() | st.integers(1, 6), st.integers(0, 3))
def test_tables_are_disjoint_and_half_positive(rows: list[list[float]], cap: int | None, seed: int) -> None:
    data = table(*map(list, zip(*rows, strict=True)))
    try:
        tables = build_disease_tables(data, CLASSES, seed, cap)
    except DataError:
        return
    used = [name for own in tables.values() for name in own.images]
    assert len(used) == len(set(used))
    free = set(data.images)
    for column, own in enumerate(tables.values()):
        positives = {n for n, y in zip(data.images, data.y[:, column], strict=True) if y == 1 and n in free}
        negatives = {n for n, y in zip(data.images, data.y[:, column], strict=True) if y == 0 and n in free}
        assert names(own, 1) <= positives
        assert names(own, 0) <= negatives
        size = min(len(positives), len(negatives), cap or len(data))
        assert len(names(own, 1)) == len(names(own, 0)) == size
        free -= set(own.images)
