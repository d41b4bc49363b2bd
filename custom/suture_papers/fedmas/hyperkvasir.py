"""HyperKvasir (Borgli et al., Scientific Data 2020): its 10,662 labelled images of 23 classes.

`table` is either a CSV of official folds (`5_fold_split.csv`, `2_fold_split.csv`; semicolons), or
`image-labels.csv`, which has the folders' spellings of the classes and no folds. Either may be gzipped. No
patients are published, so that every image is one of its own: frames of one examination may be in two splits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet, canonical_or_none
from suture.core.vocabulary import read_word_list
from suture.data.dataset import ReleaseConfig
from suture.data.readers import DataSet
from suture.data.reading import Reading, Sheet, beside, fault, read_sheet, restrict, row_faults
from suture.data.split import classes, divide, stratify
from suture.data.table import SPLITS, Table
from suture_papers.public_data import one_class

LABELS = LabelSet.of(read_word_list("hyperkvasir"), label_type="multiclass")

FOLDS = "5_fold_split.csv"
TRUTH = "image-labels.csv"

VALIDATION = 0.1
"""The share of the training folds that is held out for validation."""


_KEY = 'dataset = "hyperkvasir"'


class HyperKvasirConfig(ReleaseConfig):
    """HyperKvasir's labelled images; `table` is image-labels.csv or a CSV of official folds.

    Attributes:
        split: ``folds`` tests on one official fold, and holds out a tenth of each class of the others for
            validation; ``images`` cuts the images of each class 70/10/20.
        fold: the fold for testing, counted from 0.
        lists: the folder of 5_fold_split.csv. By default, the folder of `table`.
    """

    dataset: Literal["hyperkvasir"] = "hyperkvasir"
    split: Literal["folds", "images"] = "folds"
    fold: int = Field(default=0, ge=0)

    def idle(self) -> dict[str, str]:
        """As in the base, and `fold` and `lists` where the split has no folds."""
        remedy = 'with split = "images"; remove it, or write split = "folds"'
        return super().idle() | (dict.fromkeys(("fold", "lists"), remedy) if self.split == "images" else {})


def read_hyperkvasir(config: HyperKvasirConfig) -> Reading:
    """Reads either official table; each image is of exactly one of the 23 classes.

    With `split = "folds"` one fold is for testing, and a tenth of each class of the others for validation;
    with ``images`` each class is cut 70/10/20.

    Raises:
        DataError: a table cannot be read, or the folds are missing.
        ConfigError: there is no such fold, or `labels` names something that is not among the 23.
        LabelError: `labels` names one class twice.
    """
    sheet = _read(config.table)
    if "file-name" in sheet.header:
        images, words = sheet.column("file-name", _KEY), sheet.column("class-name", _KEY)
    elif "Video file" in sheet.header:
        images = [_file_name(name) for name in sheet.column("Video file", _KEY)]
        words = sheet.column("Finding", _KEY)
    else:
        raise DataError(
            f"{sheet.path} has the columns neither of {FOLDS} nor of {TRUTH}; correct [data] table"
        )
    names = {word: canonical_or_none(word) or "" for word in words}  # a cell may be blank
    places = {word: LABELS.index(name) for word, name in names.items() if name in LABELS}
    y, faults = one_class(sheet, words, places, LABELS.names, "class")
    table = Table(LABELS, tuple(images), tuple(images), y, ("",) * len(images), config.root)
    if config.split == "folds":
        split, more = _folds(sheet, table, config)
        faults += more
    else:
        split = divide(table, (0.7, 0.1, 0.2), config.seed)
    # An image is its own patient, so that one without a name is reported once.
    faults += row_faults(sheet, images, ["image"] * len(images), [""] * len(images))
    table = Table(LABELS, table.images, table.patients, y, split, config.root)
    return Reading(restrict(table, config), tuple(faults))


def _folds(sheet: Sheet, table: Table, config: HyperKvasirConfig) -> tuple[tuple[str, ...], list[str]]:
    """The split of each row by the official folds, and a fault for the rows that are in none."""
    remedy = 'set [data] lists to its folder, take it as table, or write split = "images"'
    there = "split-index" in sheet.header
    source = sheet if there else _read(beside(config.lists_folder, FOLDS, remedy))
    of = dict(zip(source.column("file-name", _KEY), source.column("split-index", _KEY), strict=True))
    folds = [of.get(image, "") for image in table.images]
    known = sorted({fold for fold in of.values() if fold.isdecimal()}, key=int)
    if config.fold >= len(known):
        raise ConfigError(
            f"[data] fold = {config.fold}: {source.path} has {len(known)} folds; choose 0 to {len(known) - 1}"
        )
    training = np.array([fold in known and fold != known[config.fold] for fold in folds])
    rows = table.rows(training)
    part = stratify(classes(rows.y), (1 - VALIDATION, VALIDATION), config.seed, rows.images)
    split = np.array(["test" if fold == known[config.fold] else "" for fold in folds], dtype="<U10")
    split[training] = np.array(SPLITS)[part]
    lost = [fold not in known for fold in folds]
    what = f'not in any fold of {source.path}; use the official file or [data] split = "images"'
    return tuple(split.tolist()), fault(sheet, lost, what)


def _read(path: Path) -> Sheet:
    """A table with commas, or with the semicolons of the official folds.

    Raises:
        DataError: the file cannot be read, or a row has more or fewer cells than the header.
    """
    sheet = read_sheet(path)
    if len(sheet.header) > 1 or ";" not in sheet.header[0]:
        return sheet
    header = tuple(name.strip() for name in sheet.header[0].split(";"))
    rows = tuple(tuple(row[0].split(";")) for row in sheet.rows)
    for number, row in zip(sheet.numbers, rows, strict=True):
        if len(row) != len(header):
            raise DataError(f"{path} row {number} has {len(row)} cells where the header has {len(header)}")
    return Sheet(path, header, rows, sheet.numbers)


def _file_name(name: str) -> str:
    return name if not name or name.endswith(".jpg") else f"{name}.jpg"


HYPERKVASIR = DataSet(
    HyperKvasirConfig,
    read_hyperkvasir,
    "HyperKvasir's labelled images: image-labels.csv or a CSV of official folds",
)
