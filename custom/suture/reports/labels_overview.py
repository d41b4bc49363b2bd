"""What a data set's labels look like before any training: how often each class is seen, and with which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.data.table import Table
from suture.learning.metrics import Floats

Unit = Literal["image", "patient"]


@dataclass(frozen=True)
class Frequency:
    """How many images have a class, have it not, and do not say."""

    positives: int
    negatives: int
    unknown: int

    @property
    def share(self) -> float:
        """Share of the labelled images that have the class; NaN where none is labelled."""
        known = self.positives + self.negatives
        return self.positives / known if known else float("nan")


def frequencies(table: Table) -> dict[str, Frequency]:
    """How often each class occurs (Kulkarni et al. 2024, Fig. 4a), in the order of the table's classes."""
    positives, negatives = (table.y == 1).sum(axis=0), (table.y == 0).sum(axis=0)
    unknown = np.isnan(table.y).sum(axis=0)
    return {
        name: Frequency(int(positives[i]), int(negatives[i]), int(unknown[i]))
        for i, name in enumerate(table.labels)
    }


def unit_of(table: Table) -> Unit:
    """What classes occur together in: patients, but images where each counts as a patient of its own."""
    return "image" if len(set(table.patients)) == len(table) else "patient"


def cooccurrence(table: Table, *, per: Unit = "image") -> Floats:
    """Which classes are seen together (MIDL 2023, Appendix A and Fig. 3).

    Args:
        table: n images with c classes.
        per: what is counted. The paper counts patients: a patient has a class that any of their images
            has, lacks a class that none has and some are known to lack, and is unknown otherwise.

    Returns:
        [c, c]: entry (i, j) is the share of the images with class i that have class j, among those where
        j is known; NaN where there are none. The diagonal is 1 wherever class i occurs.
    """
    y = table.y if per == "image" else _by_patient(table)
    positive = (y == 1).astype(np.float64)
    known = (~np.isnan(y)).astype(np.float64)
    both, of = positive.T @ positive, positive.T @ known
    shares = np.full(both.shape, np.nan)
    np.divide(both, of, out=shares, where=of > 0)
    return shares


def _by_patient(table: Table) -> NDArray[np.float32]:
    """The labels of each patient over all their images [patients, c]."""
    names, patient = np.unique(np.asarray(table.patients, dtype=np.str_), return_inverse=True)
    y = np.full((len(names), len(table.labels)), np.nan, dtype=np.float32)
    np.fmax.at(y, patient, table.y)
    return y
