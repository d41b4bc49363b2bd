"""Text of other parties in a form that is fit for a terminal, a log and a report."""

from __future__ import annotations

import unicodedata
from typing import Any

LONGEST_LINE = 500
"""Largest number of characters of a text of another party."""


def printable(text: object, most: int = LONGEST_LINE) -> str:
    """Return a text on one line of at most `most` characters, with control characters as their escapes.

    An escape sequence could overwrite what a terminal shows, and a new line could forge another message.

    >>> printable("lost\\nround 99/99")
    'lost\\\\nround 99/99'
    """
    line = escaped(str(text)[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


JOINERS = "\u200c\u200d"
"""Zero-width non-joiner and joiner: invisible, and part of the spelling in some scripts."""

_JOINING = frozenset(
    "ARABIC SYRIAC MONGOLIAN NKO MANDAIC DEVANAGARI BENGALI GURMUKHI GUJARATI ORIYA TAMIL TELUGU KANNADA "
    "MALAYALAM SINHALA KHMER MYANMAR TIBETAN".split()
)
_VIRAMA = 9
"""Unicode's combining class of the signs that take a consonant's vowel."""


def joins(text: str, at: int) -> bool:
    """Whether a joiner is where a script needs it: between two letters, or after a virama (RFC 5892, A.1)."""
    before, after = _script(text[at - 1 : at]), _script(text[at + 1 : at + 2])
    return before in _JOINING and (before == after or unicodedata.combining(text[at - 1]) == _VIRAMA)


def _script(c: str) -> str:
    """Return the script of a letter or mark, as its name begins; empty for another character."""
    return unicodedata.name(c, "").split(" ")[0] if c and unicodedata.category(c)[0] in "LM" else ""


def escaped(text: str) -> str:
    """Return a text with the escapes of Python in place of characters that are not printable."""
    if text.isprintable():
        return text
    shown = (
        c if c.isprintable() or (c in JOINERS and joins(text, at)) else c.encode("unicode_escape").decode()
        for at, c in enumerate(text)
    )
    return "".join(shown)


def printable_lines(text: str) -> str:
    """Return a text of this program, which may have several lines, with other control characters escaped."""
    return "\n".join(escaped(line) for line in text.split("\n"))


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
