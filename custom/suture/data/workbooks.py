"""Tables of .xlsx and .parquet as rows of text: what a person sees in each cell.

Both are read by optional packages, `pip install "suture[tables]"`, in a process of its own, `python -m
suture.data.workbooks`: neither package can be told how much memory a file may take.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from datetime import datetime, time
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from suture.core.errors import DataError
from suture.core.files import open_regular
from suture.core.processes import limit_memory, limit_seconds, python_child
from suture.data.limits import LONGEST_LINE, MOST_CELLS, MOST_TEXT, ROW

WORKBOOKS = (".xlsx", ".parquet")

_MOST_ROWS = 2**20
"""Rows of a sheet of a workbook; no spreadsheet program has more."""

_MOST_COLUMNS = 2**14
"""Columns of a table; no spreadsheet program has more."""

_MOST_MEMORY = 3 * 2**28
"""Bytes that the process may take which reads a table."""

_MOST_SECONDS = 60
"""Seconds that it may compute before each row."""

_MOST_OF_ROW = 2**24
"""Bytes of one row as text."""

_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
"""Of that process: other allocators reserve more than it may take."""

_SHEET = "\0"
"""The first cell of the row that begins a sheet; no workbook has such a cell."""

_PARQUET_ROWS = 64
"""Rows that are decoded at a time."""


def is_workbook(path: Path) -> bool:
    """Whether a table is read by `workbook_rows`."""
    return path.name.lower().endswith(WORKBOOKS)


def workbook_sheets(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of each visible sheet that is not empty, by its name (of a .parquet: the empty text).

    Raises:
        DataError, OSError: as `workbook_rows`.
    """
    sheets: dict[str, list[tuple[str, ...]]] = {}
    rows: list[tuple[str, ...]] = []
    for row in workbook_rows(path, every=True):
        if row[:1] == (_SHEET,):
            rows = sheets[row[1]] = []
        else:
            rows.append(row)
    return sheets or {"": rows}


