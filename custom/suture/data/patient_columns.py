"""Which columns of a table name the patients, and which of them a split tears apart."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from suture.data.cells import Cells
from suture.data.reading import Sheet

_PATIENTS = tuple(
    re.compile(words, re.IGNORECASE)
    for words in (
        r"patient|patid|subject|mrn|person|proband|\bpid\b",
        r"(case|study|exam|examination|visit|encounter|accession|(^|[^a-z])fall)"
        r"([ _-]?(instance)?[ _-]?(id|uid|nr|no|num|number|key))?$",
        r"lesion[ _-]?(id|uid|nr|no|num|number|key)?$",
    )
)
"""Names of columns that keep images together, the best first: a patient may have several cases or lesions,
whose images would come to lie in two splits."""
_NO_PATIENT = re.compile(
    r"age\b|_age|sex|gender|birth|dob|name|date|time|image|file|weight|height|size|position|orient|status"
    r"|history|race|ethnic|comment|type|count",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(r"(id|nr|no|mrn|key|num|number)$", re.IGNORECASE)


def patient_columns(sheet: Sheet, image: str) -> list[tuple[int, str]]:
    """The columns that may name patients, with the rank of their names in `_PATIENTS`, the best first.

    Of one rank, names that end like an identifier come first.
    """
    named = [
        (rank, name)
        for name in sheet.header
        if name and name != image and (rank := _rank(name)) is not None
        if _tells_apart({*sheet.cells(sheet.header.index(name))})
    ]
    return sorted(named, key=lambda found: (found[0], not _IDENTIFIER.search(found[1])))


def _tells_apart(cells: set[str]) -> bool:
    """Whether a column has several values, and not those of a finding, such as of 'Lung Lesion'."""
    meaning = Cells({})
    return len(cells) > 1 and any(meaning.number(cell) is None for cell in cells)


def _rank(name: str) -> int | None:
    """The place of a column's name among those of `_PATIENTS`; None for a name of something else."""
    if _NO_PATIENT.search(name):
        return None
    return next((rank for rank, words in enumerate(_PATIENTS) if words.search(name)), None)


def torn_patients(sheet: Sheet, patients: str, image: str, split: Sequence[str]) -> list[str]:
    """Return a fault for each better column of patients of which a value lies in two splits.

    Args:
        patients: the column that the site names; a column of lesions is worse than one of patients.
        image: the column of images.
        split: of each row; empty where it is not used.
    """
    chosen = _rank(patients) if patients != image else None
    faults = []
    for rank, name in patient_columns(sheet, image):
        if name == patients or (chosen is not None and rank >= chosen):
            continue
        lies: dict[str, set[str]] = {}
        for value, part in zip(sheet.column(name, "the patients"), split, strict=True):
            if value and part:
                lies.setdefault(value, set()).add(part)
        if torn := sum(len(parts) > 1 for parts in lies.values()):
            faults.append(
                f"{sheet.path}, column {name!r}: {torn:,} of its {len(lies):,} values lie in two splits, so "
                "that figures would be of patients seen in training; write [data] patient_column = "
                f"{json.dumps(name)} and make the splits anew, or rename it if it names something else"
            )
    return faults
