"""What the readers of all data sets share: a CSV held as text, and the faults found in its rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suture.data.table import Table
from suture.errors import DataError, nearest


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
    rows: list[list[str]]
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
    lines = io.StringIO(read_text(path), newline="")
    try:
        records = list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise DataError(f"{path} is not a comma-separated table: {error}") from error
    if not records or not any(records[0]):
        raise DataError(f"{path} is empty; it needs a header and one row per image")
    header = tuple(name.strip() for name in records[0])
    numbers = [number for number, row in enumerate(records, 1) if number > 1 and any(row)]
    if not numbers:
        raise DataError(f"{path} has a header and no rows; it needs one row per image")
    for number in numbers:
        if len(records[number - 1]) != len(header):
            raise DataError(
                f"{path} row {number} has {len(records[number - 1])} cells where the header has {len(header)}"
            )
    return Sheet(path, header, [records[number - 1] for number in numbers], tuple(numbers))


def rows_text(numbers: Sequence[int]) -> str:
    """Row numbers as a message gives them, at most eight of them."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"


def row_faults(
    sheet: Sheet, images: Sequence[str], patients: Sequence[str], split: Sequence[str]
) -> list[str]:
    """Faults of who and where: blank or repeated images, blank patients, a patient in two splits."""
    seen: dict[str, int] = {}
    twice = [
        n for image, n in zip(images, sheet.numbers, strict=True) if image and seen.setdefault(image, n) != n
    ]
    splits: dict[str, set[str]] = {}
    for patient, part in zip(patients, split, strict=True):
        splits.setdefault(patient, set()).add(part)
    torn = {patient for patient, parts in splits.items() if patient and len(parts - {""}) > 1}
    return [
        *_fault(sheet, "no image name; write it or remove the row", _where(sheet, (not i for i in images))),
        *_fault(sheet, "no patient; write one per image", _where(sheet, (not p for p in patients))),
        *_fault(sheet, "an image that an earlier row has; remove the repetition", twice),
        *_fault(
            sheet,
            f"{len(torn)} patient{'s' if len(torn) > 1 else ''} in two splits; keep a patient in one split",
            _where(sheet, (p in torn for p in patients)),
        ),
    ]


def _where(sheet: Sheet, mask: Iterable[bool]) -> list[int]:
    return [number for number, bad in zip(sheet.numbers, mask, strict=True) if bad]


def _fault(sheet: Sheet, what: str, numbers: list[int]) -> list[str]:
    return [f"{sheet.path} {rows_text(numbers)}: {what}"] if numbers else []
