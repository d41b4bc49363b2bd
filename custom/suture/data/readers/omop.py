"""Labels from the tables MEASUREMENT and OBSERVATION of an OMOP Common Data Model.

    image,person_id,visit_occurrence_id,date,split
    a/0001.png,17,301,2024-03-01,train
    a/0002.png,23,,2024-03-05,test

A row of the database with the concept of a class and the value Yes makes the class present in the images that
it belongs to, and No makes it absent. No row is unknown: such a database records what was looked for.

Source: OMOP CDM v5.4, and the standardised vocabularies' concepts of Yes and No.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from suture.core.errors import show_value
from suture.core.validation import LabelName
from suture.data.dataset import SitePath
from suture.data.readers.answers import Answer, Place, Remarks, day_of
from suture.data.readers.hospital import values_line
from suture.data.readers.linked import LinkedConfig, OneCodeEach, read_linked
from suture.data.reading import Reading, stream_columns
from suture.data.table import NUMBERS, Meaning

_YES, _NO = "4188539", "4188540"
"""The standard concepts of the answers, of SNOMED CT."""


class OmopConfig(LinkedConfig):
    """Labels from tables of an OMOP database; `table` lists the images, with visits, days or both.

    Attributes:
        classes: the concept of each class, as `measurement_concept_id` or `observation_concept_id` has it.
        measurements: the table MEASUREMENT (CSV, gzipped or not, .xlsx or .parquet), or its rows of these
            concepts.
        observations: the table OBSERVATION, likewise.
    """

    dataset: Literal["omop"] = "omop"
    classes: Annotated[dict[LabelName, Annotated[int, Field(ge=1)]], Field(min_length=1), OneCodeEach]
    measurements: SitePath | None = None
    observations: SitePath | None = None
    values: dict[Annotated[str, Field(pattern=r"^\d*$")], Meaning] = Field(default_factory=dict)
    patient_column: str = "person_id"
    visit_column: str = "visit_occurrence_id"

    @model_validator(mode="after")
    def _a_table(self) -> Self:
        if self.measurements is None and self.observations is None:
            raise ValueError("measurements or observations is missing; write the table of the labels")
        return self


def read_omop(config: OmopConfig) -> Reading:
    """Read the images of a site, with labels from its OMOP database.

    Raises:
        DataError: a file cannot be read, or lacks a column.
        LabelError: two classes are one.
        ConfigError: `labels` names what is no class.
    """
    remarks = Remarks()
    return read_linked(config, config.classes, _answers(config, remarks), remarks, _whole)


def _answers(config: OmopConfig, remarks: Remarks) -> Iterator[Answer]:
    for table, path in (("measurement", config.measurements), ("observation", config.observations)):
        yield from _rows(config, path, table, remarks) if path else ()


def _rows(config: OmopConfig, path: Path, table: str, remarks: Remarks) -> Iterator[Answer]:
    """The answers of one table; a row of another concept is none."""
    names = (
        "person_id",
        "visit_occurrence_id",
        f"{table}_concept_id",
        "value_as_concept_id",
        f"{table}_date",
    )
    columns = {str(concept): column for column, concept in enumerate(config.classes.values())}
    classes = tuple(config.classes)
    meanings: dict[str, Meaning] = {_YES: 1, _NO: 0, **config.values}
    for number, (person, visit, concept, value, date) in stream_columns(path, names, f"[data] {table}s"):
        column = columns.get(_whole(concept))
        if column is None:
            continue
        place, day, meaning = Place(path, number), day_of(date), meanings.get(_whole(value))
        if meaning is None:
            remarks.faults.add(place, _strange(classes[column], _whole(value)))
        if day is None:
            remarks.faults.add(place, f"column {names[-1]!r}: not a date such as 2024-03-01")
        value_of = NUMBERS["unknown" if meaning is None else meaning]
        yield Answer(place, column, value_of, _whole(person), _whole(visit), day or "")


def _strange(name: str, value: str) -> str:
    """What to do about a value of a class that has no meaning; what is no concept is not shown: a name?"""
    if value and not value.isdecimal():
        return f"class {name!r}: value_as_concept_id is not the number of a concept; correct the row"
    what = (
        f"value_as_concept_id {show_value(value)} is not Yes ({_YES}) or No ({_NO})" if value else "no value"
    )
    return (
        f"class {name!r}: {what}; add this line to [data], with 1, 0 or unknown for a "
        f"?:\n{values_line([value])}"
    )


def _whole(cell: str) -> str:
    """A number without leading zeros and the point that pandas writes as soon as a cell is blank."""
    number = cell.removesuffix(".0")
    return (number.lstrip("0") or "0") if number.isdecimal() else number
