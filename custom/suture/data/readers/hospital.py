"""A hospital's own table: image, patient, split, and one column per label.

    image,patient,split,Cardiomegaly,Pleural Effusion
    a/0001.png,P17,train,1,0
    a/0002.png,P23,test,0,

Where the site names a `text_column`, its cells are the documents, and the image column names them.

A label cell is 1 (present), 0 (absent) or blank (unknown; never taken for absent). A multiclass table has at
most one 1 in a row; a row of zeros is an image of none of its classes.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError, LabelError, nearest, unknown
from suture.core.labels import LabelSet, LabelType, canonical
from suture.data.dataset import DatasetConfig
from suture.data.reading import Reading, Sheet, fault, read_sheet, row_faults, rows_text
from suture.data.split import by_patient
from suture.data.table import Table
from suture.protocol.messages import MOST_ATTRIBUTES

# pandas writes 1.0 and 0.0 as soon as one cell of a column is blank.
VALUES = {"1": 1.0, "1.0": 1.0, "0": 0.0, "0.0": 0.0, "": float("nan")}

SPLIT_WORDS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
    "": "",
}


class HospitalConfig(DatasetConfig):
    """A hospital's own table; `table` is a CSV with one row for each image or document.

    Attributes:
        image_column: the column of image names within `root`, or of what names a document.
        text_column: the column of documents, where the data are text rather than images.
        patient_column: the column of patient identifiers.
        attribute_column: the column by which figures are broken down, such as skin tone. It is no label, and
            training does not see it.
        label_type: ``multilabel``, any subset of the classes is true of an image; ``multiclass``, exactly one
            class is, of this site or of others.
        split: ``column`` reads `split_column`; ``patients`` cuts the patients 70/10/20.
        split_column: the column of train, validation, test or blank (unused).
    """

    dataset: Literal["hospital"] = "hospital"
    image_column: str = "image"
    text_column: str | None = None
    patient_column: str = "patient"
    attribute_column: str | None = None
    label_type: LabelType = "multilabel"
    split: Literal["column", "patients"] = "column"
    split_column: str = "split"

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
    sheet = read_sheet(config.table)
    images = sheet.column(config.image_column, "[data] image_column")
    patients = sheet.column(config.patient_column, "[data] patient_column")
    labels, positions = _label_columns(sheet, config)
    y, faults = _values(sheet, positions)
    if labels.label_type == "multiclass":
        faults += _one_class(sheet, y)
    if config.split == "patients":
        split = by_patient(patients, y, seed=config.seed)
    else:
        split, more = _split_column(sheet, config)
        faults += more
    texts, more = _texts(sheet, config)
    faults += more + row_faults(sheet, images, patients, split, "image" if texts is None else "document")
    attributes = _attributes(sheet, config)
    table = Table(labels, tuple(images), tuple(patients), y, split, config.root, texts, attributes)
    return Reading(table, tuple(faults))


def _label_columns(sheet: Sheet, config: HospitalConfig) -> tuple[LabelSet, list[int]]:
    """The label set and the position of each label's column."""
    other = {config.image_column, config.patient_column, config.split_column}
    for key in ("attribute_column", "text_column"):
        name = getattr(config, key)
        if name is not None:
            sheet.position(name, f"[data] {key}")
            other.add(name)
    columns = [(name, i) for i, name in enumerate(sheet.header) if name and name not in other]
    try:
        if config.labels is not None:
            columns = _chosen(sheet, columns, config)
        labels = LabelSet.of([name for name, _ in columns], config.synonyms, config.label_type)
    except LabelError as error:
        raise LabelError(f"{sheet.path}: {error}") from error
    return labels, [i for _, i in columns]


def _chosen(sheet: Sheet, columns: list[tuple[str, int]], config: HospitalConfig) -> list[tuple[str, int]]:
    """The columns of the labels that the site names, in the order in which it names them."""
    wanted = LabelSet.of(config.labels or (), config.synonyms)
    found = [(canonical(name, config.synonyms), name, i) for name, i in columns]
    for name in wanted:
        if name not in {label for label, _, _ in found}:
            raise unknown(
                f"[data] labels entry (no such column in {sheet.path})", name, (n for n, _ in columns)
            )
    return [(name, i) for want in wanted for label, name, i in found if label == want]


def _values(sheet: Sheet, positions: list[int]) -> tuple[NDArray[np.float32], list[str]]:
    """Labels [n, c], and one fault per column with cells that are neither 1, 0 nor blank."""
    y = np.full((len(sheet.rows), len(positions)), np.nan, dtype=np.float32)
    faults = []
    for column, position in enumerate(positions):
        cells = sheet.cells(position)
        bad = [number for cell, number in zip(cells, sheet.numbers, strict=True) if cell not in VALUES]
        if bad:
            first = next(cell for cell in cells if cell not in VALUES)
            faults.append(
                f"{sheet.path} {rows_text(bad)}, column {sheet.header[position]!r}: {first!r} is not 1, 0 or "
                "blank (unknown); correct it, or list the label columns as [data] labels"
            )
        y[:, column] = [VALUES.get(cell, np.nan) for cell in cells]
    return y, faults


def _one_class(sheet: Sheet, y: NDArray[np.float32]) -> list[str]:
    """A fault if any row has more than one class; all of such a row becomes unknown."""
    several = (y == 1).sum(axis=1) > 1
    y[several] = np.nan
    numbers = [number for number, bad in zip(sheet.numbers, several, strict=True) if bad]
    what = (
        "more than one class of a multiclass table; keep one 1 in a row, or write "
        '[data] label_type = "multilabel"'
    )
    return fault(sheet, numbers, what)


def _split_column(sheet: Sheet, config: HospitalConfig) -> tuple[tuple[str, ...], list[str]]:
    """The split of each row, and the faults of that column."""
    cells = sheet.column(config.split_column, '[data] split_column, or split = "patients",')
    words = [cell.casefold() for cell in cells]
    bad = [number for word, number in zip(words, sheet.numbers, strict=True) if word not in SPLIT_WORDS]
    faults: list[str] = []
    if bad:
        first = next(cell for cell, word in zip(cells, words, strict=True) if word not in SPLIT_WORDS)
        hint = nearest(first, ("train", "validation", "test"))
        faults = fault(sheet, bad, f"unknown split {first!r}; {hint} (blank is unused)")
    return tuple(SPLIT_WORDS.get(word, "") for word in words), faults


def _texts(sheet: Sheet, config: HospitalConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    """The documents, where the site has such a column, and a fault for the blank ones."""
    if config.text_column is None:
        return None, []
    texts = sheet.column(config.text_column, "[data] text_column")
    blank = [number for text, number in zip(texts, sheet.numbers, strict=True) if not text]
    return tuple(texts), fault(sheet, blank, f"no text in column {config.text_column!r}; remove the row")


def _attributes(sheet: Sheet, config: HospitalConfig) -> tuple[str, ...] | None:
    """The attribute of each row, empty where its cell is blank; None where the site names no column."""
    column = config.attribute_column
    if column is None:
        return None
    values = sheet.column(column, "[data] attribute_column")
    if len(found := {*values} - {""}) > MOST_ATTRIBUTES:
        raise DataError(
            f"{sheet.path}: column {column!r} has {len(found)} values, and figures are given by at most "
            f"{MOST_ATTRIBUTES}; name another [data] attribute_column, or group its values"
        )
    return tuple(values)
