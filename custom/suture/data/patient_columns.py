"""Which columns of a table name the patients, and which of them a split tears apart."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Sequence

from suture.data.reading import Sheet
from suture.data.table import Cells

_PATIENTS = tuple(
    re.compile(words)
    for words in (
        r"patient|pat ?(id|nr|no)\b|subject|mrn|person|proband|participant|pid$|\bpiz\b|pacient|pazient"
        r"|medical ?record|pacjent|пациент|пацієнт|ασθεν|potilas|beteg|\bhasta\b|患者|病人|환자",
        r"record ?id$|(case|study|exam|examination|visit|encounter|accession|hadm|(^|[^a-z])fall)"
        r" ?(instance)? ?(id|uid|nr|no|num|number|nummer|key)?$",
        r"(l[ea]e?sione?|lesao|laesie|zmiana|поражение|病変|病灶) ?(id|uid|nr|no|num|number|nummer|key)?$",
    )
)
"""Names of columns that keep images together, the best first: a patient may have several cases or lesions,
whose images would come to lie in two splits. They are matched with `plain_words`."""
_PART = re.compile(
    r"visit|stay|study|encounter|exam|scan|class|region|posture|case|session|episode|series|accession|l[ae]e?sion"
)
"""In the name of a patient's column: what a patient has several of, or shares with others."""
_NO_PATIENT = re.compile(
    r"age\b|sex|gender|birth|dob|weight|height|position|orient|status|history|ethnic|comment"
    r"|report|refer|reader|physician|radiolog"
    r"|(name|typ|type)s?\b|\b(race|date|(date)?time|image|size|count)s?\b"
    r"|\bfiles?\b(?! (id|nr|no|num|number|key)\b)"
)
_IDENTIFIER = re.compile(r"(id|nr|no|mrn|key|num|number|nummer|piz)$")
_SURE = re.compile(r"^patients?$|" + _IDENTIFIER.pattern)
"""Of the best names, those that name patients even where their values are few words."""
_WORD = re.compile(r"\D+")
_WORD_OR_COUNT = re.compile(r"\D+|\d{1,2}")
_COUNT = re.compile(r"\d{0,3}")
_FEW = 10
"""A column of so few words, in more than twice as many rows, sorts images and names no patients."""
_HANDFUL = 5
_SHARE = 1 / 5
"""A column has patients of the one that is chosen together where it has more values than that share."""


def names_patients(name: str) -> bool:
    """Whether a column's name is one of those of patients, and not of their cases."""
    return _rank(name) == 0


def patient_columns(sheet: Sheet, image: str, used: Collection[str] = ()) -> list[tuple[int, str]]:
    """The columns that may name patients, with the rank of their names in `_PATIENTS`, the best first.

    Of one rank, a column in which another nests comes first, then names that end like an identifier.

    Args:
        image: the column of images.
        used: columns that have another meaning.
    """
    cells = sheet.columns()
    ranked = [(_rank(name), name) for name in cells if name != image and name not in used]
    named = [
        (rank, name) for rank, name in ranked if rank is not None and _tells_apart(name, rank, cells[name])
    ]
    coarser = {
        name: sum(other == rank and _nests(cells[name], cells[into]) for other, into in named)
        for rank, name in named
    }
    return sorted(
        named, key=lambda found: (found[0], coarser[found[1]], not _IDENTIFIER.search(plain_words(found[1])))
    )


