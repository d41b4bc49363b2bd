"""MTSamples: transcribed notes of many specialties, in the public domain (CC0).

`table` is `mtsamples.csv`, gzipped or not. A note stands in it once under each of its specialties, so rows of
one text are one document, of several labels. The table has a comma where the note began a new line.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from suture.core.errors import DataError
from suture.core.labels import canonical
from suture.data.dataset import DatasetConfig
from suture.data.readers import DataSet
from suture.data.reading import Reading, indicators, read_sheet, restrict
from suture.data.split import by_patient
from suture.data.table import Table

_KEY = 'dataset = "mtsamples"'
_NEW_LINE = re.compile(r",(?=\S)")


class MtsamplesConfig(DatasetConfig):
    """MTSamples; `table` is mtsamples.csv, which holds the notes. The split is 70/10/20 by note."""

    names_known: ClassVar[bool] = True
    dataset: Literal["mtsamples"] = "mtsamples"

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:  # noqa: ARG003
        """True: the notes are a column of the table."""
        return True


def read_mtsamples(config: MtsamplesConfig) -> Reading:
    """Reads the notes that have text; every specialty is known of each.

    No patients are published: every note counts as a patient of its own, and the split is 70/10/20.

    Raises:
        DataError: the table cannot be read, lacks a column, or has no text or no specialty.
        ConfigError: `labels` names something that is no specialty of the table.
        LabelError: `labels` names one specialty twice.
    """
    sheet = read_sheet(config.table)
    numbers, specialties, notes = (
        sheet.column(name, _KEY) for name in ("note_id", "medical_specialty", "transcription")
    )
    found: dict[str, tuple[str, set[str]]] = {}
    for number, specialty, note in zip(numbers, specialties, notes, strict=True):
        if note:
            found.setdefault(note, (number, set()))[1].update(map(canonical, filter(None, [specialty])))
    if not found:
        raise DataError(f"{config.table} has no text in column 'transcription'; correct [data] table")
    labels, y = indicators([names for _, names in found.values()], config.table)
    who = tuple(number for number, _ in found.values())
    texts = tuple(_NEW_LINE.sub(", ", note) for note in found)
    table = Table(labels, who, who, y, by_patient(who, y, seed=config.seed), config.root, texts)
    return Reading(restrict(table, config), absent=sum(not note for note in notes))


MTSAMPLES = DataSet(
    MtsamplesConfig, read_mtsamples, "MTSamples, transcribed notes under their specialties: mtsamples.csv"
)
