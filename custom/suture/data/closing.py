"""What the known labels of a site imply of its other classes, by the relations of its atlas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from suture.core.errors import ConfigError
from suture.core.escaping import number_of
from suture.core.labels import LabelSet
from suture.core.ontology import Atlas, implied, read_atlas
from suture.data.dataset import DatasetConfig
from suture.data.reading import Reading, rows_text
from suture.data.table import Table


def close_reading(reading: Reading, config: DatasetConfig) -> Reading:
    """Return a reading with the labels that the site's atlas implies; as it is where the site names none.

    Only classes that the table has become known: nobody else's, and no new ones.

    Raises:
        ConfigError: the atlas cannot be read, or the labels are multiclass.
    """
    if config.atlas is None:
        return reading
    table = reading.table
    if table.labels.label_type == "multiclass":
        raise ConfigError(
            f"{config.table}: [data] atlas has no effect on multiclass labels, of which exactly one is "
            "present; remove it"
        )
    atlas = read_atlas(config.atlas)
    names = _decided_names(table, atlas, config)
    found = implied(table.y, names, atlas.relations(), settle=config.contradictions)

    def where(rows: tuple[int, ...]) -> str:
        numbers = [reading.numbers[row] if reading.numbers else row + 1 for row in rows]
        return rows_text(numbers, "row" if reading.numbers else "image")

    faults = [
        f"{config.table} {where(rows)}: {what} contradict the atlas ({config.atlas}); correct the labels, or "
        'write [data] contradictions = "child wins" or "leave out"'
        for what, rows in found.contradictions.items()
    ]
    notes = []
    if found.settled:
        notes.append(
            f"{config.table} {where(found.settled)}: labels that contradict the atlas, settled by [data] "
            f'contradictions = "{config.contradictions}"'
        )
    if learnt := int((np.isnan(table.y) & ~np.isnan(found.labels)).sum()):
        notes.append(f"{config.table}: {number_of(learnt, 'unknown label')} known by the atlas")
    return replace(
        reading,
        table=replace(table, y=found.labels),
        faults=(*reading.faults, *faults),
        notes=(*reading.notes, *notes),
    )


def _decided_names(table: Table, atlas: Atlas, config: DatasetConfig) -> tuple[str, ...]:
    """Return the names of the table's classes by the atlas's decisions, under which it relates them.

    Raises:
        ConfigError: two classes of the table are decided to be the same.
    """
    found: dict[str, str] = {}
    for name in table.labels:
        if (other := found.setdefault(atlas.name(name), name)) != name:
            raise ConfigError(
                f"{config.table}: {other!r} and {name!r} are the same class by the decisions in "
                f"{config.atlas}; name only one of them under [data] labels, or record another decision"
            )
    return tuple(found)


def with_ancestors(table: Table, config: DatasetConfig) -> Table:
    """Return a closed table with a column for each ancestor of the site's classes that it does not annotate.

    They are the `one_sided` classes of its labels, known in training rows alone: figures of a class whose
    negatives nobody knows would mislead.
    """
    own = table.labels
    if config.atlas is None or not config.ancestors:
        return table
    atlas = read_atlas(config.atlas)
    names, relations = _decided_names(table, atlas, config), atlas.relations()
    below: dict[str, tuple[str, ...]] = {}
    for name, decided in zip(own, names, strict=True):
        for above in sorted(relations.ancestors.get(decided, frozenset()).difference(own, names)):
            below[above] = (*below.get(above, ()), name)
    if not below:
        return table
    wider = table.restrict(LabelSet((*own.names, *below), own.label_type, below))
    y = implied(wider.y, (*names, *below), relations, names, config.contradictions).labels
    y[np.array(table.split) != "train", len(own) :] = np.nan
    return replace(wider, y=y)
