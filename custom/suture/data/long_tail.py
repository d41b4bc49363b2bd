"""Dividing data whose classes are of very different sizes: class by class, patients and lesions whole.

Source: Fed-MAS (Elbatel et al., 2023), Section 3: parts alike and parts by Dir(0.5), and the three groups of
classes. How the parts are drawn is not printed; here it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.data.config import Frequency
from suture.data.table import SPLITS, Table

HEAD, TAIL = 700, 70
"""Training images above which a class is of the head, and below which it is of the tail."""

_DRAWS = 1000

Codes = NDArray[np.intp]


def classes(y: NDArray[np.float32]) -> Codes:
    """The class of each row by its position in labels [n, c] of one class; c for a row that has none."""
    present = y == 1
    kinds: Codes = np.where(present.any(axis=1), present.argmax(axis=1), y.shape[1]).astype(np.intp)
    return kinds


def crossed(*codes: Sequence[object] | Codes) -> Codes:
    """One number for each combination of several codings of the same rows: strata within strata."""
    columns = [np.unique(np.asarray(code), return_inverse=True)[1] for code in codes]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].astype(np.intp).reshape(-1)


def stratified(
    strata: Codes, shares: Sequence[float], seed: int, groups: Sequence[str] | None = None
) -> Codes:
    """The part of each row: every stratum is shuffled and cut in the same shares.

    What is left by rounding down goes to the parts that lost most by it, then to the larger share, then to
    the later part. A part with at least half of everything thereby has something of every stratum.

    Args:
        strata: of each of n rows, such as its class.
        shares: of the parts; they add up to 1.
        seed: of the shuffles.
        groups: rows that stay together, such as those of a lesion, which counts for the first of its strata;
            by default each row is on its own.

    Raises:
        DataError: the shares do not add up to 1.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise DataError(f"shares {tuple(shares)} must be at least 0 and add up to 1")
    unit, stratum = _units(strata, groups)
    rng = np.random.default_rng(seed)
    part = np.zeros(len(stratum), dtype=np.intp)
    for each in np.unique(stratum):
        members = rng.permutation(np.flatnonzero(stratum == each))
        part[members] = np.repeat(np.arange(len(shares)), _counts(len(members), np.asarray(shares)))
    return part[unit]


def divided(
    table: Table, shares: tuple[float, float, float], seed: int, strata: Codes | None = None
) -> tuple[str, ...]:
    """The split of each row in shares of train, validation and test; patients (or lesions) stay together.

    Args:
        table: its own split does not matter.
        shares: of the three.
        seed: of the shuffles.
        strata: by default the classes.

    Raises:
        DataError: the shares do not add up to 1.
    """
    part = stratified(classes(table.y) if strata is None else strata, shares, seed, table.patients)
    return tuple(SPLITS[i] for i in part)


def in_turn(strata: Codes, k: int, seed: int, groups: Sequence[str] | None = None) -> Codes:
    """The part of each row, of k: each stratum, and so the whole, is shuffled and dealt one by one.

    Args:
        strata: of each of n rows, such as its class.
        seed: of the shuffles.
        groups: as of `stratified`. Counted in these, parts differ by one at most, and strata in them too.
    """
    unit, stratum = _units(strata, groups)
    rng = np.random.default_rng(seed)
    dealt = np.concatenate([rng.permutation(np.flatnonzero(stratum == each)) for each in np.unique(stratum)])
    part = np.empty(len(stratum), dtype=np.intp)
    part[dealt] = np.arange(len(dealt)) % k
    return part[unit]


def iid(table: Table, k: int, seed: int) -> Codes:
    """The site of each row, where k sites are alike: each class, and the whole, is dealt in turn.

    The patients of each split are dealt for themselves, so that a site has its part of all three.

    Raises:
        DataError: fewer patients with training images than sites.
    """
    site = in_turn(crossed(_split_codes(table), classes(table.y)), k, seed, table.patients)
    if not _all_train(table, site, k):
        raise DataError(f"{table.root}: too few training images for {k} sites; take fewer sites")
    return site


