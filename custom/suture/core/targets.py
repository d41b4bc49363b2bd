"""Text of other parties as data in files that programs interpret: one encoder for each kind of file.

Others are in `suture.core.printable` (terminals, logs), `suture.core.spreadsheets` (CSV) and the templates of
`suture_results.report` (HTML). Libraries write TOML, JSON and YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape

from suture.core.printable import escaped, printable, printable_lines

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
    return _NUMBERED.sub(r"\1\\", _MARKDOWN.sub(r"\\\g<0>", escaped(str(text))))


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
    return f"$'{''.join(map(_quoted, value))}'"


def _quoted(c: str) -> str:
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
