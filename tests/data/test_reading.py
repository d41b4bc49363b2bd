"""suture.data.reading and .workbooks: tables as the text that a person sees."""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import openpyxl
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from suture.core.errors import DataError
from suture.data import reading, workbooks
from suture.data.reading import read_lines, read_sheet, read_text, rows_text, stream_columns
from world import refused

MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
SHEET = "xl/worksheets/sheet1.xml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.csv"


def test_rows_are_numbered_as_a_spreadsheet_shows_them(path: Path) -> None:
    text = "\ufeffimage , patient\r\n a.png ,1\r\n\r\nb.png,2\r\n"
    packed = path.with_suffix(".csv.gz")
    path.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    for file in (path, packed):
        sheet = read_sheet(file)
        assert (sheet.header, sheet.numbers) == (("image", "patient"), (2, 4))
        assert sheet.cells(0) == ["a.png", "b.png"]


def test_a_text_file_has_so_many_bytes_at_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("image\na.png\n")
    monkeypatch.setattr(reading, "MOST_TEXT", 12)
    assert read_text(path) == "image\na.png\n"
    monkeypatch.setattr(reading, "MOST_TEXT", 11)
    with refused(path, "11 bytes", by=DataError):
        read_text(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"image,patient\n", "no rows"),
        (b"image,patient\na,1\nb\n", "row 3 has 1 cells where the header has 2"),
        (b"image,patient\na,1,2\n", "row 2 has 3 cells"),
        (b"image,patient\n\xe9,1\n", "UTF-8"),
        (b'image,patient\n"a,1\n', "','"),
    ],
)
def test_a_damaged_table_is_named(path: Path, content: bytes, named: str) -> None:
    path.write_bytes(content)
    with refused(path, named, by=DataError):
        read_sheet(path)


def test_a_missing_and_a_cut_file_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"image\n" + b"a.png\n" * 1000)[:-20])
    for file in (tmp_path / "none.csv", tmp_path / "none.xlsx", cut):
        with refused(file, by=DataError):
            read_sheet(file)


def test_a_column_is_found_or_the_nearest_proposed(path: Path) -> None:
    path.write_text("image,patient,image\na,1,b\n")
    sheet = read_sheet(path)
    assert sheet.position("patient", "key") == 1
    with refused("'patent'", "'patient'", "key", by=DataError):
        sheet.position("patent", "key")
    with refused("two columns 'image'", by=DataError):
        sheet.position("image", "key")


def test_long_lists_of_rows_are_cut() -> None:
    assert rows_text([7]) == "row 7"
    assert rows_text(list(range(2, 12))) == "rows 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_columns_are_streamed_with_the_numbers_of_a_spreadsheet(path: Path) -> None:
    path.write_text("\n\na, b ,c\n1,2,3\n\n4, 5 ,\n")
    assert list(stream_columns(path, ["b", "a"], "key")) == [(4, ("2", "1")), (6, ("5", "4"))]
    with refused("t.csv", "'d'", "key", by=DataError):
        list(stream_columns(path, ["d"], "key"))
    path.write_text("a,b\n1,2\n\n3\n")
    with refused("t.csv row 4", "1 cells", by=DataError):
        list(stream_columns(path, ["a"], "key"))


