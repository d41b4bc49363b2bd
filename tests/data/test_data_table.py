"""suture.data.table: rows with what belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.table import Table


def notes(*texts: str) -> Table:
    y = np.array([[1, 0], [0, 1], [np.nan, 1]], dtype=np.float32)
    split = ("train", "test", "train")
    return Table(LabelSet(("A", "B")), ("1", "2", "3"), ("P", "Q", "P"), y, split, Path("t.csv"), texts)


def test_documents_go_with_their_rows() -> None:
    table = notes("one", "two", "three")
    assert table.rows(np.array([2, 0])).texts == ("three", "one")
    assert table.of("test").texts == ("two",)
    restricted = table.restrict(LabelSet(("B", "C")))
    assert restricted.texts == table.texts
    np.testing.assert_array_equal(restricted.y, [[0, np.nan], [1, np.nan], [1, np.nan]])


def test_another_number_of_documents_is_refused() -> None:
    with pytest.raises(DataError, match=r"t\.csv: 3 images, 2 texts"):
        notes("one", "two")
