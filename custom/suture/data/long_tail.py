"""The head, the medium classes and the tail of data whose classes are of very different sizes.

Source: Fed-MAS (Elbatel et al., 2023), Section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from suture.data.table import Table

Frequency = Literal["head", "medium", "tail"]

HEAD, TAIL = 700, 70
"""A class with more training images than `HEAD` is of the head; one with fewer than `TAIL` is of the tail."""


def training_counts(table: Table) -> dict[str, int]:
    """Images of each class outside the test split: Fed-MAS groups its classes by those of the training folds.

    Validation images count, because they are held out of those folds.
    """
    rows = np.isin(np.array(table.split), ("train", "validation"))
    return dict(zip(table.labels, (table.y[rows] == 1).sum(axis=0).tolist(), strict=True))


def long_tail_groups(counts: Mapping[str, int]) -> dict[Frequency, tuple[str, ...]]:
    """The classes of the ``head`` (more than 700 images), ``medium`` (70 to 700) and ``tail`` (fewer).

    Args:
        counts: see `training_counts`. With those of the whole data set other classes are in the groups, and
            the published means of the three do not add up.
    """
    names: dict[Frequency, list[str]] = {"head": [], "medium": [], "tail": []}
    for name, n in counts.items():
        names["head" if n > HEAD else "tail" if n < TAIL else "medium"].append(name)
    return {group: tuple(members) for group, members in names.items()}
