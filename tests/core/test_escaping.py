"""Texts of others: no formula of a spreadsheet, no command of a terminal, no forged line."""

from __future__ import annotations

import csv
import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import RejectedUpdate
from suture.core.escaping import (
    LONGEST_LINE,
    as_cell,
    from_cell,
    no_formula,
    printable,
    printable_lines,
    printable_values,
)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        *((text, text) for text in ("", "ward 7/ä;b,c.png", 'a"b', "P-17", "Barrett's", "0-1")),
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


def test_a_long_cell_is_read_once() -> None:
    """Looking again from each of its characters would take hours."""
    for text in ("\n", "; ", '"', ";'"):
        long = text * 1_000_000
        assert from_cell(no_formula(long)) == long


FORGED = "lost\x1b[1A\x1b[2K\r\nround 99/99  1.0 s\x9b2J\u202e\u2028end"


def test_control_characters_become_their_escapes_on_one_short_line() -> None:
    assert printable(FORGED).isprintable()
    assert printable(FORGED).startswith(r"lost\x1b[1A\x1b[2K\r\nround 99/99")
    assert printable("Vidéo, 5 µm, 胸部") == "Vidéo, 5 µm, 胸部"
    assert len(printable("x" * 4_000_000)) == LONGEST_LINE
    error = str(RejectedUpdate(f"unknown message type {FORGED * 10**5}"))
    assert (len(error), error.isprintable()) == (LONGEST_LINE, True)
    # An own text keeps its lines.
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"
    assert printable_lines("x" * 1000) == "x" * 1000
    found = printable_values({FORGED: [FORGED, {"a": FORGED}], "n": 1, "none": None})
    assert found == {printable(FORGED): [printable(FORGED), {"a": printable(FORGED)}], "n": 1, "none": None}


@pytest.mark.complete
def test_a_library_that_sets_up_logging_does_not_change_the_lines_of_ours() -> None:
    """opacus does so where it is imported."""
    program = (
        "import logging; from suture.core.escaping import clean_warnings; clean_warnings()\n"
        "logging.basicConfig(format='%(asctime)s THEIRS %(message)s', datefmt='%m/%d/%Y')\n"
        "logging.getLogger('opacus').info('unseen'); logging.getLogger('suture').warning('a\\x1b line')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "a\\x1b line\n"
