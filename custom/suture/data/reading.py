"""What the readers of all data sets share: a CSV held as text, and the faults found in its rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path

from suture.config import DataConfig
from suture.data.table import Table
from suture.errors import DataError, LabelError, nearest, unknown
from suture.labels import LabelSet


@dataclass(frozen=True)
class Reading:
    """A table, and what is wrong with its rows.

    Attributes:
        table: as far as it could be read; a faulty cell is unknown, a faulty split unused.
        faults: one sentence each, without patient identifiers. A table with faults is not for training.
        absent: rows left out because `root` has no such image (only where the site said so).
    """

    table: Table
    faults: tuple[str, ...] = ()
    absent: int = 0


@dataclass(frozen=True)
class Sheet:
    """A CSV as text.

    Attributes:
        path: the file, for messages.
        header: names of the columns, without outer white space.
        rows: as many cells in each row as in the header.
        numbers: the number of each row as a spreadsheet shows it (the header is row 1).
    """

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]

    def position(self, name: str, key: str) -> int:
        """The position of a column.

        Args:
            name: the column's name.
            key: the configuration key that gives the name, for the message.

        Raises:
            DataError: there is no such column, or there are two.
        """
        if name not in self.header:
            hint = nearest(name, filter(None, self.header))
            raise DataError(f"{self.path} has no column {name!r}; {hint} ({key} names it)")
        if self.header.count(name) > 1:
            raise DataError(f"{self.path} has two columns {name!r}; remove or rename one of them")
        return self.header.index(name)

    def cells(self, position: int) -> list[str]:
        """The cells of a column, without outer white space."""
        return [row[position].strip() for row in self.rows]

    def only(self, keep: Sequence[bool]) -> Sheet:
        """The rows that a mask selects, under their own numbers."""
        return Sheet(
            self.path, self.header, tuple(compress(self.rows, keep)), tuple(compress(self.numbers, keep))
        )


def read_text(path: Path) -> str:
    """The text of a file, gzipped or not.

    Raises:
        DataError: the file is missing, cut short or not UTF-8 text.
    """
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_sheet(path: Path) -> Sheet:
    """Reads a comma-separated file with a header; blank lines are left out but counted.

    Raises:
        DataError: the file cannot be read, has no row, or a row has more or fewer cells than the header.
    """
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty; it needs a header and one row per image")
    try:
        # Tuples, because the collector of cycles looks through lists again and again: half of the time.
        header, *records = map(tuple, csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise DataError(f"{path} is not a comma-separated table: {error}") from error
    rows = tuple(filter(any, records))
    numbers = tuple(number for number, row in enumerate(records, 2) if any(row))
    if not rows:
        raise DataError(f"{path} has a header and no rows; it needs one row per image")
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != len(header):
            raise DataError(f"{path} row {number} has {len(row)} cells where the header has {len(header)}")
    return Sheet(path, tuple(name.strip() for name in header), rows, numbers)


def restricted(table: Table, config: DataConfig) -> Table:
    """The table of a public data set with the findings that the site says it annotates; by default all.

    Raises:
        ConfigError: `labels` names something that the data set does not know.
        LabelError: `labels` names one finding twice.
    """
    if not config.labels:
        return table
    try:
        own = LabelSet.of(config.labels, config.synonyms, table.labels.task)
    except LabelError as error:
        raise LabelError(f"[data] labels: {error}") from error
    for name in own:
        if name not in table.labels:
            raise unknown("[data] labels entry", name, table.labels)
    return table.restrict(own)


def rows_text(numbers: Sequence[int]) -> str:
    """Row numbers as a message gives them, at most eight of them."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"


def row_faults(
    sheet: Sheet, images: Sequence[str], patients: Sequence[str], split: Sequence[str]
) -> list[str]:
    """Faults of who and where: blank or repeated images, blank patients, a patient in two splits."""
    earlier: dict[str, int] = {}
    twice = [image != "" and earlier.setdefault(image, row) != row for row, image in enumerate(images)]
    first: dict[str, str] = {}
    torn = {
        patient
        for patient, part in zip(patients, split, strict=True)
        if patient and part and first.setdefault(patient, part) != part
    }
    many = f"{len(torn)} patient{'s' if len(torn) > 1 else ''}"
    return [
        *_fault(sheet, map(not_, images), "no image name; write it or remove the row"),
        *_fault(sheet, map(not_, patients), "no patient; write one per image"),
        *_fault(sheet, twice, "an image that an earlier row has; remove the repetition"),
        *_fault(
            sheet, map(torn.__contains__, patients), f"{many} in two splits; keep a patient in one split"
        ),
    ]


def _fault(sheet: Sheet, rows: Iterable[bool], what: str) -> list[str]:
    numbers = list(compress(sheet.numbers, rows))
    return [f"{sheet.path} {rows_text(numbers)}: {what}"] if numbers else []
