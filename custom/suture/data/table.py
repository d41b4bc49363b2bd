"""A data set before any image is decoded: patient, image or document, labels and split of each row.

`Cells` are what the cells of a label column mean: present, absent or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.escaping import number_of
from suture.core.labels import LabelSet

Meaning = Literal[0, 1, "unknown"]

_DIGITS: dict[str, Meaning] = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "": "unknown"}
"""Cells that need no word about them. pandas writes 1.0 and 0.0 as soon as one cell of a column is blank."""

_PRESENT = """yes y true pos positive present 1,0 checked ja j oui si sí sì sim tak ano áno da evet igen kyllä
    taip ya có ναι да так есть hai はい あり 有 是 예 유 نعم بله כן positiv positivo positiva positif presente
    présent présente vorhanden 陽性 阳性 양성"""

_ABSENT = """no n keine false neg negative absent 0,0 unchecked nein nee nej nei non não nao nie ne nu hayır
    nem ei tidak không όχι нет ні не いいえ なし 無 无 否 아니오 무 لا خیر לא negativ negativo negativa
    négatif negatif ausente assente absente nicht_vorhanden 陰性 阴性 음성"""

_OPEN = """-1 -1.0 -1,0 uncertain unknown nan na n/a n.a. <na> #nv #n/v . k.a. ? todo tbd null #n/a missing
    unclear unklar unbekannt incertain inconnu incierto desconocido incerto k._a. keine_angabe n.b. n._b.
    fehlt fehlend nicht_beurteilbar nicht_beurteilt nicht_befundet entfällt entfaellt ausstehend s._text
    siehe_text not_assessed not_available not_reported not_read not_specified pending not_evaluable"""

_WORDS: dict[str, Meaning] = {
    **dict.fromkeys(_PRESENT.split(), 1),
    **dict.fromkeys((word.replace("_", " ") for word in _ABSENT.split()), 0),
    **dict.fromkeys((word.replace("_", " ") for word in _OPEN.split()), "unknown"),
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

    def describe(self, cells: Iterable[str]) -> list[str]:
        """Say which words had a meaning that the site did not give itself, and how often."""
        found = Counter(cells)
        return [
            f"{cell!r} is read as {_WORDS_OF[self._meanings[word]]} ({number_of(n, 'cell')})"
            for cell, n in sorted(found.items())
            if (word := cell.casefold()) in _WORDS and word not in self._own
        ]


Split = Literal["train", "validation", "test"]

Which = Split | Literal["all"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Table:
    """One row per image, or per document.

    Attributes:
        labels: the classes of the columns of `y`.
        images: name of each image within `root`, n of them; of documents, an identifier.
        patients: patient identifier of each row; a patient is never in two splits.
        y: labels [n, c] as float32: 1 present, 0 absent, NaN unknown.
        split: ``train``, ``validation`` or ``test`` for each row; the empty string where a row is unused.
        root: the folder of the images, or a tar archive (or folder of archives) that holds them; the file or
            folder that documents came from.
        texts: the document of each row, where the data are text.
        attributes: the value of each row by which figures are broken down (such as a skin tone), empty where
            unknown; None where the site names no such column. Training does not see it.
        follow_links: whether images may lie where links within `root` lead out of it.
        bits: the true depth of images that are stored with 16 bits; None for all 16.
        modalities: those that DICOM images may be of, as the model is for no others; none for any.
    """

    labels: LabelSet
    images: tuple[str, ...]
    patients: tuple[str, ...]
    y: NDArray[np.float32]
    split: tuple[str, ...]
    root: Path
    texts: tuple[str, ...] | None = None
    attributes: tuple[str, ...] | None = None
    follow_links: bool = False
    bits: int | None = None
    modalities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.images)
        texts = n if self.texts is None else len(self.texts)
        if {len(self.patients), len(self.split), texts} != {n} or self.y.shape != (n, len(self.labels)):
            raise DataError(
                f"{self.root}: {n:,} images, {texts:,} texts, {len(self.patients):,} patients, "
                f"{len(self.split)} splits and labels of shape {self.y.shape} have different lengths"
            )

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> Table:
        """The rows that a mask or an index array selects, in that order."""
        where = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        return replace(
            self,
            images=tuple(self.images[i] for i in where),
            patients=tuple(self.patients[i] for i in where),
            y=self.y[where],
            split=tuple(self.split[i] for i in where),
            texts=None if self.texts is None else tuple(self.texts[i] for i in where),
            attributes=None if self.attributes is None else tuple(self.attributes[i] for i in where),
        )

    def of(self, split: Split) -> Table:
        """The rows of one split."""
        return self.rows(np.array([s == split for s in self.split], dtype=np.bool_))

    def restrict(self, labels: LabelSet) -> Table:
        """The same rows with the columns of `labels`, in their order; a class that is not here is unknown."""
        positions = np.array(self.labels.align(labels))
        y = np.full((len(self), len(labels)), np.nan, dtype=np.float32)
        y[:, positions >= 0] = self.y[:, positions[positions >= 0]]
        return replace(self, labels=labels, y=y)
