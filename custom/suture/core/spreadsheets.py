"""Text of strangers in a CSV or on a terminal: names of files, patients and classes."""

from __future__ import annotations

import re

from suture.core.printable import escaped

_FORMULA = re.compile("'*[=+\\-@\uff1d\uff0b\uff0d\uff20]")
"""What a spreadsheet takes for the beginning of a formula, the last four are full-width forms; or such a text
with an apostrophe before it already."""


def as_cell(text: str) -> str:
    """Return a text that a spreadsheet shows, and a terminal prints, as it is.

    An apostrophe goes before what would be a formula (OWASP, CSV Injection), and a character that is not
    printable becomes its escape in Python. A name that is printable and begins otherwise stays the same.

    >>> as_cell("ward 7/a.png"), as_cell("=1+1")
    ('ward 7/a.png', "'=1+1")
    >>> print(as_cell("a\\x1b[2J"))
    a\\x1b[2J
    """
    return no_formula(escaped(text))


def no_formula(text: str) -> str:
    """Return a text with an apostrophe before what would be a formula, for a table that Suture reads back."""
    return f"'{text}" if _FORMULA.match(text) else text


def from_cell(text: str) -> str:
    """Return the text of a cell without the apostrophe of `no_formula`.

    >>> from_cell("'=1+1"), from_cell("'tis"), from_cell(as_cell("'-1"))
    ('=1+1', "'tis", "'-1")
    """
    return text[1:] if text[:1] == "'" and _FORMULA.match(text) else text
