"""Dividing a pooled data set among simulated sites: its rows, and the classes that each site knows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, DataError, unknown
from suture.core.labels import LabelSet
from suture.core.validation import JOB_PATH, LARGEST_SEED, LIMIT, STRICT
from suture.data.readers import DataConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import (
    FOLDS,
    Codes,
    by_patient,
    classes,
    cross_strata,
    in_turn,
    long_tail_groups,
    strata,
    stratify,
    training_counts,
    units,
)
from suture.data.table import SPLITS, Split, Table
from suture.execution.sites import (
    ATTRIBUTE,
    TEXT,
    Destination,
    SimulatedSites,
    Validation,
    write_site,
    write_sites,
)
from suture.execution.study import SERVER
from suture.methods.base import Method

Classes = Literal["published", "disjoint", "single", "round_robin", "all"]


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


@validated(frozen=True, config=STRICT)
class ReleasedSites(SimulatedSites):
    """Sites with the images of one public data set.

    Attributes:
        root: folder of the images; by default that of the data set in SUTURE_DATA.
        validation: the ``sites`` hold validation images, labelled for their own classes, or the ``server``
            does, labelled for all classes.
        seed: of every random split and of the partition.
    """

    root: Annotated[str | None, JOB_PATH] = None
    validation: Validation = "sites"
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1337

    def destination(self, folder: Path, runs: Path, method: Method) -> Destination:
        """Return where the sites are written; see `PhantomSites.prepare`."""
        return Destination(folder, runs, method, self.learning_rates, self.validation)


@validated(frozen=True, config=STRICT)
class PartitionedSites(ReleasedSites):
    """Sites of one data set, of whose classes each knows some.

    Attributes:
        clients: K.
        classes: which classes each site knows: ``published``, ``disjoint``, ``single`` (as many sites as
            classes), ``round_robin`` (as FedLSM) or ``all``; see `suture_papers.partition.class_lists`.
        per_client: number of classes of each site, for ``round_robin``.
        fold: 1 to 5: test with this fifth of the patients, as in a cross-validation, and divide the others
            7:1 into training and validation. By default, the data set's own split.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 2
    classes: Classes = "published"
    per_client: Annotated[int, Field(ge=1, le=LIMIT)] = 3
    fold: Annotated[int, Field(ge=1, le=FOLDS)] | None = None

    def in_fold(self, pooled: Table) -> Table:
        """Return the rows with the split of the fold, if there is one."""
        if self.fold is None:
            return pooled
        split = by_patient(pooled.patients, pooled.y, seed=self.seed, fold=self.fold)
        return replace(pooled, split=split)

    def write_partitioned(
        self,
        folder: Path,
        runs: Path,
        method: Method,
        pooled: Table,
        *,
        shared: int | None = None,
        color: bool = False,
    ) -> list[str]:
        """Partition a pooled data set by patients among sites that know different classes, and write them.

        A reference method that needs every label gets a column for each; for a method that guesses labels,
        the true ones lie beside the site's table, where only the diagnostics read them.

        Args:
            folder, runs, method: as of `PhantomSites.prepare`, whose value this returns.
            pooled: every image with all its labels and a split.
            shared: see `suture_papers.partition.class_lists`.
            color: read the images as RGB.
        """
        to, pooled = self.destination(folder, runs, method), self.in_fold(pooled)
        lists = class_lists(self.classes, pooled.labels, self.clients, shared, self.seed, self.per_client)
        every, held_out = (pooled.labels,) * len(lists), to.server_splits
        known = every if to.method.labels.complete else lists
        sites = partition_table(pooled, known, self.seed, test=to.tests_at_sites, held_out=held_out)
        names = [name for name in sites if name != SERVER]
        # A reference method gets every label; the site still names the ones that it annotates.
        annotated = dict(zip(names, lists, strict=True)) if to.method.labels.complete else {}
        truth = (
            partition_table(pooled, every, self.seed, held_out=held_out) if to.method.labels.pseudo else {}
        )
        data: dict[str, DataConfig] = {}
        for name, table in sites.items():
            own_folder = to.folder / name
            written, texts = write_site(own_folder, table, table.labels), pooled.texts is not None
            data[name] = HospitalConfig(
                root=written if texts else pooled.root,
                table=written,
                text_column=TEXT if texts else None,
                labels=annotated[name].names if name in annotated else None,
                label_type=pooled.labels.label_type,
                color=color,
                truth=write_site(own_folder, truth[name], pooled.labels, "truth.csv")
                if name in truth and name != SERVER
                else None,
            )
        return write_sites(to, data)


def write_parts(to: Destination, pooled: Table, sites: Sequence[str]) -> list[str]:
    """Write the parts of a pooled data set of colour images as sites that all know every class.

    A site trains on the same images whoever holds the validation ones. Where models stay at the sites, each
    site holds its validation images, and test images: its own, and those that belong to no site. The server
    knows which classes are common or rare among the training images of all sites; see `long_tail_groups`.

    Args:
        pooled: every image with its class, a split and, for figures by attribute, its attribute.
        sites: the site of each row; the empty string for a test image of no site.

    Returns:
        the names of the sites, without the server's.
    """
    groups = {group: names for group, names in long_tail_groups(training_counts(pooled)).items() if names}
    data: dict[str, DataConfig] = {}
    for name, rows in _rows_of(to, pooled, sites).items():
        table = write_site(to.folder / name, pooled.rows(rows), pooled.labels)
        data[name] = HospitalConfig(
            root=pooled.root,
            table=table,
            attribute_column=None if pooled.attributes is None else ATTRIBUTE,
            label_type=pooled.labels.label_type,
            color=True,
            groups=groups if name == SERVER else {},
            # Every label is known here: pseudo-labels are compared with the site's own table.
            truth=table if to.method.labels.pseudo and name != SERVER else None,
        )
    return write_sites(to, data)


def _rows_of(to: Destination, pooled: Table, sites: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """The rows of each site, and of the server, as masks."""
    site, split = np.array(sites), np.array(pooled.split)
    own_splits = [name for name in ("train", "validation") if name not in to.server_splits]
    own = np.isin(split, own_splits)
    test = (split == "test") & to.tests_at_sites
    rows = {name: ((site == name) & (own | test)) | ((site == "") & test) for name in sorted({*sites} - {""})}
    return rows | {SERVER: np.isin(split, to.server_splits)}
