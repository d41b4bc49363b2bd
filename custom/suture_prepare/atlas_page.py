"""The atlas of a study as a page to print and discuss: classes as a tree, sites as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from suture.core.errors import LabelError
from suture.core.files import atomic_write
from suture.core.ontology import Atlas, Relations, implied
from suture.core.vocabulary import AREAS
from suture.data.table import Table
from suture_prepare.study_labels import LabelLists
from suture_results.class_tree import class_tree
from suture_results.report import templates

_MOST = 200
"""Proposals on the page."""


@dataclass(frozen=True)
class Cell:
    """What a site says of a class, over all of its images.

    Attributes:
        own: whether its table has the class; otherwise it has kinds of it, and only positives are known.
        positives, negatives: known labels, implied ones included.
        implied: known labels that the table leaves blank.
    """

    own: bool
    positives: int
    negatives: int
    implied: int


def write_atlas_page(
    path: Path, title: str, tables: Mapping[str, Table], lists: LabelLists, atlas: Atlas
) -> None:
    """Write the page.

    Args:
        tables: of the sites, as they label.
        lists, atlas: of the study.

    Raises:
        DiskError: it cannot be written.
    """
    relations = all_relations(atlas)
    cells, torn = dict[str, dict[str, Cell]](), dict[str, int]()
    for site, table in tables.items():
        cells[site], torn[site] = _cells(table, lists.sites[site], relations)
    nodes = class_tree({name for names in lists.sites.values() for name in names}, relations)
    shown = {node.name for node in nodes}
    page = (
        templates(Path(__file__).parent)
        .get_template("atlas.html")
        .render(
            study=title,
            lists=lists,
            atlas=atlas,
            nodes=nodes,
            cells=cells,
            images={site: len(table.y) for site, table in tables.items()},
            torn={site: number for site, number in torn.items() if number},
            owners={name: sum(name in names for names in lists.sites.values()) for name in shown},
            exclusive=[group for group in relations.exclusive if shown.issuperset(group)],
            exhaustive=[(parent, group) for parent, group in relations.exhaustive if shown.issuperset(group)],
            most=_MOST,
        )
    )
    atomic_write(path, page.encode())


def all_relations(atlas: Atlas) -> Relations:
    """Return the built-in relations of all areas and those of a study; these alone where they contradict."""
    try:
        return atlas.model_copy(update={"areas": AREAS}).relations()
    except LabelError:
        return atlas.relations()


def _cells(table: Table, own: tuple[str, ...], relations: Relations) -> tuple[dict[str, Cell], int]:
    """Return the site's classes and their ancestors, and the number of images whose labels contradict."""
    names = own if table.labels.label_type == "multiclass" else relations.with_ancestors(own)
    stated = np.full((len(table.y), len(names)), np.nan, dtype=np.float32)
    stated[:, [names.index(name) for name in own]] = table.y
    if table.labels.label_type == "multiclass":
        known, torn = stated, 0
    else:
        closed = implied(stated, names, relations, own, settle="leave out")
        known, torn = closed.labels, len(closed.settled)
    cells = {
        name: Cell(
            name in own,
            int((known[:, i] == 1).sum()),
            int((known[:, i] == 0).sum()),
            int((np.isnan(stated[:, i]) & ~np.isnan(known[:, i])).sum()),
        )
        for i, name in enumerate(names)
    }
    return cells, torn
