"""Dividing the rows of a table by patient or by class, and its classes by frequency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.data.table import SPLITS, Table

FOLDS = 5
"""Of a cross-validation by patient."""

Codes = NDArray[np.intp]
"""A number for each row: its class, stratum, part or site."""


def strata(
    patients: Sequence[str], y: NDArray[np.float32], seed: int
) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
    """Return the patients with any abnormality and those with none, each shuffled.

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
    fold: int | None = None,
) -> tuple[str, ...]:
    """Return the split of each row: each stratum of `strata` is cut into train, validation and test.

    Source: Surgical Aggregation (arXiv 2301.06683), the 70/10/20 division of NIH and CheXpert.

    Args:
        patients, y, seed: as in `strata`.
        fold: 1 to `FOLDS`: this fifth of each stratum is for testing, and the rest is for training and
            validation in the proportion of their fractions. By default, the last `fractions` are.

    Raises:
        DataError: the fractions do not add up to 1.
    """
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
        raise DataError(f"split fractions {fractions} must be shares that add up to 1")
    part_of: dict[str, str] = {}
    for stratum in strata(patients, y, seed):
        cuts = [0, *(round(len(stratum) * share) for share in accumulate(fractions))]
        if fold is not None:
            start, stop = (round(len(stratum) * k / FOLDS) for k in (fold - 1, fold))
            stratum = np.concatenate([stratum[stop:], stratum[:stop]])  # those to be tested come last
            kept = len(stratum) - (stop - start)
            cuts = [0, round(kept * fractions[0] / (fractions[0] + fractions[1])), kept, len(stratum)]
        for split, start, stop in zip(SPLITS, cuts, cuts[1:], strict=False):
            part_of |= dict.fromkeys(stratum[start:stop].tolist(), split)
    return tuple(part_of[patient.rstrip("\0")] for patient in patients)  # as numpy's strings end


def by_rarest(
    patients: Sequence[str],
    y: NDArray[np.float32],
    seed: int,
    fractions: tuple[float, float, float] = (0.7, 0.1, 0.2),
) -> tuple[str, ...]:
    """Return the split of each row: the patients of the rarest class are divided first, those of none last.

    Each class that three patients have is thereby in each split. The order of the rows does not matter.

    Source: iterative stratification (Sechidis, Tsoumakas, Vlahavas 2011), of patients instead of rows.
    """
    names, unit = np.unique(np.asarray(patients, dtype=np.str_), return_inverse=True)
    has = np.zeros((len(names), y.shape[1] + 1), dtype=np.bool_)
    np.logical_or.at(has[:, :-1], unit, y == 1)
    has[:, -1] = True  # all patients are the last group
    part = np.full(len(names), -1)
    order = np.random.default_rng(seed).permutation(len(names))
    for group in [*np.argsort(has[:, :-1].sum(axis=0), kind="stable"), y.shape[1]]:
        members = has[:, group]
        counts = np.array([(part[members] == split).sum() for split in range(3)])
        wanted = members.sum() * np.array(fractions)
        for patient in order[members[order] & (part[order] < 0)]:
            # First one for each split, by its size; then what is furthest from its share.
            lacking = np.where(counts == 0, len(names) + wanted, wanted - counts)
            part[patient] = chosen = int(lacking.argmax())
            counts[chosen] += 1
    return tuple(SPLITS[part[row]] for row in unit)


def classes(y: NDArray[np.float32]) -> Codes:
    """Return the class of each row of multiclass labels [n, c] as its column; c for a row without a class."""
    present = y == 1
    kinds: Codes = np.where(present.any(axis=1), present.argmax(axis=1), y.shape[1]).astype(np.intp)
    return kinds


def cross_strata(*codes: Sequence[object] | Codes) -> Codes:
    """Return one number for each combination of several codings of the same rows."""
    columns = [np.unique(np.asarray(code), return_inverse=True)[1] for code in codes]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].astype(np.intp).reshape(-1)


