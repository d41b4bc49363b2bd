"""Text of strangers in a CSV or on a terminal: names of files, patients and classes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from suture.core.printable import escaped

_SIGN = "'*[=+\\-@\uff1d\uff0b\uff0d\uff20]"
"""What begins a formula, the last four are full-width forms; an apostrophe may be before it already."""

_START = '(^|[;\t\r\n][ "]*)'
"""Where a cell begins: also in the spreadsheet of a country that separates by ``;``, where quotes within a
cell hold nothing together."""

_FORMULA = re.compile(f"{_START}({_SIGN})")
_MADE_TEXT = re.compile(f"{_START}'({_SIGN})")


def as_cell(text: str) -> str:
    """Return a text that a spreadsheet shows, and a terminal prints, as it is.

    An apostrophe goes before what would be a formula (OWASP, CSV Injection), also after ``;``, and a
    character that is not printable becomes its escape in Python. Any other printable name stays the same.

    >>> as_cell("ward 7/a.png"), as_cell("=1+1"), as_cell("a;=1.png")
    ('ward 7/a.png', "'=1+1", "a;'=1.png")
    >>> print(as_cell("a\\x1b[2J"))
    a\\x1b[2J
    """
    return no_formula(escaped(text))


def no_formula(text: str) -> str:
    """Return a text with an apostrophe before what would be a formula, for a table that Suture reads back."""
    return _FORMULA.sub(r"\1'\2", text)


def as_csv(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table that Suture reads back, without formulas, as the text of a CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(no_formula, row) for row in (header, *rows))
    return text.getvalue()


def from_cell(text: str) -> str:
    """Return the text of a cell without the apostrophes of `no_formula`.

    >>> from_cell("'=1+1"), from_cell("'tis"), from_cell(as_cell("'-1"))
    ('=1+1', "'tis", "'-1")
    """
    return _MADE_TEXT.sub(r"\1\2", text) if "'" in text else text
