"""What the cells of a label column mean: present, absent or unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from suture.core.printable import number_of

Meaning = Literal[0, 1, "unknown"]

_DIGITS: dict[str, Meaning] = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "": "unknown"}
"""Cells that need no word about them. pandas writes 1.0 and 0.0 as soon as one cell of a column is blank."""

_PRESENT = """yes y true pos positive present 1,0 checked ja j oui si sí sì sim tak ano áno da evet igen kyllä
    taip ya có ναι да так есть hai はい あり 有 是 예 유 نعم بله כן positiv positivo positiva positif presente
    présent présente vorhanden 陽性 阳性 양성"""
_ABSENT = """no n false neg negative absent 0,0 unchecked nein nee nej nei non não nao nie ne nu hayır nem ei
    tidak không όχι нет ні не いいえ なし 無 无 否 아니오 무 لا خیر לא negativ negativo negativa négatif
    negatif ausente assente absente nicht_vorhanden 陰性 阴性 음성"""
_OPEN = """-1 -1.0 -1,0 uncertain unknown nan na n/a n.a. <na> #nv #n/v . k.a. ? todo tbd null #n/a missing
    unclear unklar unbekannt incertain inconnu incierto desconocido incerto"""
_WORDS: dict[str, Meaning] = {
    **dict.fromkeys(_PRESENT.split(), 1),
    **dict.fromkeys((word.replace("_", " ") for word in _ABSENT.split()), 0),
    **dict.fromkeys(_OPEN.split(), "unknown"),
}
"""Other cells with one plain meaning, in any case; -1 is CheXpert's uncertain, 1,0 has a decimal comma.

A word that means something else in another table, such as x, +, t and f, is not among them: `values` says it.
"""

NUMBERS: dict[Meaning, float] = {0: 0.0, 1: 1.0, "unknown": float("nan")}
"""Each meaning as a label."""

_WORDS_OF: dict[Meaning, str] = {0: "absent", 1: "present", "unknown": "unknown"}


class Cells:
    """The meanings of the cells of one table.

    Args:
        own: meanings that the site gives, before `_DIGITS` and `_WORDS`; upper and lower case are the same.
    """

    def __init__(self, own: Mapping[str, Meaning]) -> None:
        self._meanings = {**_WORDS, **_DIGITS, **{word.strip().casefold(): to for word, to in own.items()}}
        self._own = {word.strip().casefold() for word in own}

    def number(self, cell: str) -> float | None:
        """Return 1.0, 0.0 or NaN (unknown); None for a cell without a meaning."""
        meaning = self._meanings.get(cell.casefold())
        return None if meaning is None else NUMBERS[meaning]

    def leaves_open(self, name: str) -> bool:
        """Whether a text in a list of findings says that the image was not judged, such as ``?``."""
        return name != "" and self._meanings.get(name.casefold()) == "unknown"

    def said(self, cells: Iterable[str]) -> list[str]:
        """Say which words had a meaning that the site did not give itself, and how often."""
        found = Counter(cells)
        return [
            f"{cell!r} is read as {_WORDS_OF[self._meanings[word]]} ({number_of(n, 'cell')})"
            for cell, n in sorted(found.items())
            if (word := cell.casefold()) in _WORDS and word not in self._own
        ]
