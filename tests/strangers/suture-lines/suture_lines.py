"""A data set as JSON Lines: an object for each image, with file, person, findings and part."""

import json
from typing import Literal

from suture.sdk import (
    SPLITS,
    DataError,
    DataSet,
    DatasetConfig,
    PublishedTable,
    Reading,
    Sheet,
    Table,
    canonical,
    indicators,
    read_lines,
    restrict,
    row_faults,
)

KEYS = ("file", "person", "findings", "part")


class LinesConfig(DatasetConfig):
    """Images in a table of JSON Lines.

    A line is such as {"file": "a.png", "person": "p1", "findings": ["Mass"], "part": "train"}.

    Findings that a line does not name are absent.
    """

    dataset: Literal["lines"] = "lines"

    def idle(self):
        return super().idle() | {"seed": "because the lines have their parts; remove it"}


def read_lines_table(config: LinesConfig) -> Reading:
    numbers, rows, found, faults = [], [], [], []
    for number, line in read_lines(config.table):
        try:
            row = json.loads(line)
            texts = tuple(row[key] for key in ("file", "person", "part"))
            names = row["findings"]
            if not all(isinstance(text, str) for text in (*texts, *names)) or not isinstance(names, list):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            faults.append(f"{config.table} line {number}: no object with {', '.join(KEYS)}; correct it")
            continue
        if texts[2] not in SPLITS:
            faults.append(
                f"{config.table} line {number}: its part is none of {', '.join(SPLITS)}; correct it"
            )
            texts = (*texts[:2], "")
        numbers.append(number)
        rows.append(texts)
        found.append([canonical(name, config.synonyms) for name in names])
    if not rows:
        raise DataError(f"{config.table}: {faults[0] if faults else 'it is empty'}")
    files, persons, parts = map(tuple, zip(*rows, strict=True))
    labels, y = indicators(found, config.table)
    sheet = Sheet(config.table, ("file", "person", "part"), tuple(rows), tuple(numbers))
    faults += row_faults(sheet, files, persons, parts)
    table = Table(labels, files, persons, y, parts, config.root)
    return Reading(restrict(table, config), tuple(faults))


LINES = DataSet(
    LinesConfig, read_lines_table, "lines: JSON Lines of images", (PublishedTable("lines of JSON", KEYS),)
)
