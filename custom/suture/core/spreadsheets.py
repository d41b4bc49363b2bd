"""Text of strangers in a CSV or on a terminal: names of files, patients and classes."""

from __future__ import annotations

from suture.core.printable import escaped

_FORMULA = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
"""What a spreadsheet takes for the beginning of a formula; the last four are their full-width forms."""


def as_cell(text: str) -> str:
    """Return a text that a spreadsheet shows, and a terminal prints, as it is.

    An apostrophe goes before what would be a formula (OWASP, CSV Injection), and a character that is not
    printable becomes its escape in Python. A name that is printable and begins otherwise stays the same.

    >>> as_cell("ward 7/a.png"), as_cell("=1+1")
    ('ward 7/a.png', "'=1+1")
    >>> print(as_cell("a\\x1b[2J"))
    a\\x1b[2J
    """
    shown = escaped(text)
    return f"'{shown}" if shown[:1] in _FORMULA else shown
