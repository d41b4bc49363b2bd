"""What a simulation does with a pooled data set: cut it into sites that know different classes."""

from __future__ import annotations

import csv
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from suture.data.split import strata
from suture.data.table import Table
from suture.errors import ConfigError, DataError, unknown
from suture.files import atomic_write
from suture.labels import LabelSet

SERVER = "server"
"""The name under which `nih_sites` gives the held-out test rows."""

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
    file = resources.files("suture.data").joinpath("surgical_aggregation_clients.json")
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


def nih_sites(table: Table, k: int = 2, seed: int = 1337) -> dict[str, Table]:
    """NIH ChestX-ray14 as K sites and a server.

    Args:
        table: the pooled data with all fourteen findings and a split.
        k: number of sites; for 2 they know 11 and 7 classes, of which 4 are shared.
        seed: of the patient blocks.

    Returns:
        ``site-1`` ... ``site-K`` with the training and validation rows of their patients and the columns of
        their classes; ``server`` with the test rows and all classes.

    Raises:
        DataError: too few patients.
        ConfigError: no published class lists for K sites.
    """
    classes = client_classes(k=k)
    learning = table.rows(
        np.array([split in ("train", "validation") for split in table.split], dtype=np.bool_)
    )
    blocks = patient_blocks(learning, k, seed)
    sites = {
        f"site-{i}": block.restrict(own)
        for i, (block, own) in enumerate(zip(blocks, classes, strict=True), 1)
    }
    return sites | {SERVER: table.of("test")}


def write_site(folder: Path, table: Table, labels: LabelSet) -> Path:
    """Writes `folder/labels.csv` as a hospital has it: image, patient, split, and the columns of `labels`.

    A simulated site is thereby an ordinary one, whose images stay where they are. Unknown is a blank cell.

    Returns:
        The file.

    Raises:
        OSError: the folder cannot be made or written.
    """
    y = table.restrict(labels).y
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "patient", "split", *labels])
    for image, patient, split, row in zip(table.images, table.patients, table.split, y, strict=True):
        writer.writerow([image, patient, split, *(_CELLS.get(float(value), "") for value in row)])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "labels.csv"
    atomic_write(path, text.getvalue().encode())
    return path
