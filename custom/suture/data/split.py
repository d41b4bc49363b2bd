"""Dividing patients, never images: all images of a patient stay together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.data.table import SPLITS


def strata(
    patients: Sequence[str], y: NDArray[np.float32], seed: int
) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
    """The patients with any abnormality and those with none, each shuffled.

    Args:
        patients: the patient of each of n rows; the order of the rows does not matter.
        y: labels [n, c], NaN where unknown; unknown is not an abnormality.
        seed: of the two shuffles.
    """
    names = np.asarray(patients, dtype=np.str_)
    abnormal = np.unique(names[(y == 1).any(axis=1)])
    none = np.setdiff1d(names, abnormal)
    rng = np.random.default_rng(seed)
    return rng.permutation(abnormal), rng.permutation(none)


def by_patient(
    patients: Sequence[str],
    y: NDArray[np.float32],
    fractions: tuple[float, float, float] = (0.7, 0.1, 0.2),
    seed: int = 1337,
) -> tuple[str, ...]:
    """The split of each row: each stratum of `strata` is cut into train, validation and test.

    Source: Surgical Aggregation (arXiv 2301.06683), the 70/10/20 division of NIH and CheXpert.

    Raises:
        DataError: the fractions do not add up to 1.
    """
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
        raise DataError(f"split fractions {fractions} must be shares that add up to 1")
    part_of: dict[str, str] = {}
    for stratum in strata(patients, y, seed):
        cuts = [0, *(round(len(stratum) * share) for share in accumulate(fractions))]
        for split, start, stop in zip(SPLITS, cuts, cuts[1:], strict=False):
            part_of |= dict.fromkeys(stratum[start:stop].tolist(), split)
    return tuple(part_of[patient] for patient in patients)
