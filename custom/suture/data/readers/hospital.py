"""A hospital's own table: image, patient, split, and one column per label.

    image,patient,split,Cardiomegaly,Pleural Effusion
    a/0001.png,P17,train,1,0
    a/0002.png,P23,test,0,

Where the site names a `text_column`, its cells are the documents, and the image column names them.

A label cell is 1 (present), 0 (absent) or blank (unknown; never taken for absent). A multiclass table has at
most one 1 in a row; a row of zeros is an image of none of its classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import LabelError, nearest, unknown
from suture.core.labels import LabelSet, canonical
from suture.data.config import DataConfig
from suture.data.reading import Reading, Sheet, read_sheet, row_faults, rows_text
from suture.data.split import by_patient
from suture.data.table import Table

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


def read_hospital(config: DataConfig) -> Reading:
    """Reads the table of a hospital.

    Raises:
        DataError: the file cannot be read, or a column is missing.
        LabelError: no label column, or two that are one label.
        ConfigError: `labels` names a class that the table lacks.
    """
    sheet = read_sheet(config.table)
    images = sheet.cells(sheet.position(config.image_column, "[data] image_column"))
    patients = sheet.cells(sheet.position(config.patient_column, "[data] patient_column"))
    labels, positions = _label_columns(sheet, config)
    y, faults = _values(sheet, positions)
    if labels.label_type == "multiclass":
        faults += _one_class(sheet, y)
    if config.split_rule == "patients":
        split = by_patient(patients, y, seed=config.seed)
    else:
        split, more = _split_column(sheet, config)
        faults += more
    texts, more = _texts(sheet, config)
    faults += more + row_faults(sheet, images, patients, split, "image" if texts is None else "document")
    table = Table(labels, tuple(images), tuple(patients), y, split, config.root, texts)
    return Reading(table, tuple(faults))


def _label_columns(sheet: Sheet, config: DataConfig) -> tuple[LabelSet, list[int]]:
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
        labels = LabelSet.of([name for name, _ in columns], config.synonyms, config.label_task)
    except LabelError as error:
        raise LabelError(f"{sheet.path}: {error}") from error
    return labels, [i for _, i in columns]


def _chosen(sheet: Sheet, columns: list[tuple[str, int]], config: DataConfig) -> list[tuple[str, int]]:
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
    fault = (
        f"{sheet.path} {rows_text(numbers)}: more than one class of a multiclass table; keep one 1 in a row, "
        'or write [data] label_type = "multilabel"'
    )
    return [fault] if numbers else []


def _split_column(sheet: Sheet, config: DataConfig) -> tuple[tuple[str, ...], list[str]]:
    """The split of each row, and the faults of that column."""
    cells = sheet.cells(sheet.position(config.split_column, '[data] split_column, or split = "patients",'))
    words = [cell.casefold() for cell in cells]
    bad = [number for word, number in zip(words, sheet.numbers, strict=True) if word not in SPLIT_WORDS]
    faults = []
    if bad:
        first = next(cell for cell, word in zip(cells, words, strict=True) if word not in SPLIT_WORDS)
        hint = nearest(first, ("train", "validation", "test"))
        faults.append(f"{sheet.path} {rows_text(bad)}: unknown split {first!r}; {hint} (blank is unused)")
    return tuple(SPLIT_WORDS.get(word, "") for word in words), faults


def _texts(sheet: Sheet, config: DataConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    """The documents, where the site has such a column, and a fault for the blank ones."""
    if config.text_column is None:
        return None, []
    texts = sheet.cells(sheet.position(config.text_column, "[data] text_column"))
    blank = [number for text, number in zip(texts, sheet.numbers, strict=True) if not text]
    fault = f"{sheet.path} {rows_text(blank)}: no text in column {config.text_column!r}; remove the row"
    return tuple(texts), [fault] if blank else []
