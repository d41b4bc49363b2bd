"""Tests of readers of public data sets: what they ask of a table, and how they change its files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from suture.data.readers import read_table
from suture.data.table import SPLITS, Table


def present(table: Table) -> list[set[str]]:
    """The classes of each row."""
    return [{name for name, y in zip(table.labels, row, strict=True) if y == 1} for row in table.y]


def sizes(table: Table) -> list[int]:
    """How many rows train, validate and test."""
    return [table.split.count(part) for part in SPLITS]


def change(path: Path, before: str, after: str) -> None:
    """Put words in the place of others, which stand there at least once; the first ones alone."""
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def moved(path: Path, folder: Path) -> Path:
    """Gzip a file into another folder, which is returned."""
    folder.mkdir(exist_ok=True)
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return folder


def at_fault(config: Any) -> list[str]:
    """The file and the rows of each fault that a reader finds: `labels.csv rows 2, 4`."""
    return [fault.partition(": ")[0].rpartition("/")[2] for fault in read_table(config).faults]
