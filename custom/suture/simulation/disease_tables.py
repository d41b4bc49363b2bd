"""The silos of PMFL: each holds documents of its own, labelled for one disease.

Source: PMFL (Zhang et al., arXiv:2112.05321), Sec. IV: silos without overlap, as many positive as negative
samples in each. The paper builds the largest class first so that no silo dominates; its program builds the
rarest first, so that it keeps all its positives. Here the order of the classes is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.core.seeds import seed_for
from suture.data.table import Table

First = Literal["positives", "negatives"]

EICU_NEGATIVES = 3001
"""As many negatives as PMFL's program takes for a silo of eICU."""


def build_disease_tables(
    table: Table, classes: Sequence[str], seed: int, cap: int | None = None, first: First = "positives"
) -> dict[str, Table]:
    """One table for each class, in their order, of rows that no earlier one has.

    With `first = "positives"` a silo is all unused positives, and as many unused negatives drawn at random;
    where negatives run short, positives are drawn too. With ``negatives``, PMFL's rule for eICU, it is unused
    negatives up to `cap`, and then positives up to as many. A row of which the class is unknown is not drawn.

    Args:
        classes: of the table's, in any number.
        seed: of what is drawn and of the order of rows.
        cap: at most so many positives (or negatives, where these are first).

    Returns:
        for each class its rows in a random order, with that one label; splits and patients stay as they are.
        A patient of several documents may be in several silos.

    Raises:
        LabelError: the table lacks a class.
        DataError: a class has no unused positive, or none that is negative.
    """
    free = np.ones(len(table), dtype=np.bool_)
    silos: dict[str, Table] = {}
    for name in classes:
        y = table.y[:, table.labels.index(name)]
        rng = np.random.default_rng(seed_for(seed, "silo", name))
        positives, negatives = (rng.permutation(np.flatnonzero(free & (y == value))) for value in (1, 0))
        for kind, rows in (("positive", positives), ("negative", negatives)):
            if not len(rows):
                raise DataError(
                    f"{table.root}: no {kind} row is left for {name!r}; build it earlier, or set a cap"
                )
        positives, negatives = _sized(positives, negatives, cap, first)
        rows = rng.permutation(np.concatenate([positives, negatives]))
        free[rows] = False
        silos[name] = table.rows(rows).restrict(LabelSet((name,), table.labels.label_type))
    return silos


def _sized(
    positives: NDArray[np.intp], negatives: NDArray[np.intp], cap: int | None, first: First
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """What of the unused rows a silo takes."""
    if first == "negatives":
        negatives = negatives[:cap]
        return positives[: len(negatives)], negatives
    n = min(len(positives), len(negatives))
    n = n if cap is None else min(n, cap)
    return positives[:n], negatives[:n]
