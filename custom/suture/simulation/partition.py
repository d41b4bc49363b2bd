"""What a simulation does with a pooled data set: cut it into sites that know different classes."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import ConfigError, DataError, unknown
from suture.core.files import atomic_write
from suture.core.labels import LabelSet
from suture.data.split import strata
from suture.data.table import Split, Table

Classes = Literal["published", "disjoint", "single", "dealt", "all"]

SERVER = "server"
"""The name under which `deal` gives the held-out test rows."""

TEXT = "text"
"""The column of documents of a simulated site."""

_CELLS = {1.0: "1", 0.0: "0"}


def patient_blocks(table: Table, k: int, seed: int) -> list[Table]:
    """K tables of equally many patients: both strata are cut in K equal blocks, the remainder is dropped.

    Source: Surgical Aggregation (arXiv 2301.06683), the division of NIH among K clients.

    Raises:
        DataError: fewer than K patients in a stratum that has any.
    """
    groups = strata(table.patients, table.y, seed)
    fewest = min((len(group) for group in groups if len(group)), default=0)
    if not 1 <= k <= fewest:
        raise DataError(
            f"{table.root}: {fewest} patients cannot be cut into {k} equal blocks; take fewer sites"
        )
    patients = np.asarray(table.patients, dtype=np.str_)
    blocks = []
    for i in range(k):
        shares = [group[i * (len(group) // k) : (i + 1) * (len(group) // k)] for group in groups]
        blocks.append(table.rows(np.isin(patients, np.concatenate(shares))))
    return blocks


def client_classes(*, k: int | None = None, shared: int | None = None) -> tuple[LabelSet, ...]:
    """The classes that each client knows in the experiments of Surgical Aggregation (arXiv 2301.06683).

    Args:
        k: the experiment with this many clients (2, 3, 4, 5, 6, 8, 10).
        shared: or that with four clients, of which all know this many classes (0, 1, 2, 4, 8, 12, 14).

    Raises:
        ConfigError: neither or both are given, or there is no such experiment.
    """
    if (k is None) == (shared is None):
        raise ConfigError("client_classes takes either k (clients) or shared (classes known to all)")
    file = resources.files("suture.simulation").joinpath("surgical_aggregation_clients.json")
    published: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    by_shared = {str(e["shared_by_all"]): e["clients"] for e in published["by_shared_classes"]}
    lists, word, kind = (
        (published["by_number_of_clients"], str(k), "number of clients")
        if shared is None
        else (by_shared, str(shared), "number of shared classes")
    )
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
    """Which classes each site of a simulation knows.

    Args:
        kind: ``published``, the lists of Surgical Aggregation 2024 (NIH only; 11 and 7 for two sites);
            ``disjoint``, every class at one site, dealt in the order of a seeded shuffle (7 and 7 for the two
            sites of the MIDL 2023 version, whose own lists are not recoverable); ``single``, one class per
            site; ``dealt``, `per_client` classes at each site, as in FedLSM; ``all``, every class everywhere.
        labels: every class.
        clients: number of sites; `single` has as many as there are classes.
        shared: of the published lists those of four sites that all know this many classes.
        seed: of the shuffle of disjoint lists.
        per_client: classes of each site, where they are dealt.

    Raises:
        ConfigError: no published lists, fewer classes than sites, or settings that contradict each other.
    """
    if shared is not None and (kind, clients) != ("published", 4):
        raise ConfigError("shared classes are those of the published lists of 4 clients; set clients=4")
    if kind == "published":
        return client_classes(k=clients) if shared is None else client_classes(shared=shared)
    if kind == "all":
        return (labels,) * clients
    if kind == "dealt":
        return assigned_classes(labels, clients, per_client)
    if kind == "single":
        clients = len(labels)
    if clients > len(labels):
        raise ConfigError(f"{len(labels)} classes cannot be dealt to {clients} sites without sharing one")
    dealt = np.random.default_rng(seed).permutation(len(labels)) if kind == "disjoint" else range(len(labels))
    owner = {labels.names[int(c)]: i % clients for i, c in enumerate(dealt)}
    return tuple(
        LabelSet(tuple(n for n in labels if owner[n] == site), labels.label_type) for site in range(clients)
    )


def assigned_classes(
    labels: LabelSet, clients: int, per_client: int, seed: int = 523
) -> tuple[LabelSet, ...]:
    """So many classes for each client, every class at one client or more.

    Shuffled classes are dealt in turn, and each client's hand is filled up with others. With the default seed
    these are the lists of FedLSM (Deng et al., MICCAI 2023, Tables 5 and 6): 3 of NIH's 14 findings at each
    of 8 clients, 3 of ISIC's 7 diagnoses at each of 5.

    Raises:
        ConfigError: the hands are too small for all classes, or larger than the deck.
    """
    if not per_client <= len(labels) <= clients * per_client:
        raise ConfigError(
            f"{clients} sites of {per_client} classes each cannot hold {len(labels)} classes between them; "
            "change simulation.clients or per_client"
        )
    draw = random.Random(seed)
    deck = list(labels.names)
    draw.shuffle(deck)
    hands = []
    for client in range(clients):
        own = deck[client::clients]
        more = draw.sample(deck, per_client - len(own))
        if set(more) & set(own):  # the published program may deal a class twice
            more = draw.sample([name for name in deck if name not in own], per_client - len(own))
        hands.append(LabelSet(tuple(n for n in labels if n in {*own, *more}), labels.label_type))
    return tuple(hands)


def partition_table(
    table: Table,
    classes: Sequence[LabelSet],
    seed: int = 1337,
    *,
    test: bool = False,
    held_out: tuple[Split, ...] = ("test",),
) -> dict[str, Table]:
    """A pooled data set as sites that know different classes, and a server with the test rows.

    Args:
        table: the pooled data with every class and a split.
        classes: of each site.
        seed: of the patient blocks.
        test: whether every site also gets the test rows, as its own test data: models that stay at the sites
            are then measured on the same images as a global one.
        held_out: the splits that lie at the server alone.

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
    """At most so many training images: the same share of the patients of each stratum, in training and
    validation; all test rows stay.
    """
    split = np.array(table.split)
    total = int((split == "train").sum())
    if total <= training_images:
        return table
    groups = {part: _strata_of(table.rows(split == part), seed) for part in ("train", "validation")}
    patients = np.asarray(table.patients, dtype=np.str_)
    share = training_images / total
    while True:
        kept = np.concatenate([g[: int(len(g) * share)] for pair in groups.values() for g in pair])
        rows = np.isin(patients, kept) | (split == "test")
        if int((rows & (split == "train")).sum()) <= training_images:
            return table.rows(rows)
        share *= 0.99


def _strata_of(table: Table, seed: int) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
    return strata(table.patients, table.y, seed)


def write_site(folder: Path, table: Table, labels: LabelSet, name: str = "labels.csv") -> Path:
    """Writes `folder/name` as a hospital has it: image, patient, split, and the columns of `labels`.

    Documents stand in a column `TEXT` before the labels.

    A simulated site is thereby an ordinary one, whose images stay where they are. Unknown is a blank cell.

    Returns:
        The file.

    Raises:
        OSError: the folder cannot be made or written.
    """
    y = table.restrict(labels).y
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "patient", "split", *([] if table.texts is None else [TEXT]), *labels])
    rows = zip(
        table.images,
        table.patients,
        table.split,
        *([] if table.texts is None else [table.texts]),
        strict=True,
    )
    for row, values in zip(rows, y, strict=True):
        writer.writerow([*row, *(_CELLS.get(float(value), "") for value in values)])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    atomic_write(path, text.getvalue().encode())
    return path
