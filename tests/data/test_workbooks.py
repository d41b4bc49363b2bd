"""suture.data.workbooks: tables of .xlsx and .parquet as the text that a person sees."""

from __future__ import annotations

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

import suture.data.reading as reading
import suture.data.workbooks as workbooks
from suture.core.errors import DataError
from suture.data.reading import read_sheet

MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
SHEET = "xl/worksheets/sheet1.xml"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in this process, so that a test can change what reads them."""
    monkeypatch.setattr(reading, "workbook_rows", lambda path, only: workbooks.decode(path, only, path))


def workbook(path: Path, rows: list[list[object]], *more: list[list[object]]) -> Path:
    """Write a workbook of some sheets."""
    book = openpyxl.Workbook()
    book.remove(book.active)
    for some in (rows, *more):
        sheet = book.create_sheet()
        for row in some:
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


@pytest.mark.complete
def test_a_parquet_of_lists_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": ["a.png"], "Findings": [["Mass"]]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: column 'Findings' holds list<.*; write it as text"):
        read_sheet(tmp_path / "t.parquet")


@pytest.mark.complete
def test_of_several_sheets_none_is_guessed(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", [["image"], ["a.png"]], [["other"], [1]])
    with pytest.raises(DataError, match=r"t\.xlsx has 2 sheets, 'Sheet', 'Sheet1'; save the one to use"):
        read_sheet(path)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "package"), [("t.xlsx", "openpyxl"), ("t.parquet", "pyarrow")])
def test_a_package_that_is_missing_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf'{name}: .* pip install "suture\[tables\]"; or save it as CSV'):
        read_sheet(tmp_path / name)


@pytest.mark.complete
def test_what_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    for name, data, said in (
        ("old.xlsx", b"\xd0\xcf\x11\xe0 of Excel 97", r"is not an \.xlsx .*without a password"),
        ("t.parquet", b"PAR1 and no more", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name} {said}"):
            read_sheet(tmp_path / name)
    wide = workbook(tmp_path / "wide.xlsx", [["image", "Mass"], ["a.png", 1, "a remark"]])
    with pytest.raises(DataError, match=r"wide\.xlsx row 2 has 3 cells where the header has 2"):
        read_sheet(wide)
    with pytest.raises(DataError, match=r"none\.xlsx is empty"):
        read_sheet(workbook(tmp_path / "none.xlsx", []))
    with pytest.raises(DataError, match=r"absent\.xlsx cannot be read: .*No such file"):
        read_sheet(tmp_path / "absent.xlsx")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('<row><c r="ZZZ1"/></row>' * 300, "more than 1,000,000 cells"),
        (f'<row r="{10**12}"><c r="A1"/></row>', "more than 1,000,000 cells"),
    ],
)
def test_a_hostile_sheet_is_refused_before_it_is_held(
    rows: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbooks, "MOST_CELLS", 1_000_000)
    assert read_sheet(workbook(tmp_path / "fair.xlsx", [["image"], ["a.png"]])).rows == (("a.png",),)
    sheet = f"<worksheet {MAIN}><sheetData>{rows}</sheetData></worksheet>"
    with pytest.raises(DataError, match=rf"t\.xlsx .*{said}"):
        read_sheet(with_part(tmp_path / "t.xlsx", SHEET, sheet))


@pytest.mark.usefixtures("here")
def test_a_workbook_that_unpacks_to_too_much_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbooks, "MOST_TEXT", 100_000)
    monkeypatch.setattr(openpyxl, "load_workbook", None)
    with pytest.raises(DataError, match=r"unpacks to .* bytes; .*100,000"):
        read_sheet(with_part(tmp_path / "t.xlsx", "xl/theme/theme1.xml", "x" * 100_000))


@pytest.mark.complete
def test_a_formula_is_read_as_its_result_and_never_as_blank(tmp_path: Path) -> None:
    rows = [["image", "Mass"], ["a.png", "=1+0"]]
    with pytest.raises(DataError, match=r"t\.xlsx has formulas without results; open it in Excel"):
        read_sheet(workbook(tmp_path / "t.xlsx", rows))
    cells = (
        '<c t="str"><f>"a.png"</f><v>a.png</v></c><c><f>1+0</f><v>1</v></c><c t="str"><f>""</f><v></v></c>'
    )
    head = "".join(f'<c t="inlineStr"><is><t>{name}</t></is></c>' for name in ("image", "Mass", "Edema"))
    sheet = f"<worksheet {MAIN}><sheetData><row>{head}</row><row>{cells}</row></sheetData></worksheet>"
    assert read_sheet(with_part(tmp_path / "t.xlsx", SHEET, sheet)).rows == (("a.png", "1", ""),)


@pytest.mark.complete
def test_a_cell_of_a_parquet_is_measured_before_it_is_copied(tmp_path: Path) -> None:
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * (1 << 20)]))
    parquet.write_table(pa.table({"image": long}), tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with pytest.raises(DataError, match=r"t\.parquet has a cell of 1,048,576 bytes; .*524,288"):
        read_sheet(tmp_path / "t.parquet")
