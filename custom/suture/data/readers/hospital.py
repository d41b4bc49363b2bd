"""A hospital's own table: image, patient, split, and one column per label.

    image,patient,split,Cardiomegaly,Pleural Effusion
    a/0001.png,P17,train,1,0
    a/0002.png,P23,test,0,

Where the site names a `text_column`, its cells are the documents, and the image column names them. Where it
names a `finding_column`, each cell of it lists the classes that are present.

A label cell is 1 (present), 0 (absent) or blank (unknown; never taken for absent); `suture.data.cells` has
other words, and `values` those of the site. A multiclass table has at most one 1 in a row; a row of zeros is
an image of none of its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.labels import canonical_or_none
from suture.core.names import check_value
from suture.core.printable import number_of
from suture.core.validation import MOST_ATTRIBUTES
from suture.data.images import ImageSource
from suture.data.patient_columns import torn_patients
from suture.data.readers.hospital_labels import NO_FINDING, LabelConfig, find_labels, listed_names
from suture.data.readers.image_list import ImageListConfig, find_split, within_root
from suture.data.reading import UTF8, Reading, Sheet, fault, read_sheet, row_faults
from suture.data.table import Table


class HospitalConfig(LabelConfig, ImageListConfig):
    """A hospital's own table; `table` (CSV, .xlsx or .parquet) has a row for each image or document.

    Attributes:
        text_column: column of the documents, for data that are text; `image_column` then identifies the
            documents.
        attribute_column: column by which figures are reported separately, such as skin tone. It is not a
            label and not used in training.
        delimiter: separator between the cells of a text file.
        encoding: encoding of a text file, by its Python name.
        image_match: ``path`` matches an image by its path or file name, ``stem`` by its file name without the
            suffix, ``loose`` by either, whatever its case, the form of its accents, the zeros before a number
            and the first folders of its path.
        repeated: several rows with the same image: ``refuse`` reports an error, ``merge`` combines their
            labels (present before absent, absent before unknown), ``majority`` goes by more than half of the
            rows that say either (a tie is unknown), and a share such as 0.3 by at least that share of them.
    """

    dataset: Literal["hospital"] = "hospital"
    text_column: str | None = None
    attribute_column: str | None = None
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    encoding: str = UTF8
    image_match: Literal["path", "stem", "loose"] = "path"
    repeated: Literal["refuse", "merge", "majority"] | Annotated[float, Field(gt=0, le=1)] = "refuse"

    def idle(self) -> dict[str, str]:
        """As in the bases, and what is for images."""
        idle = super().idle()
        if self.text_column is not None:
            idle["image_match"] = "for texts; remove it"
            idle.pop("partial")  # which leaves blank documents out
        if self.labels is None and self.finding_column is None:
            idle.pop("split_column", None)  # it says that this column is no label
        return idle

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:
        """Whether the site names a column of documents."""
        return bool(values.get("text_column"))


def read_hospital(config: HospitalConfig) -> Reading:
    """Reads the table of a hospital.

    Raises:
        DataError: the file cannot be read, a column is missing, or the attribute has too many values.
        LabelError: no label column, or two that are one label.
        ConfigError: `labels` names a class that the table lacks.
    """
    sheet = _sheet(config)
    images: Sequence[str] = sheet.column(config.image_column, "[data] image_column")
    absent = 0
    there: list[bool] = []
    if config.text_column is not None:
        written = sheet.column(config.text_column, "[data] text_column")
        there = list(map(bool, written)) if config.partial else []
    else:
        images = within_root(images, config, config.image_match)
        if config.partial:
            with ImageSource(config.root, config.follow_links) as source:
                there = [image in source for image in images]
    if any(there):  # what is wrong in a row that is left out does not matter
        absent = there.count(False)
        sheet, images = sheet.only(there), list(compress(images, there))
    patients = sheet.column(config.patient_column, "[data] patient_column")
    others = _other_columns(sheet, config)
    labels, y, faults, notes = find_labels(sheet, config, others)
    if labels.label_type == "multiclass":
        several = (y == 1).sum(axis=1) > 1
        y[several] = np.nan
        what = "several classes in a multiclass table; keep one 1 in a row, or write [data] label_type = "
        faults += fault(sheet, several, f'{what}"multilabel"')
    split, more = find_split(sheet, config, patients, y)
    texts, blank = _texts(sheet, config)
    attributes = _attributes(sheet, config)
    table = Table(labels, tuple(images), tuple(patients), y, split, config.root, texts, attributes)
    notes += _healthy_with_findings(sheet, config)
    if config.repeated != "refuse":
        faults += _contradictions(sheet, table)
        one_each = config.finding_column is not None and config.value_column is None  # a row has one finding
        notes += () if one_each and config.repeated == "merge" else _disagreements(sheet, table, config)
        sheet, table = _merged(sheet, table, config)
    kind: Literal["image", "document"] = "image" if texts is None else "document"
    faults += more + blank + row_faults(sheet, table.images, table.patients, table.split, kind)
    used = others | {config.finding_column or ""}
    if config.finding_column is None:
        used |= {name for name in sheet.header if canonical_or_none(name, config.synonyms) in labels}
    torn, said = torn_patients(sheet, config.patient_column, config.image_column, table.split, used)
    faults, notes = faults + torn, notes + said
    return Reading(table, tuple(faults), absent, notes, sheet.numbers)


def _sheet(config: HospitalConfig) -> Sheet:
    try:
        "".encode(config.encoding)
    except LookupError:
        raise ConfigError(
            f"unknown [data] encoding {config.encoding!r}; write utf-8, latin-1 or cp1252"
        ) from None
    return read_sheet(config.table, config.delimiter, config.encoding)


def _other_columns(sheet: Sheet, config: HospitalConfig) -> set[str]:
    """The columns that are no label."""
    others = {config.image_column, config.patient_column, config.split_column}
    for key in ("attribute_column", "text_column", "value_column"):
        if (name := getattr(config, key)) is not None:
            sheet.position(name, f"[data] {key}")
            others.add(name)
    return others


def _texts(sheet: Sheet, config: HospitalConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    """The documents, where the site has such a column, and a fault for the blank ones."""
    if config.text_column is None:
        return None, []
    texts = sheet.column(config.text_column, "[data] text_column")
    return tuple(texts), fault(
        sheet,
        map(not_, texts),
        f"column {config.text_column!r} is blank; remove the row, or set [data] partial",
    )


def _attributes(sheet: Sheet, config: HospitalConfig) -> tuple[str, ...] | None:
    """The attribute of each row, empty where its cell is blank; None where the site names no column."""
    column = config.attribute_column
    if column is None:
        return None
    values = sheet.column(column, "[data] attribute_column")
    for value, number in zip(values, sheet.numbers, strict=True):
        try:
            check_value(value) if value else None
        except LabelError as error:
            raise DataError(f"{sheet.path} row {number}, column {column!r}: {error}") from error
    if len(found := {*values} - {""}) > MOST_ATTRIBUTES:
        raise DataError(
            f"{sheet.path}: column {column!r} has {len(found)} values; figures by attribute allow at "
            f"most {MOST_ATTRIBUTES}; name another [data] attribute_column, or group its values"
        )
    return tuple(values)


def _contradictions(sheet: Sheet, table: Table) -> list[str]:
    """A fault if rows of one image name several patients or splits."""
    first: dict[str, tuple[str, str]] = {}
    whose = zip(table.patients, table.split, strict=True)
    bad = [first.setdefault(image, of) != of for image, of in zip(table.images, whose, strict=True)]
    return fault(sheet, bad, "its patient or split differs from an earlier row of the same image")


def _disagreements(sheet: Sheet, table: Table, config: HospitalConfig) -> tuple[str, ...]:
    """A note on the images of which one row says present, and another absent."""
    present, absent = (
        {(table.images[row], column) for row, column in np.argwhere(table.y == value).tolist()}
        for value in (1, 0)
    )
    images = {image for image, _ in present & absent}
    counts = {"merge": "which counts as present", "majority": "of which the majority counts"}
    how = counts.get(str(config.repeated), f"present where a share of {config.repeated} says so")
    what = f"with rows that contradict each other about a class, {how}"
    return (f"{sheet.path}: {number_of(len(images), 'image')} {what}",) if images else ()


def _healthy_with_findings(sheet: Sheet, config: HospitalConfig) -> tuple[str, ...]:
    """A note on the images that list `NO_FINDING` and a finding, without a value for each."""
    if config.finding_column is None or config.value_column is not None:
        return ()
    healthy: dict[str, set[bool]] = {}
    images = sheet.column(config.image_column, "")
    for image, cell in zip(images, sheet.column(config.finding_column, ""), strict=True):
        names = listed_names(cell, config.finding_separator)
        of = (canonical_or_none(name, config.synonyms) == NO_FINDING for name in names)
        healthy.setdefault(image, set()).update(of)
    both = sum(len(of) > 1 for of in healthy.values())
    what = f"with {NO_FINDING} and a finding, which counts as present"
    return (f"{sheet.path}: {number_of(both, 'image')} {what}",) if both else ()


def _merged(sheet: Sheet, table: Table, config: HospitalConfig) -> tuple[Sheet, Table]:
    """One row for each image, with the labels of all of its rows; the first row has the rest."""
    first = {image: row for row, image in reversed(list(enumerate(table.images)))}
    keep = np.array([first[image] == row for row, image in enumerate(table.images)])
    at = np.array([first[image] for image in table.images], dtype=np.intp)
    votes = np.zeros((2, *table.y.shape), dtype=np.int64)
    for value in (0, 1):
        np.add.at(votes[value], at, table.y == value)
    absent, present = votes
    if config.repeated == "merge":
        y = np.where(present, 1.0, 0.0)
    elif config.repeated == "majority":
        y = np.where(present == absent, np.nan, present > absent)
    else:
        y = (present >= float(config.repeated) * (present + absent) - 1e-9).astype(np.float64)
    y[present + absent == 0] = np.nan
    return sheet.only(keep.tolist()), replace(table, y=y.astype(np.float32)).rows(keep)
