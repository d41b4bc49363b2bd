"""Dividing a pooled data set among simulated sites: its rows, and the classes that each site knows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from suture.core.errors import ConfigError, DataError, unknown
from suture.core.labels import LabelSet
from suture.data.split import Codes, classes, cross_strata, in_turn, strata, stratify, units
from suture.data.table import SPLITS, Split, Table

Classes = Literal["published", "disjoint", "single", "round_robin", "all"]

SERVER = "server"
"""The name of the server among the sites of a simulation."""

Partition = Literal["iid", "dirichlet"]

_DRAWS = 1000


def patient_blocks(table: Table, k: int, seed: int) -> list[Table]:
    """Return K tables of equally many patients: both strata are cut into K equal blocks, the rest is dropped.

    Source: Surgical Aggregation (arXiv 2301.06683), the division of NIH among K clients.

    Raises:
        DataError: fewer than K patients in a stratum that has any.
    """
    groups = strata(table.patients, table.y, seed)
    sizes = [(len(group), have) for group, have in zip(groups, ("a finding", "no finding"), strict=True)]
    fewest, have = min((size for size in sizes if size[0]), default=(0, "a finding"))
    if not 1 <= k <= fewest:
        splits = " and ".join(sorted({*table.split})) or "train"
        raise DataError(
            f"{table.root}: only {fewest} patients of the split {splits} have {have}, and {k} sites are to "
            f"get equally many of them. Set simulation.clients to at most {fewest}, or use more images"
        )
    patients = np.asarray(table.patients, dtype=np.str_)
    blocks = []
    for i in range(k):
        shares = [group[i * (len(group) // k) : (i + 1) * (len(group) // k)] for group in groups]
        blocks.append(table.rows(np.isin(patients, np.concatenate(shares))))
    return blocks


def client_classes(clients: int, shared: int | None = None) -> tuple[LabelSet, ...]:
    """Return the classes that each client knows in an experiment of Surgical Aggregation (arXiv 2301.06683).

    Args:
        clients: their number (2, 3, 4, 5, 6, 8, 10).
        shared: of four clients, the number of classes that all of them know (0, 1, 2, 4, 8, 12, 14).

    Raises:
        ConfigError: there is no such experiment.
    """
    file = Path(__file__).with_name("surgical_aggregation_clients.json")
    published: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    lists, word, kind = published["by_number_of_clients"], str(clients), "number of clients"
    if shared is not None:
        lists = {str(e["shared_by_all"]): e["clients"] for e in published["by_shared_classes"]}
        word, kind = str(shared), "number of shared classes"
    if word not in lists:
        raise unknown(kind, word, lists)
    return tuple(LabelSet.of(names) for names in lists[word])


def class_lists(
    kind: Classes,
    labels: LabelSet,
    clients: int,
    shared: int | None = None,
    seed: int = 1337,
    per_client: int = 3,
) -> tuple[LabelSet, ...]:
    """Return the classes that each site of a simulation knows.

    Args:
        kind: ``published``, the lists of Surgical Aggregation 2024 (NIH only); ``disjoint`` and ``single``,
            see `_disjoint_classes`; ``round_robin``, see `assigned_classes`; ``all`` classes at every site.
        labels: every class.
        clients: number of sites; ``single`` has as many as there are classes.
        shared: choose the published lists of four sites that all know this many classes.
        seed: of the shuffle of disjoint lists.
        per_client: number of classes of each site, for ``round_robin``.

    Raises:
        ConfigError: no published lists, fewer classes than sites, or settings that contradict each other.
    """
    if shared is not None and (kind, clients) != ("published", 4):
        raise ConfigError("shared classes are those of the published lists of 4 clients; set clients=4")
    if kind == "published":
        return client_classes(clients, shared)
    if kind == "all":
        return (labels,) * clients
    if kind == "round_robin":
        return assigned_classes(labels, clients, per_client)
    return _disjoint_classes(labels, None if kind == "single" else clients, seed)


def _disjoint_classes(labels: LabelSet, clients: int | None, seed: int) -> tuple[LabelSet, ...]:
    """Assign every class to one site, in the order of a seeded shuffle.

    Two sites get seven classes of NIH each, as in the MIDL 2023 version of Surgical Aggregation, whose own
    lists are not published.

    Args:
        clients: number of sites; None for one class at each, in the order of `labels`.

    Raises:
        ConfigError: fewer classes than sites.
    """
    order = range(len(labels)) if clients is None else np.random.default_rng(seed).permutation(len(labels))
    clients = len(labels) if clients is None else clients
    if clients > len(labels):
        raise ConfigError(
            f"{len(labels)} classes cannot be divided among {clients} sites without sharing one"
        )
    owner = {labels.names[int(c)]: i % clients for i, c in enumerate(order)}
    return tuple(
        LabelSet(tuple(n for n in labels if owner[n] == site), labels.label_type) for site in range(clients)
    )


def assigned_classes(
    labels: LabelSet, clients: int, per_client: int, seed: int = 523
) -> tuple[LabelSet, ...]:
    """Assign `per_client` classes to each client, so that every class is at one client or more.

    Shuffled classes are assigned in turn, and the list of each client is filled up with others. With the
    default seed these are the lists of FedLSM (Deng et al., MICCAI 2023, Tables 5 and 6): 3 of NIH's 14
    findings at each of 8 clients, 3 of ISIC's 7 diagnoses at each of 5.

    Raises:
        ConfigError: the lists are too short for all classes, or longer than the number of classes.
    """
    if not per_client <= len(labels) <= clients * per_client:
        raise ConfigError(
            f"{clients} sites of {per_client} classes each cannot hold {len(labels)} classes between them; "
            "change simulation.clients or per_client"
        )
    draw = random.Random(seed)
    shuffled = list(labels.names)
    draw.shuffle(shuffled)
    lists = []
    for client in range(clients):
        own = shuffled[client::clients]
        more = draw.sample(shuffled, per_client - len(own))
        if set(more) & set(own):  # the published program may draw a class that the client already has
            more = draw.sample([name for name in shuffled if name not in own], per_client - len(own))
        lists.append(LabelSet(tuple(n for n in labels if n in {*own, *more}), labels.label_type))
    return tuple(lists)


def partition_table(
    table: Table,
    classes: Sequence[LabelSet],
    seed: int = 1337,
    *,
    test: bool = False,
    held_out: tuple[Split, ...] = ("test",),
) -> dict[str, Table]:
    """Partition a pooled data set among sites that know different classes, and a server.

    Args:
        table: the pooled data with every class and a split.
        classes: the classes of each site.
        seed: of the patient blocks.
        test: every site also gets all test rows, so that models that stay at the sites are evaluated on the
            same images as a global one.
        held_out: the splits that only the server holds.

    Returns:
        ``site-01`` ... with the other rows of their patients and the columns of their classes; ``server``
        with the held-out rows and all classes.

    Raises:
        DataError: too few patients.
    """
    split = np.array(table.split)
    central = np.isin(split, held_out)
    blocks = patient_blocks(table.rows(~central & (split != "")), len(classes), seed)
    patients = np.asarray(table.patients, dtype=np.str_)
    sites = {}
    for i, (block, own) in enumerate(zip(blocks, classes, strict=True), 1):
        rows = np.isin(patients, block.patients) & ~central & (split != "")
        name = f"site-{i:0{len(str(len(classes)))}d}"
        sites[name] = table.rows(rows | (split == "test") if test else rows).restrict(own)
    return sites | {SERVER: table.rows(central)}


def subset(table: Table, training_images: int, seed: int = 1337) -> Table:
    """Reduce a table to at most `training_images` training images; all test rows stay.

    The same share of the patients of each stratum is taken in training and in validation.
    """
    split = np.array(table.split)
    total = int((split == "train").sum())
    if total <= training_images:
        return table
    parts = (table.rows(split == part) for part in ("train", "validation"))
    groups = [strata(part.patients, part.y, seed) for part in parts]
    patients = np.asarray(table.patients, dtype=np.str_)
    share = training_images / total
    while True:
        taken = np.concatenate([g[: int(len(g) * share)] for pair in groups for g in pair])
        rows = np.isin(patients, taken) | (split == "test")
        if int((rows & (split == "train")).sum()) <= training_images:
            return table.rows(rows)
        share *= 0.99


def assigned_sites(
    pooled: Table, partition: Partition, clients: int, alpha: float, seed: int
) -> tuple[str, ...]:
    """Return the site of each row, ``site-1`` ...; the empty string for a test image or an unused one.

    Args:
        alpha: of the Dirichlet distribution, where `partition` is ``dirichlet``.

    Raises:
        DataError: too few training images for this number of sites.
    """
    mask = np.isin(np.array(pooled.split), ("train", "validation"))
    rows = pooled.rows(mask)
    part = iid(rows, clients, seed) if partition == "iid" else dirichlet(rows, clients, alpha, seed)
    names = np.array([f"site-{i:0{len(str(clients))}d}" for i in range(1, clients + 1)])
    sites = np.full(len(pooled), "", dtype=names.dtype)
    sites[mask] = names[part]
    return tuple(sites.tolist())


def iid(table: Table, k: int, seed: int) -> Codes:
    """Return the site of each row, where k sites are alike: the patients of each class are assigned in turn.

    Each split is divided on its own, so that a site has its part of all three.

    Source: Fed-MAS (Elbatel et al., 2023), Section 3.

    Raises:
        DataError: fewer patients with training images than sites.
    """
    site = in_turn(cross_strata(_split_codes(table), classes(table.y)), k, seed, table.patients)
    if not _all_train(table, site, k):
        raise DataError(f"{table.root}: too few training images for {k} sites; take fewer sites")
    return site


def dirichlet(table: Table, k: int, alpha: float, seed: int) -> Codes:
    """Return the site of each row: k sites get shares of each class, drawn from a symmetric Dir(alpha).

    The shares of a class are the same in each split. They are drawn again while a site has no training image.

    Source: Fed-MAS (Elbatel et al., 2023), Section 3.

    Raises:
        DataError: a thousand draws each left a site without one.
    """
    strata = cross_strata(_split_codes(table), classes(table.y))
    kind = dict(zip(strata.tolist(), classes(table.y).tolist(), strict=True))
    unit, stratum = units(strata, table.patients)
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
    """Return the site of each row, where the rarer of two attributes dominates the last of k sites.

    The last site gets the share `dominance` of the images with the rarer attribute, and as many others as
    make `dominance` that attribute's share at the site too. The other sites get equal parts of the rest.
    Every class is divided in the same shares.

    Args:
        table: its patients (or lesions) stay together; one with both attributes counts for the rarer.
        attribute: the attribute of each row.
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
        site[rows] = stratify(classes(table.y)[rows], shares, seed, patients[rows].tolist())
    return site


def _split_codes(table: Table) -> Codes:
    return np.array([(*SPLITS, "").index(part) for part in table.split], dtype=np.intp)


def _all_train(table: Table, site: Codes, k: int) -> bool:
    train = np.array(table.split) == "train"
    return len(np.unique(site[train])) == k
