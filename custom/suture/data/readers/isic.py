"""ISIC 2018 Task 3 (Codella et al., arXiv:1902.03368), the images of HAM10000 (Tschandl et al., 2018).

`table` is either `ISIC2018_Task3_Training_GroundTruth.csv`, a column per class, or `HAM10000_metadata.csv`,
the class as a word and the lesion of each image. For the former,
`ISIC2018_Task3_Training_LesionGroupings.csv` says which images show one lesion. Any of them may be gzipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError, nearest
from suture.core.labels import LabelSet
from suture.data.config import DataConfig
from suture.data.reading import Reading, Sheet, read_sheet, restricted, row_faults, rows_text
from suture.data.split import by_patient
from suture.data.table import Table

SPELLINGS = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
"""The seven classes as the ground truth writes them; the metadata write them small."""

LABELS = LabelSet.of(SPELLINGS, label_type="multiclass")

TRUTH = "ISIC2018_Task3_Training_GroundTruth.csv"
METADATA = "HAM10000_metadata.csv"
GROUPINGS = "ISIC2018_Task3_Training_LesionGroupings.csv"

WORDS = {spelling.lower(): i for i, spelling in enumerate(SPELLINGS)}
"""The column of each `dx` of the metadata."""

_VALUES = {"1.0": 1.0, "1": 1.0, "0.0": 0.0, "0": 0.0}


def read_isic(config: DataConfig) -> Reading:
    """Reads either official table; each image is of exactly one of the seven classes.

    The table's `patients` are lesions, whose images stay together in a split; with `split = "images"`, as
    FedLSM (Deng et al., 2023) has it, every image is one of its own.

    Raises:
        DataError: a table cannot be read, or the lesion groupings are missing.
        ConfigError: `labels` names something that is not among the seven.
        LabelError: `labels` names one class twice.
    """
    sheet = read_sheet(config.table)
    if "image_id" in sheet.header:
        names, (y, faults) = _cells(sheet, "image_id"), by_word(sheet, WORDS)
    elif "image" in sheet.header:
        names, (y, faults) = _cells(sheet, "image"), one_hot(sheet, SPELLINGS, "six")
    else:
        raise DataError(
            f"{sheet.path} has neither the columns of {TRUTH} nor those of {METADATA}; correct [data] table"
        )
    lesions = names
    if config.split_rule == "lesions":
        lesions, more = _lesions(sheet, names, config)
        faults += more
    split = by_patient(lesions, y, seed=config.seed)
    images = [f"{name}.jpg" if name else "" for name in names]
    # A lesion has one split by construction, and `_lesions` names the rows without one.
    faults += row_faults(sheet, images, ["lesion"] * len(images), [""] * len(images))
    table = Table(LABELS, tuple(images), tuple(lesions), y, split, config.root)
    return Reading(restricted(table, config), tuple(faults))


def by_word(sheet: Sheet, column: Mapping[str, int]) -> tuple[NDArray[np.float32], list[str]]:
    """Labels [n, c] of a column `dx` of words, and a fault for each distinct word that is no class.

    Args:
        column: of each word.
    """
    words = _cells(sheet, "dx")
    y = np.full((len(words), len(column)), np.nan, dtype=np.float32)
    bad: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        if word in column:
            y[row] = 0
            y[row, column[word]] = 1
        else:
            bad.setdefault(word, []).append(sheet.numbers[row])
    return y, [
        f"{sheet.path} {rows_text(numbers)}: unknown dx {word!r}; {nearest(word, column)}"
        for word, numbers in bad.items()
    ]


def one_hot(sheet: Sheet, spellings: Sequence[str], others: str) -> tuple[NDArray[np.float32], list[str]]:
    """Labels [n, c] of a column for each class, and a fault for the rows that are not of one class.

    Args:
        others: how many classes that leaves, as a word.
    """
    columns = [_cells(sheet, name) for name in spellings]
    y = np.array([[_VALUES.get(cell, np.nan) for cell in cells] for cells in columns], dtype=np.float32).T
    wrong = y.sum(axis=1) != 1
    y[wrong] = np.nan
    numbers = [number for number, bad in zip(sheet.numbers, wrong, strict=True) if bad]
    return y, _fault(sheet, numbers, f"not one class with 1.0 and {others} with 0.0; use the official table")


def _lesions(sheet: Sheet, names: list[str], config: DataConfig) -> tuple[list[str], list[str]]:
    """The lesion of each row, and a fault for the rows without one."""
    if "lesion_id" in sheet.header:
        lesions, faults = _cells(sheet, "lesion_id"), []
        what = "no lesion; use the official table"
    else:
        groupings = read_sheet(_groupings(config))
        of: dict[str, str] = {}
        pairs = zip(_cells(groupings, "image"), _cells(groupings, "lesion_id"), strict=True)
        torn = [number for number, pair in zip(groupings.numbers, pairs, strict=True) if _differs(of, *pair)]
        faults = _fault(groupings, torn, "an image that an earlier row gives to another lesion; keep one")
        lesions = [of.get(name, "") for name in names]
        what = f"no lesion in {groupings.path}; use the official file"
    lost = [number for number, lesion in zip(sheet.numbers, lesions, strict=True) if not lesion]
    return lesions, faults + _fault(sheet, lost, what + ' or [data] split = "images"')


def _differs(of: dict[str, str], image: str, lesion: str) -> bool:
    """Notes the lesion of an image; whether it was another one before."""
    return of.setdefault(image, lesion) != lesion


def _groupings(config: DataConfig) -> Path:
    folder = config.lists or config.table.parent
    for path in (folder / GROUPINGS, folder / f"{GROUPINGS}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder / GROUPINGS} is missing; set [data] lists to its folder, take {METADATA} as table, or "
        'write split = "images"'
    )


def _cells(sheet: Sheet, name: str) -> list[str]:
    return sheet.cells(sheet.position(name, 'dataset = "isic2018"'))


def _fault(sheet: Sheet, numbers: list[int], what: str) -> list[str]:
    return [f"{sheet.path} {rows_text(numbers)}: {what}"] if numbers else []
