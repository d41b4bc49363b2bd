"""Cells that no spreadsheet takes for a formula and no terminal for a command."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.escaping import as_cell, from_cell, no_formula


@pytest.mark.parametrize("text", ["", "a.png", "ward 7/ä;b,c.png", 'a"b', "P-17", "Barrett's", "0-1"])
def test_an_ordinary_name_stays_the_same(text: str) -> None:
    assert as_cell(text) == text


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\uff1d1", "'\uff1d1"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nb\rc\td", "a\\nb\\rc\\td"),
        ("\t=1", "\\t=1"),
        ("a;=cmd|x!A0.png", "a;'=cmd|x!A0.png"),
        ('a;b; "-1', "a;b; \"'-1"),
        ("\udcff.png", "\\udcff.png"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
    ],
)
def test_what_a_program_would_obey_is_written_out(text: str, cell: str) -> None:
    assert as_cell(text) == cell


@pytest.mark.complete
@given(st.text())
def test_a_cell_is_printable_and_no_formula_and_survives_a_csv(text: str) -> None:
    cell = as_cell(text)
    assert cell.isprintable()
    assert cell[:1] not in {*"=+-@\t\r\uff1d\uff0b\uff0d\uff20"}
    file = io.StringIO()
    csv.writer(file).writerow([cell, "x"])
    assert next(csv.reader(io.StringIO(file.getvalue()))) == [cell, "x"]


SIGNS = st.text(st.sampled_from("a'\"=+-@\uff1d; \t\r\n,|"), max_size=12)


@given(SIGNS)
def test_no_cell_is_a_formula_where_cells_are_separated_otherwise(text: str) -> None:
    """A German Excel separates by ``;``, and takes a quote for one only where a cell begins."""
    cell = no_formula(text)
    assert from_cell(cell) == text
    file = io.StringIO()
    csv.writer(file).writerows([[cell, "x"], ["x", cell]])
    for separator in ";\t":
        for row in csv.reader(io.StringIO(file.getvalue(), newline=""), delimiter=separator):
            assert not [one for one in row if one[:1] in {*"=+-@\uff1d"}]


@pytest.mark.parametrize("text", ["\n", ";", "; ", '"', "'", ";'", "\t "])
def test_a_long_cell_is_read_once(text: str) -> None:
    """Looking again from each of its characters would take hours."""
    long = text * 1_000_000
    assert from_cell(no_formula(long)) == long
