"""Small tables of lesions of three classes, for tests of how tables are divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from suture.core.labels import LabelSet
from suture.data.table import Table

LABELS = LabelSet(("A", "B", "C"), "multiclass")

# Of each image the lesion and the class; -1 is none. A lesion may be of several classes, and has one split.
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 2)), min_size=1, max_size=120)


def table(rows: list[tuple[int, int]], parts: tuple[str, ...] = ("train", "train", "validation")) -> Table:
    y = np.zeros((len(rows), 3), dtype=np.float32)
    for row, (_, kind) in enumerate(rows):
        if kind >= 0:
            y[row, kind] = 1
    images = tuple(f"{i}.jpg" for i in range(len(rows)))
    split = tuple(parts[lesion % len(parts)] for lesion, _ in rows)
    return Table(LABELS, images, tuple(f"L{lesion}" for lesion, _ in rows), y, split, Path("images.tar"))


def together(groups: tuple[str, ...], part: np.ndarray) -> bool:
    return all(len(set(part[np.array(groups) == group])) == 1 for group in set(groups))
