"""What a hospital's folder or table seems to be: a guess at its [data], with the reason for each key."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from suture.core.errors import DataError, LabelError
from suture.core.labels import canonical
from suture.core.vocabulary import CANONICAL
from suture.data.cells import Cells
from suture.data.decoding import SUFFIXES
from suture.data.images import ARCHIVES, ImageSource
from suture.data.readers.hospital import SPLIT_WORDS
from suture.data.readers.hospital_labels import NO_FINDING
from suture.data.reading import UTF8, Sheet, read_sheet, read_text, rows_text

TABLES = (".csv", ".tsv", ".txt", ".csv.gz")
_DELIMITERS = (",", ";", "\t", "|")
_LIST_SEPARATORS = ("|", ";", ",")
_PATIENT = re.compile(r"patient|subject|mrn|lesion|case|person|\bpid\b", re.IGNORECASE)
_NO_PATIENT = re.compile(r"age\b|_age|sex|gender|birth|dob|name|date|image|file", re.IGNORECASE)
_SPLIT = re.compile(r"^(split|set|subset|partition|fold)$", re.IGNORECASE)
_NO_LABEL = re.compile(
    r"^(unnamed.*|index|row|.*\bid|sex|gender|male|female|age|view|ap|pa|frontal|lateral|inpatient|quality)$",
    re.IGNORECASE,
)
"""Columns of two values that are no finding. A label of such a name is added to `labels` by hand."""

_MOST_CLASSES = 200

_FEW = 6
"""A column of so few words may be a finding."""


@dataclass(frozen=True)
class Discovery:
    """A guess at the [data] of one site.

    Attributes:
        data: the keys of [data].
        reasons: why, by key.
        warnings: what a person should look at.
    """

    data: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def has_splits(self) -> bool:
        """Whether the table says which rows are for training and which for test."""
        return "split_column" in self.data


def discover(path: Path) -> Discovery:
    """Look at a hospital's folder, or at its table, and return what its [data] should be.

    Raises:
        DataError: there is no table, no image, no label, or more than one table fits; says what was seen.
    """
    path = path.expanduser().resolve()
    if not path.exists():
        raise DataError(f"{path} does not exist; give a folder with a table and images, or the table")
    folder = path if path.is_dir() else path.parent
    root, images = _images(folder)
    sheets = [_sheet(table) for table in ([path] if path.is_file() else _tables(folder))]
    if not sheets:
        raise DataError(f"{folder} holds no table ({', '.join(TABLES)}); give the table's path")
    fitting = [(sheet, found) for sheet in sheets if (found := _image_column(sheet.sheet, root, images))]
    if not fitting:
        names = ", ".join(sheet.sheet.path.name for sheet in sheets)
        raise DataError(f"no column of {names} names the images of {root}, such as {sorted(images)[0]!r}")
    if len(fitting) > 1:
        names = " and ".join(sheet.sheet.path.name for sheet, _ in fitting)
        raise DataError(f"{names} of {folder} both name its images; give the path of the table to use")
    return _describe(*fitting[0], root)


def read_any_table(path: Path) -> Sheet:
    """Read a table whose encoding and delimiter are not known.

    Raises:
        DataError: it cannot be read; see `read_sheet`.
    """
    return _sheet(path).sheet


def find_image_column(sheet: Sheet, root: Path, images: set[str]) -> str | None:
    """Return the name of the column with the most cells that name an image; None where none names any.

    Args:
        root: the folder of the images.
        images: their paths within it.
    """
    found = _image_column(sheet, root, images)
    return found.name if found else None


@dataclass(frozen=True)
class _Form:
    """A table and how it is written."""

    sheet: Sheet
    data: dict[str, Any]
    reasons: dict[str, str]


@dataclass(frozen=True)
class _ImageColumn:
    name: str
    match: str
    found: int


def _describe(form: _Form, images: _ImageColumn, root: Path) -> Discovery:
    sheet, n = form.sheet, len(form.sheet.rows)
    data: dict[str, Any] = {"dataset": "hospital", "root": str(root), "table": str(sheet.path), **form.data}
    reasons, warnings = {"root": "holds the images", **form.reasons}, []

    def note(key: str, value: Any, why: str) -> None:
        data[key], reasons[key] = value, why

    note("image_column", images.name, f"names {images.found} of {n} images that are there")
    if images.match == "stem":
        note("image_match", "stem", "its cells have no suffix")
    if images.found < n:
        note("partial", True, "rows without an image are left out and counted")
        warnings.append(f"{n - images.found} of {n} images of {sheet.path.name} are missing")
    patient = _patient_column(sheet, images.name)
    note("patient_column", patient or images.name, "by its name" if patient else "no column names patients")
    if patient is None:
        warnings.append("no column names patients; images of one patient may come to lie in two splits")
    taken = {images.name, data["patient_column"]}
    others = [c for c in sheet.header if c and c not in taken]
    if split := next((c for c in others if _is_split(sheet.cells(sheet.header.index(c)))), None):
        note("split_column", split, "its cells are train, validation or test")
        taken.add(split)
    else:
        _refuse_strange_splits(sheet, others)
    if len(set(sheet.column(images.name, ""))) < n:
        note("repeated", "merge", "some images have several rows")
    labels, more = _labels(sheet, taken)
    return Discovery(data | labels.data, reasons | labels.reasons, (*warnings, *more))


def _refuse_strange_splits(sheet: Sheet, columns: Sequence[str]) -> None:
    """Refuse a column of splits in other words: what it keeps for the test would be trained on.

    Raises:
        DataError: there is one.
    """
    for name in columns:
        if _SPLIT.match(name.strip()):
            cells = sheet.column(name, "the splits")
            strange = sorted({cell for cell in cells if cell.casefold() not in SPLIT_WORDS})
            raise DataError(
                f"{sheet.path}, column {name!r}: {', '.join(map(repr, strange[:4]))} is no split; write "
                "train, validation, test or blank (unused), or rename the column"
            )


def _images(folder: Path) -> tuple[Path, set[str]]:
    """The folder that holds the images, and their paths within it."""
    archives = sorted(p for p in folder.iterdir() if p.name.endswith(ARCHIVES))
    if len(archives) == 1:
        with ImageSource(archives[0]) as source:
            return archives[0], set(source.paths())
    found = {
        Path(at, name).relative_to(folder).as_posix()
        for at, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in SUFFIXES
    }
    if not found:
        raise DataError(f"{folder} holds no image ({', '.join(sorted(SUFFIXES))})")
    top = {name.partition("/")[0] for name in found}
    if len(top) == 1 and all("/" in name for name in found):
        inner = folder / top.pop()
        return inner, {name.partition("/")[2] for name in found}
    return folder, found


def _tables(folder: Path) -> list[Path]:
    """The tables of a folder, and of those below it where it has none itself."""
    for found in (folder.iterdir(), folder.glob("*/*")):
        tables = [p for p in found if p.is_file() and _is_table(p)]
        if tables:
            return sorted(tables)
    return []


def _is_table(path: Path) -> bool:
    return path.name != "splits.csv" and path.name.lower().endswith(TABLES)


def _sheet(path: Path) -> _Form:
    encoding = _encoding(path)
    delimiter = _delimiter(read_text(path, encoding))
    data: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if delimiter != ",":
        data["delimiter"], reasons["delimiter"] = delimiter, "divides all rows into the same number of cells"
    if encoding != UTF8:
        data["encoding"], reasons["encoding"] = encoding, "the table is not UTF-8"
    return _Form(read_sheet(path, delimiter, encoding), data, reasons)


def _encoding(path: Path) -> str:
    raw = path.read_bytes()[:2]
    if raw in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    try:
        read_text(path)
    except DataError as error:
        if isinstance(error.__cause__, UnicodeError):
            return "cp1252"  # of Windows; Latin-1 but for characters that no table has
        raise
    return UTF8


def _delimiter(text: str) -> str:
    def columns(delimiter: str) -> int:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            widths = {len(row) for row in islice(filter(any, rows), 200)}
        except csv.Error:
            return 0
        return widths.pop() if len(widths) == 1 else 0

    return max(_DELIMITERS, key=columns)


def _image_column(sheet: Sheet, root: Path, images: set[str]) -> _ImageColumn | None:
    """The column with the most cells that name an image; None where no column names any."""
    bases = {name.rpartition("/")[2] for name in images}
    stems = {os.path.splitext(base)[0] for base in bases}
    ways: list[tuple[str, Callable[[str], bool]]] = [
        ("path", lambda cell: _relative(cell, root) in images or cell in bases),
        ("stem", lambda cell: os.path.splitext(cell.rpartition("/")[2])[0] in stems),
    ]
    best: _ImageColumn | None = None
    for name in filter(None, sheet.header):
        cells = [cell for cell in sheet.cells(sheet.header.index(name)) if cell]
        for match, names in ways:
            found = sum(map(names, cells))
            if found > (best.found if best else 0):
                best = _ImageColumn(name, match, found)
    return best


def _relative(cell: str, root: Path) -> str:
    return cell.removeprefix(f"{root}/").removeprefix("./")


def _patient_column(sheet: Sheet, image: str) -> str | None:
    """The column that names patients, one whose name ends like an identifier first.

    Raises:
        DataError: a cell of it is blank: the images of such a patient could come to lie in two splits.
    """
    named = [c for c in sheet.header if c and c != image and _PATIENT.search(c) and not _NO_PATIENT.search(c)]
    named.sort(key=lambda name: not re.search(r"(id|nr|no|mrn|key)$", name, re.IGNORECASE))
    for name in named:
        cells = sheet.column(name, "the patients")
        if len(set(cells)) > 1:
            blank = [number for cell, number in zip(cells, sheet.numbers, strict=True) if not cell]
            if blank:
                raise DataError(f"{sheet.path} {rows_text(blank)}: no patient in column {name!r}; write one")
            return name
    return None


def _is_split(cells: Sequence[str]) -> bool:
    words = {cell.casefold() for cell in cells}
    return len(words - {""}) > 0 and words <= SPLIT_WORDS.keys()


@dataclass(frozen=True)
class _Labels:
    data: dict[str, Any]
    reasons: dict[str, str]


def _labels(sheet: Sheet, taken: set[str]) -> tuple[_Labels, list[str]]:
    """The label columns of a table, or its column of findings.

    Raises:
        DataError: it has neither.
    """
    columns, warnings = _label_columns(sheet, taken)
    listed = _finding_column(sheet, {*taken, *columns})
    if listed and not any(map(_known, columns)):
        name, separator, classes = listed
        warnings += [f"column {column!r} is not taken: {name!r} lists the findings" for column in columns]
        data = {"finding_column": name, "finding_separator": separator, "labels": classes}
        return _Labels(data, {"finding_column": "its cells list the findings that are present"}), warnings
    if not columns:
        asked = "".join(f"\n{warning}" for warning in warnings)
        raise DataError(
            f"{sheet.path} has no column of labels: none has only 1, 0, yes, no or blank cells, and none "
            f"lists findings; its columns are {', '.join(filter(None, sheet.header))}{asked}"
        )
    strange = [name for name in columns if not _known(name)]
    if strange:
        warnings.append(f"is {', '.join(map(repr, strange))} a finding? If not, remove it from labels")
    return _Labels({"labels": columns}, {"labels": "their cells are 1, 0, yes, no or blank"}), warnings


def _label_columns(sheet: Sheet, taken: set[str]) -> tuple[list[str], list[str]]:
    meaning = Cells({})
    labels, warnings = [], []
    for name in (c for c in sheet.header if c and c not in taken):
        cells = sheet.cells(sheet.header.index(name))
        numbers = Counter(meaning.number(cell) for cell in cells)
        strange = sorted({cell for cell in cells if meaning.number(cell) is None})
        if strange:
            if len(strange) <= _FEW and len(strange) < len(cells) / 2:
                warnings.append(_ask(sheet, name, strange))
            continue
        if not (numbers[1.0] or numbers[0.0]):
            continue
        if _NO_LABEL.match(name.strip()):
            warnings.append(f"column {name!r} has two values and is not taken for a finding")
        elif _canonical(name) == NO_FINDING:
            warnings.append(f"column {name!r} says that nothing was found; it is not taken for a class")
        else:
            labels.append(name)
    return labels, warnings


def _ask(sheet: Sheet, name: str, strange: list[str]) -> str:
    words = strange[:_FEW]
    example = ", ".join(f"{json.dumps(word, ensure_ascii=False)} = ?" for word in words)
    return (
        f"{sheet.path}, column {name!r}: what do {', '.join(map(repr, words))} mean? If it is a finding, "
        f'write values = {{ {example} }} with 1, 0 or "unknown" for each, and add it to labels'
    )


def _finding_column(sheet: Sheet, taken: set[str]) -> tuple[str, str, list[str]] | None:
    """The column that lists findings of the vocabulary, its separator and the classes in it."""
    best: tuple[float, str, str, list[str]] | None = None
    for name in (c for c in sheet.header if c and c not in taken):
        cells = [cell for cell in sheet.cells(sheet.header.index(name)) if cell]
        for separator in _LIST_SEPARATORS:
            parts = Counter(part.strip() for cell in cells for part in cell.split(separator) if part.strip())
            if not parts or len(parts) > _MOST_CLASSES:
                continue
            share = sum(n for part, n in parts.items() if _known(part)) / parts.total()
            if share >= 0.5 and (best is None or share > best[0]):
                classes = sorted({c for p in parts if (c := _canonical(p)) and c != NO_FINDING})
                best = (share, name, separator, classes)
    return best[1:] if best else None


def _known(name: str) -> bool:
    return _canonical(name) in CANONICAL


def _canonical(name: str) -> str | None:
    try:
        return canonical(name)
    except LabelError:
        return None
