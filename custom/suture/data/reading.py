"""What the readers of all data sets share: a CSV as text, and the faults of its rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import not_
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError, LabelError, nearest, unknown
from suture.core.labels import LabelSet
from suture.data.dataset import DatasetConfig
from suture.data.table import Table

UTF8 = "utf-8-sig"
"""UTF-8, with or without a byte order mark."""

FRAMES = frozenset({".xlsx", ".parquet"})
"""Suffixes of tables that pandas reads."""


@dataclass(frozen=True)
class Reading:
    """A table and the faults of its rows.

    Attributes:
        table: what could be read; a faulty label is unknown, and a row with a faulty split is unused.
        faults: one sentence each, without patient identifiers. A table with faults is not used for training.
        absent: rows left out because their image is missing (only with `partial`), or because they have no
            text.
        notes: what was taken for granted, for a person to look at.
    """

    table: Table
    faults: tuple[str, ...] = ()
    absent: int = 0
    notes: tuple[str, ...] = ()


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

    def column(self, name: str, key: str) -> list[str]:
        """The cells of the column of that name; arguments and errors as in `position`."""
        return self.cells(self.position(name, key))

    def only(self, keep: Sequence[bool]) -> Sheet:
        """The rows that a mask selects, under their own numbers."""
        return Sheet(
            self.path, self.header, tuple(compress(self.rows, keep)), tuple(compress(self.numbers, keep))
        )


def read_text(path: Path, encoding: str = UTF8) -> str:
    """The text of a file, gzipped or not.

    Raises:
        DataError: the file is missing, cut short or not text in that encoding.
    """
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(encoding)
    except UnicodeError as error:
        name = "UTF-8" if encoding == UTF8 else encoding
        raise DataError(f"{path} is not {name} text ({error}); correct [data] encoding") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_sheet(path: Path, delimiter: str = ",", encoding: str = UTF8) -> Sheet:
    """Reads a table with a header; blank lines are left out but counted.

    Args:
        path: a text file with a delimiter, gzipped or not; or .xlsx (its first sheet) or .parquet.

    Raises:
        DataError: the file cannot be read, has no row, or a row has more or fewer cells than the header.
    """
    if path.suffix.lower() in FRAMES:
        header, *records = _frame(path)
    else:
        text = read_text(path, encoding)
        if not text.strip():
            raise DataError(f"{path} is empty; it needs a header and one row per image")
        lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
        try:
            # Tuples, because the collector of cycles looks through lists again and again: half of the time.
            header, *records = map(tuple, lines)
        except csv.Error as error:
            raise DataError(f"{path} is not a table with the delimiter {delimiter!r}: {error}") from error
    rows = tuple(filter(any, records))
    numbers = tuple(number for number, row in enumerate(records, 2) if any(row))
    if not rows:
        raise DataError(f"{path} has a header and no rows; it needs one row per image")
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != len(header):
            raise DataError(f"{path} row {number} has {len(row)} cells where the header has {len(header)}")
    return Sheet(path, tuple(name.strip() for name in header), rows, numbers)


def _frame(path: Path) -> list[tuple[str, ...]]:
    """The rows of a spreadsheet or a columnar file as text, the header first; whole numbers without a point.

    Raises:
        DataError: it cannot be read, or the library that reads it is not installed.
    """
    import pandas as pd  # a second, which only such a table is worth

    try:
        if path.suffix.lower() == ".xlsx":
            frame = pd.read_excel(path, header=None, dtype=object)
            rows = frame.itertuples(index=False, name=None)
        else:
            frame = pd.read_parquet(path)
            rows = chain([tuple(frame.columns)], frame.itertuples(index=False, name=None))
        return [tuple(map(_as_text, row)) for row in rows] or [()]
    except ImportError as error:
        raise DataError(f"{path} needs another library: pip install 'suture[tables]' ({error})") from error
    except Exception as error:  # readers of damaged files raise nearly anything
        raise DataError(f"{path} cannot be read: {error}") from error


def _as_text(value: object) -> str:
    if value is None or value != value or str(value) in ("NaT", "<NA>"):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_columns(path: Path, names: Sequence[str], key: str) -> Iterator[tuple[str, ...]]:
    """Some columns of a comma-separated file, row by row: for tables too large to be held as a `Sheet`.

    Args:
        key: the configuration key that needs them, for the message.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row has more or fewer cells than the header.
    """
    try:
        with _opened(path) as file:
            rows = csv.reader(file, strict=True)
            header = Sheet(path, tuple(name.strip() for name in next(rows, ())), (), ())
            positions = [header.position(name, key) for name in names]
            for number, row in enumerate(rows, 2):
                if row and len(row) != len(header.header):
                    raise DataError(
                        f"{path} row {number} has {len(row)} cells where the header has {len(header.header)}"
                    )
                if row:
                    yield tuple(row[position].strip() for position in positions)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def beside(folder: Path, name: str, remedy: str) -> Path:
    """The file of that name in a folder, gzipped or not.

    Args:
        remedy: what a person can do where it is missing.

    Raises:
        DataError: it is missing.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name} is missing; {remedy}")


