"""Parts of a pooled data set as the sites of a simulation, each of which knows every class."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from suture.core.errors import ConfigError
from suture.core.files import atomic_write
from suture.data.config import DataConfig
from suture.data.long_tail import dirichlet, iid, long_tail_groups, training_counts
from suture.data.table import Table
from suture.methods.base import Method
from suture.simulation.partition import SERVER, write_site
from suture.simulation.partitioned import Validation, splits_of_server, tested_at_sites
from suture.simulation.writing import write_sites

Partition = Literal["iid", "dirichlet"]

ATTRIBUTE = "attribute"
"""The column of what the figures are told apart by, where there is such a thing."""

Sites = Sequence[str]
"""The site of each row of a pooled table; the empty string for a test image that is no one site's."""


def parted(pooled: Table, partition: Partition, clients: int, alpha: float, seed: int) -> Sites:
    """The site of each row, ``site-1`` ...; a test image, or an unused one, is no one site's.

    Raises:
        DataError: too few training images for so many sites.
    """
    own = np.isin(np.array(pooled.split), ("train", "validation"))
    rows = pooled.rows(own)
    part = iid(rows, clients, seed) if partition == "iid" else dirichlet(rows, clients, alpha, seed)
    names = np.array([f"site-{i:0{len(str(clients))}d}" for i in range(1, clients + 1)])
    sites = np.full(len(pooled), "", dtype=names.dtype)
    sites[own] = names[part]
    return tuple(sites.tolist())


def write_parts(
    folder: Path,
    runs: Path,
    pooled: Table,
    sites: Sites,
    method: type[Method] | Method,
    *,
    validation: Validation = "server",
    attribute: Sequence[str] | None = None,
    learning_rates: Mapping[str, float] | None = None,
) -> list[str]:
    """Writes each site's table and suture.toml, and the server's, whose images are colour ones.

    A site trains on the same images whoever holds the validation ones. Where models stay at the sites, each
    holds its validation images, and its test images or else those of all: see `Sites`. The server is told
    which classes are common or rare among the training images of all sites; see `long_tail_groups`.

    Args:
        folder: where to, a folder for each site.
        runs: where the server keeps its experiments.
        pooled: every image with its class and a split.
        sites: of each row.
        method: what it needs to see, the sites permit.
        validation: who holds the validation images, for a method with a global model.
        attribute: of each row, for figures by attribute; a column of its own in every table.
        learning_rates: of sites that have one of their own.

    Returns:
        the names of the sites, without the server's.
    """
    site, split = np.array(sites), np.array(pooled.split)
    held_out = splits_of_server(method, validation)
    held = np.isin(split, [name for name in ("train", "validation") if name not in held_out])
    tested = (split == "test") & tested_at_sites(method)
    rows = {
        name: ((site == name) & (held | tested)) | ((site == "") & tested) for name in sorted({*sites} - {""})
    }
    rows[SERVER] = np.isin(split, held_out)
    groups = {group: names for group, names in long_tail_groups(training_counts(pooled)).items() if names}
    data = {}
    for name, keep in rows.items():
        table = write_site(folder / name, pooled.rows(keep), pooled.labels)
        if attribute is not None:
            _add_column(table, ATTRIBUTE, [attribute[int(i)] for i in np.flatnonzero(keep)])
        data[name] = DataConfig(
            dataset="hospital",
            root=pooled.root,
            table=table,
            attribute_column=None if attribute is None else ATTRIBUTE,
            label_type=pooled.labels.label_type,
            color=True,
            groups=groups if name == SERVER else {},
            # Every label is known here: the site's own table is the truth that guesses are held against.
            truth=table if method.guesses and name != SERVER else None,
        )
    return write_sites(folder, runs, data, method, learning_rates or {})


def lists_folder(given: str | None, root: Path, file: str, shared: str) -> Path:
    """The folder of a data set's lists: as named, or that of the images, or that of `shared` in SUTURE_DATA.

    Raises:
        ConfigError: none of these has the file.
    """
    data = os.environ.get("SUTURE_DATA")
    places = [Path(given).expanduser()] if given else [root, *([Path(data) / shared] if data else [])]
    for place in places:
        if any((place / name).is_file() for name in (file, f"{file}.gz")):
            return place.resolve()
    raise ConfigError(
        f"{' and '.join(map(str, places))} lack {file}; name its folder with --set simulation.lists=DIR"
    )


def official(folder: Path, file: str) -> Path:
    """A file of an official release, gzipped or not.

    Raises:
        ConfigError: there is none.
    """
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"{folder} has no {file}; name its folder with --set simulation.lists=DIR")


def _add_column(path: Path, name: str, cells: Sequence[str]) -> None:
    """A table with one more column; the cells in the order of its rows."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    text = io.StringIO()
    column = [name, *cells]
    csv.writer(text, lineterminator="\n").writerows(
        [*row, cell] for row, cell in zip(rows, column, strict=True)
    )
    atomic_write(path, text.getvalue().encode())
