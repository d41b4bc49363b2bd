"""Answers of a clinical database, and the labels that they give to images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from suture.core.labels import LabelSet
from suture.data.reading import Sheet, fault, rows_text


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file says something.

    Attributes:
        path: the file.
        number: of the row, line or resource.
        unit: which of these it is.
    """

    path: Path
    number: int
    unit: str = "row"

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a clinical database says of one class.

    Attributes:
        place: where it says so.
        label: the class, by its column of the labels.
        value: 1 present, 0 absent, NaN unknown.
        person, visit, day: whose it is, of which visit and of which day (ISO 8601); empty where it does not
            say.
    """

    place: Place
    label: int
    value: float
    person: str
    visit: str
    day: str


class _MessageLog:
    """Sentences about places; those of one file that are alike become one, which names all of the places."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Path, str, str], list[int]] = {}

    def add(self, place: Place, what: str) -> None:
        """Say something of a place. It names no person, visit or date."""
        self._numbers.setdefault((place.path, place.unit, what), []).append(place.number)

    def sentences(self) -> list[str]:
        """All that was said."""
        return [
            f"{path} {rows_text(numbers, unit)}: {what}"
            for (path, unit, what), numbers in self._numbers.items()
        ]


@dataclass(frozen=True)
class Remarks:
    """What a reader of answers remarks while it reads.

    Attributes:
        faults: answers without a meaning.
        notes: what it leaves out.
    """

    faults: _MessageLog = field(default_factory=_MessageLog)
    notes: _MessageLog = field(default_factory=_MessageLog)


def day_of(cell: str) -> str | None:
    """Return the day of an ISO 8601 date or time, as it is written; empty for a blank cell, None for another.

    >>> day_of("2024-03-01T23:30:00-05:00"), day_of("20240301"), day_of(""), day_of("1.3.2024")
    ('2024-03-01', '2024-03-01', '', None)
    """
    try:
        return datetime.fromisoformat(cell).date().isoformat() if cell else ""
    except ValueError:
        return None


class AnsweredLabels:
    """The labels of the images of a list, from answers in any order.

    Attributes:
        labels: the classes.
        y: labels [n, c]: 1, 0, or NaN where no answer says either, or two contradict each other.
    """

    def __init__(self, sheet: Sheet, labels: LabelSet) -> None:
        self._sheet, self.labels = sheet, labels
        self.y = np.full((len(sheet.rows), len(labels)), np.nan, dtype=np.float32)
        self._source = np.zeros(self.y.shape, dtype=np.int64)  # the place that a label is from
        self._places: list[Place] = []
        self._clashes: list[dict[int, tuple[Place, Place]]] = [{} for _ in labels]

    def put(self, answer: Answer, images: Sequence[int]) -> None:
        """Give an answer to the images of these rows; an unknown one says nothing."""
        if np.isnan(answer.value) or not images:
            return
        column, clashes = answer.label, self._clashes[answer.label]
        self._places.append(answer.place)
        for image in images:
            if image in clashes:
                continue
            if np.isnan(self.y[image, column]):
                self.y[image, column] = answer.value
                self._source[image, column] = len(self._places) - 1
            elif self.y[image, column] != answer.value:
                clashes[image] = self._places[self._source[image, column]], answer.place
                self.y[image, column] = np.nan

    def faults(self) -> list[str]:
        """A sentence for each class with contradictions; it has at most eight of their pairs of places."""
        sentences = []
        for name, clashes in zip(self.labels, self._clashes, strict=True):
            pairs = "; ".join(f"{one} and {other}" for _, (one, other) in sorted(clashes.items())[:8])
            what = f"class {name!r} is both present and absent in {pairs}; correct one of each pair"
            sentences += fault(self._sheet, map(clashes.__contains__, range(len(self.y))), what)
        return sentences