def _tells_apart(name: str, rank: int, cells: Sequence[str]) -> bool:
    """Whether a column has several values: not those of a finding, and not a few words in many rows."""
    meaning = Cells({})
    values = {*cells} - {""}
    if len(values) < 2 or all(meaning.number(value) is not None for value in values):
        return False
    if len(values) > max(_FEW, len(cells) // 50) or len(cells) <= 2 * len(values):
        return True
    if rank == 0 and _SURE.search(plain_words(name)):
        return True
    word = _WORD_OR_COUNT if rank else _WORD
    return 2 * sum(word.fullmatch(value) is not None for value in values) < len(values)


def _nests(fine: Sequence[str], coarse: Sequence[str]) -> bool:
    """Whether each value of a column lies in one value of another, which has fewer."""
    pairs = {pair for pair in zip(fine, coarse, strict=True) if all(pair)}
    return len({value for _, value in pairs}) < len({value for value, _ in pairs}) == len(pairs)


def without_accents(text: str) -> str:
    """A text whose letters have no accents."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return unicodedata.normalize("NFC", plain)


def plain_words(name: str) -> str:
    """A column's name in small letters, with blanks between its words.

    >>> plain_words("PatientAccount_No"), plain_words("StudyUID")
    ('patient account no', 'study uid')
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", without_accents(name))
    return " ".join(re.split(r"[\W_]+", apart)).strip().lower()


def _rank(name: str) -> int | None:
    """The place of a column's name among those of `_PATIENTS`; None for a name of something else."""
    words = plain_words(name)
    if _NO_PATIENT.search(words):
        return None
    rank = next((rank for rank, pattern in enumerate(_PATIENTS) if pattern.search(words)), None)
    return 1 if rank == 0 and _PART.search(words) else rank


def _is_identifier(name: str) -> bool:
    """Whether a column's name ends like that of an identifier, of whatever."""
    return _IDENTIFIER.search(plain_words(name)) is not None and not _NO_PATIENT.search(plain_words(name))


def torn_patients(
    sheet: Sheet, patients: str, image: str, split: Sequence[str], used: Collection[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return a fault, or a note, for each column of identifiers that is torn by the splits.

    It is a fault where the chosen patients nest in those of the other column, whose name is not a worse one.

    Args:
        patients: the column that the site names; a column of lesions is worse than one of patients.
        image: the column of images.
        split: of each row; empty where it is not used.
        used: columns that have another meaning, such as labels.
    """
    chosen = -1 if patients == image else _rank(patients)
    fine = sheet.column(patients, "[data] patient_column")
    faults, notes = [], []
    better = patient_columns(sheet, image, {*used, patients})
    known = {*used, patients, image, *(name for _, name in better)}
    others = [name for name in sheet.header if name and name not in known and _is_identifier(name)]
    for rank, name in [*better, *((len(_PATIENTS), name) for name in others)]:
        cells = sheet.column(name, "the patients")
        nests = _nests(fine, cells)
        enough = max(_HANDFUL, 0 if chosen == -1 and rank == 0 else _SHARE * len({*fine}))
        if len({*cells} - {""}) <= enough or not (torn := _describe_conflict(sheet, name, cells, split)):
            continue
        if rank == len(_PATIENTS) or (chosen is not None and 0 <= chosen < rank):
            if not all(map(_COUNT.fullmatch, cells)):  # numbers within each patient
                notes.append(f"{torn}; if images of one value belong together, keep them in one split")
            continue
        if nests and chosen is not None:
            faults.append(
                f"{torn}, so patients seen in training would be in the test; write [data] "
                f"patient_column = {json.dumps(name)} and divide the splits again, or rename it if it "
                "names something else"
            )
        elif nests or chosen is not None:
            notes.append(
                f"{torn}; if it names the patients, write [data] patient_column = {json.dumps(name)}"
            )
    return faults, tuple(notes)


def _describe_conflict(sheet: Sheet, name: str, cells: Sequence[str], split: Sequence[str]) -> str:
    """How many values of a column lie in two splits; empty where none does."""
    lies: dict[str, set[str]] = {}
    for value, part in zip(cells, split, strict=True):
        if value and part:
            lies.setdefault(value, set()).add(part)
    torn = sum(len(parts) > 1 for parts in lies.values())
    what = f"{sheet.path}, column {name!r}: {torn:,} of its {len(lies):,} values occur in two splits"
    return what if torn else ""
