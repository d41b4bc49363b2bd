"""What the readers of all data sets share: a table as text, whatever its encoding, and its faults."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError, LabelError, check_known, nearest
from suture.core.escaping import from_cell
from suture.core.files import open_regular
from suture.core.labels import LabelSet
from suture.data.dataset import DatasetConfig
from suture.data.limits import LONGEST_LINE, MOST_CELLS, MOST_TEXT, ROW
from suture.data.table import Table
from suture.data.workbooks import WORKBOOKS, is_workbook, workbook_rows

UTF8 = "utf-8-sig"
"""UTF-8, with or without a byte order mark."""

_TOGETHER = 64
"""Rows that are read before their width is checked: each may have as many cells as characters."""


@dataclass(frozen=True)
class Reading:
    """A table and the faults of its rows.

    Attributes:
        table: what could be read; a faulty label is unknown, and a row with a faulty split is unused.
        faults: one sentence each, without patient identifiers. A table with faults is not used for training.
        absent: rows left out because their image is missing (only with `partial`), or because they have no
            text.
        notes: what was taken for granted, for a person to look at.
        numbers: the number of each row of the table as a spreadsheet shows it, where the reader knows it.
    """

    table: Table
    faults: tuple[str, ...] = ()
    absent: int = 0
    notes: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """A table as text.

    Attributes:
        path: the file, for messages.
        header: names of the columns, without outer white space.
        rows: as many cells in each row as in the header.
        numbers: the number of each row as a spreadsheet shows it (the header is mostly row 1).
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
        """The cells of a column; see `_cell`."""
        return [_cell(row[position]) for row in self.rows]

    def column(self, name: str, key: str) -> list[str]:
        """The cells of the column of that name; arguments and errors as in `position`."""
        return self.cells(self.position(name, key))

    def first(self, name: str) -> list[str]:
        """The cells of the column of that name; of two such columns, the first."""
        return self.cells(self.header.index(name))

    def columns(self) -> dict[str, list[str]]:
        """The cells of the `first` column of each name."""
        return {name: self.first(name) for name in self.header if name}

    def only(self, keep: Sequence[bool]) -> Sheet:
        """The rows that a mask selects, under their own numbers."""
        return replace(
            self, rows=tuple(compress(self.rows, keep)), numbers=tuple(compress(self.numbers, keep))
        )


def _cell(text: str) -> str:
    """A cell without outer white space, and without an apostrophe that Suture, or a person, has put before a
    formula.
    """
    return from_cell(text.strip())


def read_text(path: Path, encoding: str = UTF8) -> str:
    """The text of a file, gzipped or not.

    Raises:
        DataError: the file is missing, cut short, not text in that encoding, or longer than `MOST_TEXT`.
    """
    with readable_table(path, encoding=encoding), _open(path, MOST_TEXT, encoding) as file:
        return file.read()


