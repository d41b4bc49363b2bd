"""Text of other parties in a form that is fit for a terminal, a log and a report."""

from __future__ import annotations

import logging
import warnings
from typing import Any

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
    line = escaped(str(text)[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


JOINERS = "\u200c\u200d"
"""Zero-width non-joiner and joiner: invisible, and a part of the spelling in some scripts."""


def escaped(text: str) -> str:
    """Return a text with the escapes of Python in place of characters that are not printable."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def printable_lines(text: str) -> str:
    """Return a text of this program, which may have several lines, with other control characters escaped."""
    return "\n".join(escaped(line) for line in text.split("\n"))


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
    return escaped(value) if isinstance(value, str) else value