def test_lines_are_numbered_as_an_editor_shows_them(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\r\n[1]")
    assert list(read_lines(path)) == [(1, "{}\r\n"), (3, "[1]")]
    for content, named in ((b"\xe9", "UTF-8"), (b"x" * 2**20, "line")):
        path.write_bytes(content)
        with refused("t.csv", named, by=DataError):
            list(read_lines(path))


# Workbooks and .parquet


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in this process, so that a test can change what reads them."""
    monkeypatch.setattr(reading, "workbook_rows", lambda path, only: workbooks.decode(path, only, path))


def workbook(path: Path, *sheets: list[list[object]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for rows in sheets:
        sheet = book.create_sheet()
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def with_part(path: Path, name: str, content: str) -> Path:
    """Write a workbook of which one part is replaced."""
    whole = io.BytesIO(workbook(path, [["image", "Mass"], ["a.png", "x"]]).read_bytes())
    with (
        zipfile.ZipFile(whole) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for part in old.namelist():
            new.writestr(part, content if part == name else old.read(part))
    return path


def sheet_of(rows: str) -> str:
    return f"<worksheet {MAIN}><sheetData>{rows}</sheetData></worksheet>"


@pytest.mark.complete
def test_cells_are_what_a_person_sees(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    for row in (
        [None, None],
        [" image ", "id", "day", "Mass", "Edema", None],
        ["a.png", 17, datetime(2024, 3, 1), 1, 0.0, None],
        ["b.png", 1234567890123456, datetime(2024, 3, 1, 12, 30), True, None],
        [None],
        ["c.png", 18, date(2024, 3, 1), "yes", 0.5],
    ):
        sheet.append(row)
    sheet["B3"].number_format = "00000"
    book.create_sheet("empty")
    book.create_sheet("hidden").append(["lists"])
    book["hidden"].sheet_state = "hidden"
    book.save(tmp_path / "t.xlsx")
    read = read_sheet(tmp_path / "t.xlsx")
    assert read.header == ("image", "id", "day", "Mass", "Edema")
    assert read.rows == (
        ("a.png", "00017", "2024-03-01", "1", "0"),
        ("b.png", "1234567890123456", "2024-03-01 12:30:00", "TRUE", ""),
        ("c.png", "18", "2024-03-01", "yes", "0.5"),
    )
    assert read.numbers == (3, 4, 6)


@pytest.mark.complete
def test_a_parquet_is_read_like_the_table_that_was_written(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "image": ["a.png", "b.png", None],
            "patient": [1, 2, 3],
            "Mass": [1.0, 0.0, None],
            "Edema": [True, False, None],
            "site": pd.Categorical(["x", "y", None]),
            "day": [datetime(2024, 3, 1), datetime(2024, 3, 1, 8), None],
            "dose": [Decimal("1.00"), Decimal("0.25"), None],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    read = read_sheet(tmp_path / "t.parquet")
    assert read.header == tuple(frame.columns)
    assert read.rows == (
        ("a.png", "1", "1", "TRUE", "x", "2024-03-01", "1"),
        ("b.png", "2", "0", "FALSE", "y", "2024-03-01 08:00:00", "0.25"),
        ("", "3", "", "", "", "", ""),
    )
    assert read.numbers == (2, 3, 4)


@pytest.mark.usefixtures("here")
def test_what_is_no_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.xlsx").write_bytes(b"\xd0\xcf\x11\xe0 of Excel 97")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    parquet.write_table(pa.table({"image": ["a"], "Findings": [["Mass"]]}), tmp_path / "lists.parquet")
    workbook(tmp_path / "none.xlsx", [])
    workbook(tmp_path / "wide.xlsx", [["image", "Mass"], ["a.png", 1, "a remark"]])
    workbook(tmp_path / "two.xlsx", [["image"], ["a.png"]], [["other"], [1]])
    workbook(tmp_path / "formula.xlsx", [["image", "Mass"], ["a.png", "=1+0"]])
    for name, *named in (
        ("old.xlsx", ".xlsx"),
        ("cut.parquet",),
        ("lists.parquet", "'Findings'"),
        ("none.xlsx", "empty"),
        ("wide.xlsx", "row 2 has 3 cells"),
        ("two.xlsx", "'Sheet', 'Sheet1'"),
        ("formula.xlsx", "formulas"),
    ):
        with refused(name, *named, by=DataError):
            read_sheet(tmp_path / name)
    for name, package in (("t.xlsx", "openpyxl"), ("t.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"")
        monkeypatch.setitem(sys.modules, package, None)
        with refused(name, "suture[tables]", by=DataError):
            read_sheet(tmp_path / name)


@pytest.mark.usefixtures("here")
def test_a_hostile_sheet_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbooks, "MOST_CELLS", 1_000_000)
    assert read_sheet(workbook(tmp_path / "fair.xlsx", [["image"], ["a.png"]])).rows == (("a.png",),)
    for rows in ('<row><c r="ZZZ1"/></row>' * 300, f'<row r="{10**12}"><c r="A1"/></row>'):
        with refused("t.xlsx", "1,000,000", by=DataError):
            read_sheet(with_part(tmp_path / "t.xlsx", SHEET, sheet_of(rows)))
    monkeypatch.setattr(workbooks, "MOST_TEXT", 100_000)
    monkeypatch.setattr(openpyxl, "load_workbook", None)
    with refused("t.xlsx", "100,000", by=DataError):
        read_sheet(with_part(tmp_path / "t.xlsx", "xl/theme/theme1.xml", "x" * 100_000))


@pytest.mark.complete
def test_a_formula_is_read_as_its_result_and_never_as_blank(tmp_path: Path) -> None:
    cells = (
        '<c t="str"><f>"a.png"</f><v>a.png</v></c><c><f>1+0</f><v>1</v></c><c t="str"><f>""</f><v></v></c>'
    )
    head = "".join(f'<c t="inlineStr"><is><t>{name}</t></is></c>' for name in ("image", "Mass", "Edema"))
    sheet = sheet_of(f"<row>{head}</row><row>{cells}</row>")
    assert read_sheet(with_part(tmp_path / "t.xlsx", SHEET, sheet)).rows == (("a.png", "1", ""),)


@pytest.mark.complete
def test_a_cell_of_a_parquet_is_measured_before_it_is_copied(tmp_path: Path) -> None:
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * (1 << 20)]))
    parquet.write_table(pa.table({"image": long}), tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with refused("t.parquet", "1,048,576", "524,288", by=DataError):
        read_sheet(tmp_path / "t.parquet")
