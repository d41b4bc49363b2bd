"""Images whose labels are the answers of a clinical database.

An answer belongs to the images of its person and visit. Where the answer or the image names no visit, it
belongs to the images of its person and day. An image that no answer of a class belongs to is unknown, never
absent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from suture.core.errors import DataError, show_value
from suture.core.escaping import number_of
from suture.core.labels import LabelSet
from suture.data.readers.answers import Answer, AnsweredLabels, Remarks, day_of
from suture.data.readers.image_list import ImageListConfig, find_split, within_root
from suture.data.reading import Reading, Sheet, fault, read_sheet, restrict, row_faults
from suture.data.table import Meaning, Table


def _distinct(codes: dict[str, Any]) -> dict[str, Any]:
    if len({*codes.values()}) < len(codes):
        raise ValueError("two classes have the same code; remove one of them")
    return codes


OneCodeEach = AfterValidator(_distinct)
"""Of a table of classes: no two have the same code."""


class LinkedConfig(ImageListConfig):
    """The keys of ``[data]`` that say which answers of a clinical database belong to which image.

    Attributes:
        values: what answers other than yes and no mean: 1, 0 or "unknown". The key "" is a missing answer.
        link: ``visit`` links an answer to the images of its patient's visit; where the answer or the image
            names no visit, to those of the patient and the day. ``person`` links it to all images of the
            patient.
        visit_column: the column of visits; the table may lack it, and cells may be blank.
        date_column: the column of the images' days, as 2024-03-01; the table may lack it, and cells may be
            blank.
    """

    names_known: ClassVar[bool] = True
    values: dict[str, Meaning] = Field(default_factory=dict)
    link: Literal["visit", "person"] = "visit"
    visit_column: str
    date_column: str = "date"

    def idle(self) -> dict[str, str]:
        """As in the base, and what another link would need."""
        remedy = 'with link = "person"; remove it, or write link = "visit"'
        columns = dict.fromkeys(("visit_column", "date_column"), remedy)
        return super().idle() | (columns if self.link == "person" else {})


def read_linked(
    config: LinkedConfig,
    classes: Mapping[str, str | int],
    answers: Iterable[Answer],
    remarks: Remarks,
    same: Callable[[str], str],
) -> Reading:
    """Read the list of images, and give each the labels of the answers that belong to it.

    Two answers that contradict each other are a fault and leave the label unknown, so that their order does
    not matter. So is a class without any answer: this site does not annotate it.

    Args:
        classes: the code of each class.
        answers: read once, one at a time.
        remarks: about the answers, complete when all have been read.
        same: gives all spellings of the identifier of a person or visit one form.

    Raises:
        DataError: the list cannot be read, or lacks a column.
        LabelError: two classes are one.
        ConfigError: `labels` names what is no class.
    """
    sheet = read_sheet(config.table)
    names = sheet.column(config.image_column, "[data] image_column")
    patients = [same(cell) for cell in sheet.column(config.patient_column, "[data] patient_column")]
    rows_of, faults = _index(sheet, config, patients, same)
    found = AnsweredLabels(sheet, LabelSet.of(tuple(classes)))
    answered = Counter[int]()
    linked = 0
    for answer in answers:
        rows = rows_of(answer)
        found.put(answer, rows)
        answered[answer.label] += 1
        linked += bool(rows)
    split, torn = find_split(sheet, config, patients, found.y, same)
    faults += [*remarks.faults.sentences(), *found.faults(), *torn]
    faults += row_faults(sheet, names, patients, split)
    faults += [
        f"[data] classes: no answer has the code {show_value(code)} of {show_value(name)}; correct the "
        "code, or remove the class if this site does not annotate it"
        for column, (name, code) in enumerate(classes.items())
        if not answered[column]
    ]
    belong = f"{linked:,} of {number_of(answered.total(), 'answer')} belong to an image of {sheet.path}"
    if answered and not linked:
        faults.append(f"{belong}; correct its patients, and its visits or days")
    notes = (*remarks.notes.sentences(), belong)
    images = within_root(names, config)
    table = Table(found.labels, images, tuple(patients), found.y, split, config.root)
    return Reading(restrict(table, config), tuple(faults), notes=notes)


def _index(
    sheet: Sheet, config: LinkedConfig, patients: list[str], same: Callable[[str], str]
) -> tuple[Callable[[Answer], list[int]], list[str]]:
    """Return what finds the rows of the images that an answer belongs to, and the faults of their days.

    Raises:
        DataError: answers are linked by visit or day, and the list has no column of either.
    """
    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    if config.link == "person":
        for row, person in enumerate(patients):
            if person:
                rows[person,].append(row)
        return lambda answer: rows.get((answer.person,), []), []

    visits, dates = _optional(sheet, config, "visit_column"), _optional(sheet, config, "date_column")
    if visits is None and dates is None:
        raise DataError(
            f"{sheet.path} has neither a column {config.visit_column!r} nor {config.date_column!r}. Name "
            "one as [data] visit_column or date_column. If an answer applies to all images of its patient, "
            'write link = "person"'
        )
    blank = [""] * len(patients)
    days = list(map(day_of, dates or blank))
    wrong = [day is None for day in days]
    faults = fault(sheet, wrong, f"column {config.date_column!r}: not a date such as 2024-03-01")
    of = zip(patients, map(same, visits or blank), days, strict=True)
    for row, (person, visit, day) in enumerate(of):
        if person and visit:
            rows["visit", person, visit].append(row)
        if person and day:
            rows["day", person, day].append(row)
            if not visit:
                rows["date without a visit", person, day].append(row)

    def found(answer: Answer) -> list[int]:
        if not answer.visit:
            return rows.get(("day", answer.person, answer.day), [])
        keys = ("visit", answer.person, answer.visit), ("date without a visit", answer.person, answer.day)
        return [row for key in keys for row in rows.get(key, ())]

    return found, faults


def _optional(sheet: Sheet, config: LinkedConfig, key: str) -> list[str] | None:
    """The cells of a column; None where it has its default name and the sheet lacks it."""
    name = getattr(config, key)
    if name not in sheet.header and name == type(config).model_fields[key].default:
        return None
    return sheet.column(name, f"[data] {key}")