def workbook_rows(
    path: Path, only: Collection[str] | None = None, every: bool = False
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table, the header first, as many cells in each as in the header or more.

    With `only`, rows are not to be held: a .parquet may have any number of them, and its other columns are
    not read, so that their cells are blank.

    A whole number has no decimal point, a date is as in ISO 8601, and a missing value is a blank cell. Of an
    .xlsx the only sheet that is visible and not empty is read, with the stored results of formulas. With
    `every`, all of these are, and a row of `_SHEET` and its name is before each.

    Raises:
        DataError: the package that reads it is not installed, or the file is damaged, has several sheets, or
            exceeds the limits.
        OSError: the file cannot be opened, or is not a regular file.
    """
    columns = json.dumps(None if only is None else list(only))
    with (
        open_regular(path) as file,
        python_child(__name__, str(path), columns, "every" * every, stdin=file, more=_ENVIRONMENT) as child,
    ):
        assert child.stdout is not None
        while (line := child.stdout.readline(_MOST_OF_ROW)).endswith(b"\n"):
            found = json.loads(line)
            if isinstance(found, str):
                raise DataError(found)
            if found is None:
                return
            yield tuple(found)
    if line:
        raise DataError(f"{path} has a row of more than {_MOST_OF_ROW:,} bytes; leave out columns")
    raise DataError(
        f"{path} needs more than {_MOST_MEMORY >> 20} MiB of memory, or {_MOST_SECONDS} s for a row; save "
        "it as CSV"
    )


def main() -> None:
    """Write the rows of the table on the standard input, a line of JSON each; then null, or what is wrong."""
    path, last = Path(sys.argv[1]), None
    limit_seconds(_MOST_SECONDS)
    gc.disable()  # rows leave no cycles; looking for some among millions of cells took most of the time
    with suppress(ImportError):  # which is told below
        import_module("openpyxl" if path.name.lower().endswith(".xlsx") else "pyarrow.parquet")
    limit_memory(_MOST_MEMORY + os.fstat(0).st_size)
    with suppress(BrokenPipeError):  # whoever reads has enough
        try:
            for row in decode(path, json.loads(sys.argv[2]), "/dev/stdin", bool(sys.argv[3])):
                print(json.dumps(row))
                limit_seconds(_MOST_SECONDS)
        except DataError as error:
            last = str(error)
        print(json.dumps(last), flush=True)


def decode(
    path: Path, only: Collection[str] | None, source: str | Path, every: bool = False
) -> Iterator[tuple[str, ...]]:
    """Yield what `workbook_rows` does; in the process that calls.

    Args:
        path: for messages.
        source: the file's name where it is opened.

    Raises:
        DataError: as `workbook_rows`.
    """
    rows = _xlsx(path, source, every) if path.name.lower().endswith(".xlsx") else _parquet(path, source, only)
    characters = 0
    try:
        for row in _rectangular(rows):
            characters += sum(map(len, row))
            if only is None and characters > MOST_TEXT:  # whatever its headers have said
                raise DataError(f"{path} has more than {MOST_TEXT:,} characters; leave out columns or rows")
            yield row
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path} needs more than {_MOST_MEMORY >> 20} MiB; save it as CSV") from None
    except ImportError:
        raise DataError(
            f'{path}: to read it, install another package: pip install "suture[tables]"; or save it as CSV'
        ) from None
    except Exception as error:  # readers of damaged files raise nearly anything
        raise DataError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error


def _rectangular(rows: Iterable[list[str]]) -> Iterator[tuple[str, ...]]:
    """Rows without the blank cells beyond the header."""
    width = 0
    for row in rows:
        if row[:1] == [_SHEET]:
            width = 0
            yield tuple(row)
            continue
        while len(row) > width and not row[-1]:
            row.pop()
        width = width or len(row)
        yield (*row, *[""] * (width - len(row)))


def _xlsx(path: Path, source: str | Path, every: bool) -> Iterator[list[str]]:
    import openpyxl

    with open_regular(source) as file, warnings.catch_warnings():
        _check_size(path, file)
        warnings.simplefilter("ignore")  # of what it leaves out, such as the list of a drop-down menu
        # Twice: a workbook of results does not tell a formula without one from a blank cell.
        opened = partial(openpyxl.load_workbook, file, read_only=True, keep_links=False)
        with closing(opened(data_only=True)) as results, closing(opened()) as formulas:
            sheets = [
                pair
                for pair in zip(results.worksheets, formulas.worksheets, strict=True)
                if pair[0].sheet_state == "visible"
            ]
            for sheet in (sheet for pair in sheets for sheet in pair):
                sheet.reset_dimensions()  # what the file says of its own size may be wrong
            filled = [pair for pair in sheets if any(map(any, _cells(path, *pair)))]
            if len(filled) > 1 and not every:
                names = ", ".join(repr(sheet.title) for sheet, _ in filled)
                raise DataError(
                    f"{path} has {len(filled)} sheets, {names}; save the one to use as its own file"
                )
            for pair in filled:
                yield from [[_SHEET, pair[0].title]] if every else []
                yield from _cells(path, *pair)


def _cells(path: Path, results: Any, formulas: Any) -> Iterator[list[str]]:
    cells = 0
    both = (sheet.iter_rows(max_row=_MOST_ROWS) for sheet in (results, formulas))
    for row, written in zip(*both, strict=True):
        cells += len(row) + ROW
        if cells > MOST_CELLS:
            raise DataError(f"{path} has more than {MOST_CELLS:,} cells; leave out columns or rows")
        # The result of a formula may well be an empty text, whose cell has another type than a blank one.
        for cell, formula in zip(row, written, strict=True):
            if formula.data_type == "f" and cell.value is None and cell.data_type == "n":
                raise DataError(f"{path} has formulas without results; open it in Excel, and save it")
        yield [_show_cell(cell.value, cell) for cell in row]


def _check_size(path: Path, workbook: IO[bytes]) -> None:
    """Refuse what is not a workbook, or unpacks to too much.

    Raises:
        DataError: it is.
    """
    try:
        packed = zipfile.ZipFile(workbook)
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is not an .xlsx ({error}); save it as .xlsx, without a password") from error
    with packed:
        total = sum(part.file_size for part in packed.infolist())
    if total > MOST_TEXT:
        raise DataError(f"{path} unpacks to {total:,} bytes; the limit is {MOST_TEXT:,}")


def _parquet(path: Path, source: str | Path, only: Collection[str] | None) -> Iterator[list[str]]:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(source) as plain:
        meta, schema = plain.metadata, plain.schema_arrow
        if meta.num_columns > _MOST_COLUMNS:
            raise DataError(f"{path} has {meta.num_columns:,} columns; the limit is {_MOST_COLUMNS:,}")
        read = [field for field in schema if only is None or field.name in only]
        for field in read:
            kind = field.type
            if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                raise DataError(
                    f"{path}: column {field.name!r} holds {kind}; write it as text, or leave it out"
                )
    names = [field.name for field in read]
    text = [field.name for field in read if _is_text(field.type)]
    size = _bytes_of(meta, names)
    if size > MOST_TEXT or (only is None and meta.num_rows * (meta.num_columns + ROW) > MOST_CELLS):
        raise DataError(f"{path} has {meta.num_rows:,} rows of {size:,} bytes; leave out columns or rows")
    yield list(schema.names)
    # A text that is repeated is held once, however long: so it can be measured before it is copied.
    with parquet.ParquetFile(source, read_dictionary=text, memory_map=True) as file:
        for batch in file.iter_batches(_PARQUET_ROWS, columns=only and names, use_threads=False):
            blank = [""] * batch.num_rows
            columns = {
                name: list(map(_show_cell, _values(path, column)))
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            yield from map(list, zip(*(columns.get(name, blank) for name in schema.names), strict=True))


def _bytes_of(meta: Any, names: Collection[str]) -> int:
    """The bytes of some columns, decompressed."""
    groups = map(meta.row_group, range(meta.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema in names)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values(path: Path, column: Any) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    if _is_text(column.type.value_type):
        longest = pc.max(pc.binary_length(column.dictionary)).as_py() or 0
        if longest > LONGEST_LINE:
            raise DataError(f"{path} has a cell of {longest:,} bytes; the limit is {LONGEST_LINE:,}")
    return list(column.dictionary_decode().to_pylist())


def _show_cell(value: Any, cell: Any = None) -> str:
    """A value as a spreadsheet shows it, but dates as in ISO 8601 and numbers with all of their digits."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, (int, float, Decimal)):
        number = float(value)
        whole = str(int(value)) if number.is_integer() and abs(number) < 1e15 else str(value)
        zeros = str(cell.number_format) if cell is not None else ""
        return whole.zfill(len(zeros)) if zeros and not zeros.strip("0") else whole  # 00017
    if isinstance(value, datetime):
        return str(value.date() if value.time() == time() else value)
    return str(value)


if __name__ == "__main__":
    main()
