"""Text of other parties, made fit for where it is shown: a terminal, a log, a CSV, a file for a program.

There is one encoder for each of them. HTML's is in the templates of `suture_results.report`; libraries
write TOML, JSON and YAML.
"""

from __future__ import annotations

import csv
import io
import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape

LONGEST_LINE = 500
"""Largest number of characters of a text of another party."""

_LONGEST_WARNING = 2_000
"""Largest number of characters of a library's warning."""


def printable(text: object, most: int = LONGEST_LINE) -> str:
    """Return a text on one line of at most `most` characters, with control characters as their escapes.

    An escape sequence could overwrite what a terminal shows, and a new line could forge another message.

    >>> printable("lost\\nround 99/99")
    'lost\\\\nround 99/99'
    """
    line = escape_text(str(text)[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


JOINERS = "\u200c\u200d"
"""Zero-width non-joiner and joiner: invisible, and a part of the spelling in some scripts."""


def escape_text(text: str) -> str:
    """Return a text with the escapes of Python in place of characters that are not printable."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def printable_lines(text: str) -> str:
    """Return a text of this program, which may have several lines, with other control characters escaped."""
    return "\n".join(escape_text(line) for line in text.split("\n"))


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def clean_warnings() -> None:
    """Have what libraries warn and log printed without control characters: pydicom quotes files.

    It is for a process with a terminal: warnings, and records of logs for which nobody has set a handler.
    """
    written = warnings.formatwarning

    def format_warning(message: Any, *where: Any, **line: Any) -> str:
        return printable_lines(written(printable(message, _LONGEST_WARNING), *where, **line))

    warnings.formatwarning = format_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())
        logging.root.addHandler(logging.lastResort)  # else opacus adds one, with dates, where it is imported


def number_of(n: int, what: str) -> str:
    """Return a number of things in words.

    >>> number_of(1, "image"), number_of(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def printable_values(value: Any) -> Any:
    """Return parsed JSON with every text on one line; none is cut."""
    if isinstance(value, dict):
        return {printable_values(key): printable_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [printable_values(inner) for inner in value]
    return escape_text(value) if isinstance(value, str) else value


_MARKDOWN = re.compile(
    r"[\\`*_\[\]{}<>|#~&$@]"  # markup, HTML, tables, mathematics, mentions
    r"|^[-+=]"  # lists and headings
    r"|:(?=[\w+-]+:|//)|(?<=\bwww)\."  # emoji and links of GitHub
)

_NUMBERED = re.compile(r"^(\d{1,9})(?=[.)](\s|$))")

_MONAI = re.compile(r"^[$@%]|#|[@%]::")

_LO = 64
"""Characters of a short text of DICOM (PS3.5, 6.2: LO)."""


def markdown(text: object) -> str:
    """Return a text as one line that Markdown shows as it is.

    >>> markdown("a|<b>"), markdown("- 1. x"), markdown("T<2, N=0")
    ('a\\\\|\\\\<b\\\\>', '\\\\- 1. x', 'T\\\\<2, N=0')
    """
    return _NUMBERED.sub(r"\1\\", _MARKDOWN.sub(r"\\\g<0>", escape_text(str(text))))


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown; its cells are Markdown, in which only a ``|`` is escaped."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def monai(value: Any) -> Any:
    """Return plain values that a MONAI bundle's configuration gives back unchanged: nothing is evaluated.

    MONAI evaluates a text that begins with ``$``, looks up one that begins with ``@`` or ``%``, makes ``::``
    of ``#``, and computes references such as ``%::`` anywhere. Such a text becomes an expression that is a
    quoted text alone. Keys must be Suture's own.

    >>> monai(["Mass", "$exit()"])
    ['Mass', "$'\\\\x24exit\\\\x28\\\\x29'"]
    """
    if isinstance(value, dict):
        return {key: monai(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [monai(inner) for inner in value]
    if not isinstance(value, str) or not _MONAI.search(value):
        return value
    return f"$'{''.join(map(_quote, value))}'"


def _quote(c: str) -> str:
    """Return a character inside of a literal of Python: letters and digits as they are, others by number."""
    if c.isascii() and c.isalnum():
        return c
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\U{ord(c):08x}"


def dicom(text: object, most: int = _LO) -> str:
    """Return a text as one value of DICOM: without a backslash, which would begin another value.

    >>> dicom("a\\\\b")
    'a/b'
    """
    return printable(text).replace("\\", "/")[:most].strip()


def rich(text: object) -> str:
    """Return a text for rich's markup: its brackets are no style, and the terminal obeys none of it."""
    return escape(printable_lines(str(text)))


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
    return no_formula(escape_text(text))


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