def stratify(strata: Codes, shares: Sequence[float], seed: int, groups: Sequence[str] | None = None) -> Codes:
    """Return the part of each row: every stratum is shuffled and cut in the same shares.

    Counts are rounded down; the remaining units go to the parts with the largest remainders, ties to the
    larger share, then to the later part. A part with at least half of all rows thereby has some of every
    stratum.

    Source: Fed-MAS (Elbatel et al., 2023), Section 3, which does not print how the parts are drawn.

    Args:
        strata: of each of n rows, such as its class.
        shares: of the parts; they add up to 1.
        seed: of the shuffles.
        groups: rows of one group, such as a lesion, stay together; the group counts for the first of its
            strata. By default each row is on its own.

    Raises:
        DataError: the shares do not add up to 1.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise DataError(f"shares {tuple(shares)} must be at least 0 and add up to 1")
    unit, stratum = units(strata, groups)
    rng = np.random.default_rng(seed)
    part = np.zeros(len(stratum), dtype=np.intp)
    for each in np.unique(stratum):
        members = rng.permutation(np.flatnonzero(stratum == each))
        part[members] = np.repeat(np.arange(len(shares)), _counts(len(members), np.asarray(shares)))
    return part[unit]


def divide(
    table: Table, shares: tuple[float, float, float], seed: int, strata: Codes | None = None
) -> tuple[str, ...]:
    """Return the split of each row, with patients (or lesions) kept together.

    Args:
        table: its own split is ignored.
        shares: of train, validation and test.
        seed: of the shuffles.
        strata: by default the classes.

    Raises:
        DataError: the shares do not add up to 1.
    """
    part = stratify(classes(table.y) if strata is None else strata, shares, seed, table.patients)
    return tuple(SPLITS[i] for i in part)


def in_turn(strata: Codes, k: int, seed: int, groups: Sequence[str] | None = None) -> Codes:
    """Return the part of each row, out of k: the units of each shuffled stratum are assigned in turn.

    The sizes of the parts differ by one unit at most, and so do those of each stratum within them.

    Args:
        strata: of each of n rows, such as its class.
        seed: of the shuffles.
        groups: as in `stratify`.
    """
    unit, stratum = units(strata, groups)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(np.flatnonzero(stratum == each)) for each in np.unique(stratum)])
    part = np.empty(len(stratum), dtype=np.intp)
    part[order] = np.arange(len(order)) % k
    return part[unit]


def units(strata: Codes, groups: Sequence[str] | None) -> tuple[Codes, Codes]:
    """The unit that each row belongs to, and the stratum of each unit.

    A unit is a group, or a single row where there are no groups. Its stratum is the first of its rows'
    strata. The result does not depend on the order of the rows.
    """
    if groups is None:
        return np.arange(len(strata)), strata
    names, unit = np.unique(np.asarray(groups, dtype=np.str_), return_inverse=True)
    stratum = np.full(len(names), np.iinfo(np.intp).max, dtype=np.intp)
    np.minimum.at(stratum, unit, strata)
    return unit.astype(np.intp), stratum


def _counts(n: int, shares: NDArray[np.float64]) -> Codes:
    """Cut n units into these shares: rounded down, the rest to the largest remainders."""
    exact = n * shares
    counts = np.floor(exact + 1e-9).astype(np.intp)
    # Rounded, so that remainders which differ only by floating-point error are a tie.
    order = np.lexsort((np.arange(len(shares)), shares, np.round(exact - counts, 9)))[::-1]
    counts[order[: n - int(counts.sum())]] += 1
    return counts


FrequencyGroup = Literal["head", "medium", "tail"]

HEAD, TAIL = 700, 70
"""A class with more training images than `HEAD` is of the head; one with fewer than `TAIL` is of the tail."""


def training_counts(table: Table) -> dict[str, int]:
    """Images of each class outside the test split: Fed-MAS groups its classes by those of the training folds.

    Validation images count, because they are held out of those folds.
    """
    rows = np.isin(np.array(table.split), ("train", "validation"))
    return dict(zip(table.labels, (table.y[rows] == 1).sum(axis=0).tolist(), strict=True))


def long_tail_groups(counts: Mapping[str, int]) -> dict[FrequencyGroup, tuple[str, ...]]:
    """The classes of the ``head`` (more than 700 images), ``medium`` (70 to 700) and ``tail`` (fewer).

    Args:
        counts: see `training_counts`. With those of the whole data set other classes are in the groups, and
            the published means of the three do not add up.
    """
    names: dict[FrequencyGroup, list[str]] = {"head": [], "medium": [], "tail": []}
    for name, n in counts.items():
        names["head" if n > HEAD else "tail" if n < TAIL else "medium"].append(name)
    return {group: tuple(members) for group, members in names.items()}
