"""suture.data.reading: CSV files as they come."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from suture.core.errors import DataError
from suture.data.reading import read_lines, read_sheet, rows_text, stream_columns


def test_rows_are_numbered_as_a_spreadsheet_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeffimage , patient\r\n a.png ,1\r\n\r\nb.png,2\r\n", encoding="utf-8")
    sheet = read_sheet(path)
    assert sheet.header == ("image", "patient")
    assert sheet.numbers == (2, 4)
    assert sheet.cells(0) == ["a.png", "b.png"]


def test_a_gzipped_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"image\na.png\n"))
    assert read_sheet(path).cells(0) == ["a.png"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"image,patient\n", "no rows"),
        (b"image,patient\na,1\nb\n", "row 3 has 1 cells where the header has 2"),
        (b"image,patient\na,1,2\n", "row 2 has 3 cells"),
        (b"image,patient\n\xe9,1\n", "not UTF-8"),
        (b'image,patient\n"a,1\n', "not a table with the delimiter ','"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_sheet(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_and_a_cut_file_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"image\n" + b"a.png\n" * 1000)[:-20])
    for path in (tmp_path / "none.csv", cut):
        with pytest.raises(DataError, match=f"{path} cannot be read"):
            read_sheet(path)


def test_a_column_is_found_or_the_nearest_proposed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("image,patient,image\na,1,b\n")
    sheet = read_sheet(path)
    assert sheet.position("patient", "key") == 1
    with pytest.raises(DataError, match=r"no column 'patent'; did you mean 'patient'\? \(key names it\)"):
        sheet.position("patent", "key")
    with pytest.raises(DataError, match="two columns 'image'"):
        sheet.position("image", "key")


def test_long_lists_of_rows_are_cut() -> None:
    assert rows_text([7]) == "row 7"
    assert rows_text(list(range(2, 12))) == "rows 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_columns_are_streamed_with_the_numbers_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n\na, b ,c\n1,2,3\n\n4, 5 ,\n")
    assert list(stream_columns(path, ["b", "a"], "key")) == [(4, ("2", "1")), (6, ("5", "4"))]
    with pytest.raises(DataError, match=r"t\.csv has no column 'd'; .*\(key names it\)"):
        list(stream_columns(path, ["d"], "key"))
    path.write_text("a,b\n1,2\n\n3\n")
    with pytest.raises(DataError, match=r"t\.csv row 4 has 1 cells where the header has 2"):
        list(stream_columns(path, ["a"], "key"))


def test_lines_are_numbered_as_an_editor_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\r\n[1]")
    assert list(read_lines(path)) == [(1, "{}\r\n"), (3, "[1]")]
    for content, says in ((b"\xe9", "not UTF-8"), (b"x" * 2**20, "a line of more than")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=says):
            list(read_lines(path))
