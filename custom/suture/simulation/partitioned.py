"""A pooled public data set as the sites of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from suture.core.labels import LabelSet
from suture.data.config import DataConfig
from suture.data.table import Split, Table
from suture.methods.base import Method
from suture.simulation.partition import SERVER, TEXT, partition_table, write_site
from suture.simulation.writing import write_sites

Validation = Literal["sites", "server"]
"""Who holds the validation images: each site its own, or the server all of them. A model that stays at its
site is selected there, so that a personal method's sites hold their own either way."""


def tested_at_sites(method: type[Method] | Method) -> bool:
    """Whether the sites have the test images too, for models that they keep."""
    return method.personal != "nothing" or method.keep_local


def splits_of_server(method: type[Method] | Method, validation: Validation) -> tuple[Split, ...]:
    """The splits that lie at the server."""
    at_sites = method.personal != "nothing" or validation == "sites"
    return ("test",) if at_sites else ("validation", "test")


def write_partitioned(
    folder: Path,
    runs: Path,
    pooled: Table,
    lists: Sequence[LabelSet],
    method: type[Method] | Method,
    *,
    seed: int,
    color: bool = False,
    validation: Validation = "sites",
    learning_rates: Mapping[str, float] | None = None,
) -> list[str]:
    """Writes each site's table and suture.toml, and the server's.

    Args:
        folder: where to, a folder for each site.
        runs: where the server keeps its experiments.
        pooled: every image with all its labels and a split.
        lists: which classes each site knows.
        method: what it needs to see, the sites permit. A reference that wants every label is given them; one
            that guesses labels leaves them beside the site's table, where only the diagnostics read them.
        seed: of the patient blocks.

    Returns:
        the names of the sites, without the server's.
    """
    known = (pooled.labels,) * len(lists) if method.every_label else lists
    held_out = splits_of_server(method, validation)
    sites = partition_table(pooled, known, seed, test=tested_at_sites(method), held_out=held_out)
    names = [name for name in sites if name != SERVER]
    # Where a reference is given every label, the site still says which ones it annotates.
    own = dict(zip(names, lists, strict=True)) if method.every_label else {}
    truth = (
        partition_table(pooled, (pooled.labels,) * len(lists), seed, held_out=held_out)
        if method.guesses
        else {}
    )
    data = {}
    for name, table in sites.items():
        data[name] = DataConfig(
            dataset="hospital",
            root=pooled.root,
            table=write_site(folder / name, table, table.labels),
            text_column=None if pooled.texts is None else TEXT,
            labels=own[name].names if name in own else None,
            label_type=pooled.labels.label_type,
            color=color,
            truth=write_site(folder / name, truth[name], pooled.labels, "truth.csv")
            if name in truth and name != SERVER
            else None,
        )
    return write_sites(folder, runs, data, method, learning_rates or {})