def dirichlet(table: Table, k: int, alpha: float, seed: int) -> Codes:
    """The site of each row: of each class the k sites get shares drawn from a symmetric Dir(alpha).

    The shares of a class are the same in each split. Drawn again while a site has no training image.

    Raises:
        DataError: a thousand draws each left a site without one.
    """
    strata = crossed(_split_codes(table), classes(table.y))
    kind = dict(zip(strata.tolist(), classes(table.y).tolist(), strict=True))
    unit, stratum = _units(strata, table.patients)
    rng = np.random.default_rng(seed)
    members = {int(each): rng.permutation(np.flatnonzero(stratum == each)) for each in np.unique(stratum)}
    site = np.empty(len(stratum), dtype=np.intp)
    for _ in range(_DRAWS):
        until = rng.dirichlet(np.full(k, alpha), table.y.shape[1] + 1).cumsum(axis=1)
        for each, own in members.items():
            cuts = np.round(until[kind[each], :-1] * len(own))
            site[own] = np.searchsorted(cuts, np.arange(len(own)), side="right")
        if _all_train(table, site[unit], k):
            return site[unit]
    raise DataError(
        f"{table.root}: {_DRAWS} draws of Dir({alpha}) each left one of {k} sites without a training image; "
        "take fewer sites or a larger alpha"
    )


def by_attribute(table: Table, attribute: Sequence[str], k: int, dominance: float, seed: int) -> Codes:
    """The site of each row, where the last of k sites is dominated by the rarer of two attributes.

    That site gets the share `dominance` of the rarer attribute's images, and as many of the other one's as
    make that its own share too; the other sites get equal parts of the rest. Classes are dealt alike.

    Args:
        table: its patients (or lesions) stay together; one with both attributes counts for the rarer.
        attribute: of each row.
        k: number of sites, at least 2.
        dominance: between a half and 1.
        seed: of the shuffles.

    Raises:
        DataError: there are not two attributes.
    """
    names, counts = np.unique(np.asarray(attribute, dtype=np.str_), return_counts=True)
    if len(names) != 2:
        raise DataError(f"{table.root}: images of {', '.join(names)}; two attributes are needed")
    rarer = names[counts.argmin()]
    patients = np.asarray(table.patients, dtype=np.str_)
    rare = np.isin(patients, patients[np.asarray(attribute) == rarer])
    few, many = int(rare.sum()), int((~rare).sum())
    site = np.empty(len(table), dtype=np.intp)
    for rows, last in ((rare, dominance), (~rare, min(1.0, (1 - dominance) * few / max(many, 1)))):
        shares = [(1 - last) / (k - 1)] * (k - 1) + [last]
        site[rows] = stratified(classes(table.y)[rows], shares, seed, patients[rows].tolist())
    return site


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


def _units(strata: Codes, groups: Sequence[str] | None) -> tuple[Codes, Codes]:
    """The unit that each row belongs to, and the stratum of each unit; the order of the rows is no matter."""
    if groups is None:
        return np.arange(len(strata)), strata
    names, unit = np.unique(np.asarray(groups, dtype=np.str_), return_inverse=True)
    stratum = np.full(len(names), np.iinfo(np.intp).max, dtype=np.intp)
    np.minimum.at(stratum, unit, strata)
    return unit.astype(np.intp), stratum


def _counts(n: int, shares: NDArray[np.float64]) -> Codes:
    """n units in these shares: rounded down, the rest to the largest remainders."""
    exact = n * shares
    counts = np.floor(exact + 1e-9).astype(np.intp)
    # Rounded, so that halves which floating point tells apart are a tie.
    order = np.lexsort((np.arange(len(shares)), shares, np.round(exact - counts, 9)))[::-1]
    counts[order[: n - int(counts.sum())]] += 1
    return counts


def _split_codes(table: Table) -> Codes:
    return np.array([(*SPLITS, "").index(part) for part in table.split], dtype=np.intp)


def _all_train(table: Table, site: Codes, k: int) -> bool:
    train = np.array(table.split) == "train"
    return len(np.unique(site[train])) == k