def _opened(path: Path) -> IO[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def indicators(found: Sequence[Collection[str] | None], source: Path) -> tuple[LabelSet, NDArray[np.float32]]:
    """Return labels [n, c] from the names that are true of each row.

    Args:
        found: the canonical names of each row; None for a row of which nothing is known.
        source: the file that the names are from, for the message.

    Returns:
        all names that occur, sorted, and 1, 0 or NaN for each row.

    Raises:
        DataError: no name occurs.
    """
    every = sorted({name for names in found for name in names or ()})
    if not every:
        raise DataError(f"{source}: no row has a label; is it the official file?")
    labels = LabelSet(tuple(every))
    y = np.zeros((len(found), len(labels)), dtype=np.float32)
    for row, names in enumerate(found):
        if names is None:
            y[row] = np.nan
        else:
            y[row, [labels.index(name) for name in names]] = 1
    return labels, y


def frequent(table: Table, config: DatasetConfig, least: int) -> Table:
    """Restrict a table to the labels that the site names; by default to those of at least `least` rows.

    Raises:
        DataError: no label has as many rows.
        ConfigError: `labels` names something that no row has.
        LabelError: `labels` names one thing twice.
    """
    if config.labels:
        return restricted(table, config)
    counts = (table.y == 1).sum(axis=0)
    names = tuple(name for name, count in zip(table.labels, counts, strict=True) if count >= least)
    if not names:
        raise DataError(
            f"{config.table}: no label has {least} rows; name those that you want as [data] labels"
        )
    return table.restrict(LabelSet(names))


def restricted(table: Table, config: DatasetConfig) -> Table:
    """Restrict the table of a public data set to the labels that the site names; by default to all.

    Raises:
        ConfigError: `labels` names something that the data set does not know.
        LabelError: `labels` names one finding twice.
    """
    if not config.labels:
        return table
    try:
        own = LabelSet.of(config.labels, config.synonyms, table.labels.label_type)
    except LabelError as error:
        raise LabelError(f"[data] labels: {error}") from error
    for name in own:
        if name not in table.labels:
            raise unknown("[data] labels entry", name, table.labels)
    return table.restrict(own)


def rows_text(numbers: Sequence[int]) -> str:
    """Format row numbers for a message, at most eight of them."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"


def fault(sheet: Sheet, numbers: Sequence[int], what: str) -> list[str]:
    """The fault of these rows as a list of one sentence; an empty list where there is no such row."""
    return [f"{sheet.path} {rows_text(numbers)}: {what}"] if numbers else []


def row_faults(
    sheet: Sheet,
    images: Sequence[str],
    patients: Sequence[str],
    split: Sequence[str],
    what: Literal["image", "document"] = "image",
) -> list[str]:
    """Faults of images, patients and splits: blank or repeated names, and a patient in two splits."""
    earlier: dict[str, int] = {}
    twice = [image != "" and earlier.setdefault(image, row) != row for row, image in enumerate(images)]
    first: dict[str, str] = {}
    torn = {
        patient
        for patient, part in zip(patients, split, strict=True)
        if patient and part and first.setdefault(patient, part) != part
    }
    an = "an image" if what == "image" else "a document"
    many = f"{len(torn)} patient{'s' if len(torn) > 1 else ''}"
    checks: list[tuple[Iterable[bool], str]] = [
        (map(not_, images), f"no {what} name; write it or remove the row"),
        (map(not_, patients), f"no patient; write one per {what}"),
        (twice, f"{an} that an earlier row has; remove the repetition"),
        (map(torn.__contains__, patients), f"{many} in two splits; keep a patient in one split"),
    ]
    return [
        sentence
        for rows, text in checks
        for sentence in fault(sheet, list(compress(sheet.numbers, rows)), text)
    ]