def read_sheet(path: Path, delimiter: str = ",", encoding: str = UTF8) -> Sheet:
    """Reads a table with a header; blank lines are left out but counted.

    Args:
        path: a text file, gzipped or not, or one of `suture.data.workbooks`.
        delimiter: what separates the cells of a row of a text file.

    Raises:
        DataError: the file cannot be read, has no row, a row has more or fewer cells than the header, or it
            exceeds `MOST_TEXT` or `MOST_CELLS`.
    """
    rows: list[tuple[str, ...]] = []
    numbers: list[int] = []
    with readable_table(path, delimiter, encoding), closing(_records(path, delimiter, encoding)) as records:
        numbered = enumerate(islice(records, MOST_CELLS // ROW), 2)
        number, header = next(((number, row) for number, row in numbered if any(row)), (2, ()))
        while part := list(islice(records, _TOGETHER)):
            used = list(map(any, part))
            for row, width in enumerate(map(len, part)):
                if width != len(header) and used[row]:
                    if width < len(header) or any(part[row][len(header) :]):
                        raise _other_width(path, number + row, width, len(header))
                    part[row] = part[row][: len(header)]  # of rows that end with delimiters
            rows += compress(part, used)
            numbers += compress(range(number, number + len(part)), used)
            number += len(part)
            if number * (len(header) + ROW) > MOST_CELLS:
                raise DataError(f"{path} has more than {number - 2:,} rows; leave out columns or rows")
    if not rows and not any(map(str.strip, header)):
        raise DataError(f"{path} is empty; it needs a header and one row per image")
    if not rows:
        raise DataError(f"{path} has a header and no rows; it needs one row per image")
    return Sheet(path, tuple(map(_cell, header)), tuple(rows), tuple(numbers))


def _records(
    path: Path,
    delimiter: str,
    encoding: str,
    most: float = MOST_TEXT,
    only: Collection[str] | None = None,
) -> Generator[tuple[str, ...]]:
    """The rows of a table; without the line in which Excel is told the delimiter, which it does not count."""
    if is_workbook(path):
        yield from workbook_rows(path, only)
        return
    with _open(path, most, encoding) as file:
        # Tuples, because the collector of cycles looks through lists again and again: half of the time.
        records = map(tuple, csv.reader(file, strict=True, delimiter=delimiter))
        first = next(records, ())
        if not told_delimiter(delimiter.join(first)):
            yield first
        yield from records


def told_delimiter(line: str) -> str:
    """The delimiter that a first line such as ``sep=;`` tells Excel; empty for another line."""
    told = re.fullmatch(r"sep=(.)[;,\t| ]*", line.rstrip("\r\n"), re.IGNORECASE)
    return told[1] if told else ""


def stream_columns(path: Path, names: Sequence[str], key: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number of each row and its cells of some columns: for tables too large to be held.

    Args:
        path: a comma-separated file, gzipped or not, or one of `suture.data.workbooks`.
        key: the configuration key that needs the columns, for the message.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row has more or fewer cells than the header.
    """
    with readable_table(path), closing(_records(path, ",", UTF8, math.inf, names)) as records:
        used = ((number, row) for number, row in enumerate(records, 1) if any(row))
        _, first = next(used, (0, ()))
        if not first:
            raise DataError(f"{path} is empty; it needs a header with {', '.join(map(repr, names))} ({key})")
        header = Sheet(path, tuple(map(_cell, first)), (), ())
        positions = [header.position(name, key) for name in names]
        for number, row in used:
            if len(row) != len(first):
                raise _other_width(path, number, len(row), len(first))
            yield number, tuple(_cell(row[position]) for position in positions)


def read_columns(path: Path, names: Sequence[str], key: str) -> Iterator[tuple[str, ...]]:
    """Yield some columns of a table that are to be held; arguments as of `stream_columns`.

    Raises:
        DataError: as `stream_columns`, or the columns hold more than `MOST_TEXT` characters or `MOST_CELLS`
            cells.
    """
    cells = characters = 0
    for _, found in stream_columns(path, names, key):
        cells, characters = cells + len(found), characters + sum(map(len, found))
        if cells > MOST_CELLS or characters > MOST_TEXT:
            raise DataError(f"{path}: its {', '.join(names)} exceed the limit; leave out rows")
        yield found


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line of a file, gzipped or not, and its text; blank lines are left out.

    Raises:
        DataError: the file cannot be read, is no UTF-8 text, or has a line longer than `LONGEST_LINE`.
    """
    with readable_table(path), _open(path) as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


@contextmanager
def readable_table(path: Path, delimiter: str = ",", encoding: str = UTF8) -> Iterator[None]:
    """Turn the errors of reading a table into a `DataError` that names the file."""
    try:
        yield
    except UnicodeError as error:
        name = "UTF-8" if encoding == UTF8 else encoding
        remedy = "save it as UTF-8, or correct [data] encoding where the data set has it"
        raise DataError(f"{path} is not {name} text ({error}); {remedy}") from error
    except csv.Error as error:
        raise DataError(f"{path} is not a table with the delimiter {delimiter!r}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _other_width(path: Path, number: int, width: int, header: int) -> DataError:
    return DataError(
        f"{path} row {number} has {width} cells where the header has {header}; "
        "remove lines above the header, and quote cells that hold the delimiter"
    )


class _Bounded(io.BufferedIOBase):
    """The bytes of a file, gzipped or not, that raises a `DataError` once there are too many.

    A gzipped file can unpack to a thousand times its size, all of it in one line.
    """

    def __init__(self, path: Path, most: float) -> None:
        self._stored = open_regular(path)
        unpacked = gzip.GzipFile(fileobj=self._stored) if path.suffix == ".gz" else self._stored
        self._file = cast(io.BufferedReader, unpacked)
        self._path, self._most = path, most
        self._total = self._line = 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        data = self._file.read1(max(size, 2**16))
        self._total += len(data)
        rest = len(data) - 1 - max(data.rfind(b"\n"), data.rfind(b"\r"))
        self._line = rest if rest < len(data) else self._line + rest
        if self._total > self._most:
            raise DataError(f"{self._path} has more than {self._most:,} bytes; leave out columns or rows")
        if self._line > LONGEST_LINE:
            raise DataError(
                f"{self._path} has a line of more than {LONGEST_LINE:,} bytes; check that it is a table"
            )
        return data

    def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002 - called by `TextIOWrapper.read` alone
        return b"".join(iter(lambda: self.read1(2**16), b""))

    def close(self) -> None:
        self._file.close()
        self._stored.close()
        super().close()


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


def _open(path: Path, most: float = math.inf, encoding: str = UTF8) -> IO[str]:
    return io.TextIOWrapper(cast(IO[bytes], _Bounded(path, most)), encoding=encoding, newline="")


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
        return restrict(table, config)
    counts = (table.y == 1).sum(axis=0)
    names = tuple(name for name, count in zip(table.labels, counts, strict=True) if count >= least)
    if not names:
        raise DataError(
            f"{config.table}: no label occurs in {least} rows; name the ones that you want as [data] labels"
        )
    return table.restrict(LabelSet(names))


def restrict(table: Table, config: DatasetConfig) -> Table:
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
        check_known("[data] labels entry", name, table.labels)
    return table.restrict(own)


def rows_text(numbers: Sequence[int], unit: str = "row") -> str:
    """Format the numbers of rows, or of another unit, for a message, at most eight of them."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{unit}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def fault(sheet: Sheet, bad: Iterable[object], what: str) -> list[str]:
    """The fault of the rows that a mask selects as a list of one sentence; an empty list without any."""
    numbers = list(compress(sheet.numbers, bad))
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
    many = f"{len(torn)} patient{'s' if len(torn) > 1 else ''}"
    return [
        *fault(sheet, map(not_, images), f"the {what} name is blank; fill it in or remove the row"),
        *fault(sheet, map(not_, patients), f"the patient is blank; write one for each {what}"),
        *fault(sheet, twice, f"a repeated {what}; remove the row"),
        *fault(
            sheet, map(torn.__contains__, patients), f"{many} in two splits; keep each patient in one split"
        ),
    ]


TABLES = (".csv", ".tsv", ".txt", ".csv.gz", *WORKBOOKS)

JSON = (".json", ".jsonl", ".ndjson")

DELIMITERS = (",", ";", "\t", "|")

_LOOKED_AT = 200
"""Rows that decide about the delimiter."""


@dataclass(frozen=True)
class Form:
    """A table and how it is written.

    Attributes:
        data: the keys of [data] that say so.
        reasons: why, by key.
        made: how it was put together; empty where it is the file as it is.
        legend: names of the numbers of its classes.
        title: of the sheet, where the workbook has several.
    """

    sheet: Sheet
    data: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    title: str = ""

    @property
    def name(self) -> str:
        """The name of the file and of its sheet."""
        return f"{self.sheet.path.name}{f', sheet {self.title!r}' if self.title else ''}"


def is_hidden(name: str) -> bool:
    """Whether a program has left this file or folder for itself: macOS, or Excel while a table is open."""
    return name.startswith((".", "~$", "__MACOSX"))


def tables(folder: Path) -> list[list[Path]]:
    """The tables of a folder, its lists in JSON, and the tables of the folders in it."""

    def those(pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
        paths = (
            p for p in folder.glob(pattern) if p.name != "splits.csv" and p.name.lower().endswith(suffixes)
        )
        return sorted(p for p in paths if not (is_hidden(p.name) or is_hidden(p.parent.name)) and p.is_file())

    return [those("*", TABLES), those("*", JSON), those("*/*", TABLES)]


def read_form(path: Path) -> Form:
    """Read a table whose encoding and delimiter are not known.

    Raises:
        DataError: as `read_sheet`.
    """
    if is_workbook(path):
        return Form(read_sheet(path))
    encoding = encoding_of(path)
    delimiter, why = _delimiter(read_text(path, encoding))
    form = Form(read_sheet(path, delimiter, encoding))
    if delimiter != ",":
        form.data["delimiter"], form.reasons["delimiter"] = delimiter, why
    if encoding != UTF8:
        form.data["encoding"], form.reasons["encoding"] = encoding, "the table is not UTF-8"
    return form


def encoding_of(path: Path) -> str:
    """The encoding of a text file: UTF-16 by its mark, else UTF-8, or that of Windows in western Europe.

    Raises:
        DataError: as `read_text`; or it is in another script, whose encoding cannot be told from the bytes.
    """
    with readable_table(path), open_regular(path) as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            return "utf-16"
    try:
        read_text(path)
        return UTF8
    except DataError as error:
        if not isinstance(error.__cause__, UnicodeError):
            raise
    # Latin words have no three letters in a row that are not ASCII, nor the Ã¼ of UTF-8 read as cp1252
    # (a table put together from both), and no table has control characters.
    text = read_text(path, "latin-1")
    if other := re.search(r"[^\0-\x7f]{3}|[\xc2\xc3][\x80-\xbf]|[\x81\x8d\x8f\x90\x9d]", text):
        row = text.count("\n", 0, other.start()) + 1
        raise DataError(
            f"{path} row {row}: the text is neither UTF-8 nor cp1252, Windows' in western Europe; "
            "save the table as UTF-8 (in Excel: CSV UTF-8)"
        )
    return "cp1252"


def doubtful_encoding(path: Path) -> str:
    """What to look at in a table that is read as cp1252, and reads otherwise by a related encoding."""
    if is_workbook(path) or path.name.lower().endswith(JSON) or encoding_of(path) != "cp1252":
        return ""
    text = read_text(path, "cp1252")
    for row, line in enumerate(text.split("\n"), 1):
        for other in ("cp1250", "cp1254", "cp1257"):
            for word in re.findall(r"[\w.-]*[^\0-\x7f][\w.-]*", line):
                if word.encode("cp1252").decode(other, "replace") != word:
                    return (
                        f"{path.name} is not UTF-8 and is read as cp1252, such as {word!r} in row {row}; if "
                        "that is wrong, save it as UTF-8 (in Excel: CSV UTF-8)"
                    )
    return ""


def _delimiter(text: str) -> tuple[str, str]:
    """The delimiter and why: the first line names it, or most rows have it as often as the header."""
    if told := told_delimiter(text.partition("\n")[0]):
        return told, "the first line of the table says so"

    def fit(delimiter: str) -> tuple[float, int]:
        try:
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            widths = [len(row) for row in islice(filter(any, rows), _LOOKED_AT)]
        except csv.Error:
            return 0, 0
        if not widths or widths[0] < 2:
            return 0, 0
        return widths.count(widths[0]) / len(widths), widths[0]

    return max(DELIMITERS, key=fit), "divides the rows into as many cells as the header"
