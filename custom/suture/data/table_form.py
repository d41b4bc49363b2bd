"""The tables of a folder, and how each is written: its encoding and its delimiter."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from suture.core.errors import DataError
from suture.core.plain import open_regular
from suture.data.reading import UTF8, Sheet, read_sheet, read_text, readable_table, told_delimiter
from suture.data.workbooks import WORKBOOKS, is_workbook

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
            f"{path} row {row}: the text is neither UTF-8 nor that of Windows in western Europe (cp1252); "
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
