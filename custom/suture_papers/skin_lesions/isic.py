"""ISIC 2018 Task 3 (Codella et al., arXiv:1902.03368), the images of HAM10000 (Tschandl et al., 2018).

`table` is either `ISIC2018_Task3_Training_GroundTruth.csv`, a column per class, or `HAM10000_metadata.csv`,
the class as a word and the lesion of each image. For the former,
`ISIC2018_Task3_Training_LesionGroupings.csv` says which images show one lesion. Any of them may be gzipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.dataset import ReleaseConfig
from suture.data.published import PublishedTable
from suture.data.readers import DataSet
from suture.data.reading import Reading, Sheet, beside, fault, read_sheet, restrict, row_faults
from suture.data.split import by_patient
from suture.data.table import Table
from suture_papers.public_data import one_class

SPELLINGS = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
"""The seven classes as the ground truth writes them; the metadata write them small."""

LABELS = LabelSet.of(SPELLINGS, label_type="multiclass")

TRUTH = "ISIC2018_Task3_Training_GroundTruth.csv"
METADATA = "HAM10000_metadata.csv"
GROUPINGS = "ISIC2018_Task3_Training_LesionGroupings.csv"

WORDS = {spelling.lower(): i for i, spelling in enumerate(SPELLINGS)}
"""The column of each `dx` of the metadata."""

_KEY = 'dataset = "isic2018"'
_VALUES = {"1.0": 1.0, "1": 1.0, "0.0": 0.0, "0": 0.0}


class IsicConfig(ReleaseConfig):
    """ISIC 2018 Task 3; `table` is the ground truth or HAM10000_metadata.csv.

    Attributes:
        split: cut the ``lesions`` 70/10/20, so that all images of a lesion stay together, or the ``images``.
        lists: the folder of ISIC2018_Task3_Training_LesionGroupings.csv. By default, the folder of `table`.
    """

    dataset: Literal["isic2018"] = "isic2018"
    split: Literal["lesions", "images"] = "lesions"

    def idle(self) -> dict[str, str]:
        """As in the base, and `lists` where the split reads none."""
        unread = {"lists": 'with split = "images"; remove it'} if self.split == "images" else {}
        return super().idle() | unread


def read_isic(config: IsicConfig) -> Reading:
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
        names, words = sheet.column("image_id", _KEY), sheet.column("dx", _KEY)
        y, faults = one_class(sheet, words, WORDS, WORDS, "dx")
    elif "image" in sheet.header:
        names, (y, faults) = sheet.column("image", _KEY), one_hot(sheet, SPELLINGS, _KEY)
    else:
        raise DataError(
            f"{sheet.path} has the columns neither of {TRUTH} nor of {METADATA}; correct [data] table"
        )
    lesions = names
    if config.split == "lesions":
        lesions, more = _lesions(sheet, names, config)
        faults += more
    split = by_patient(lesions, y, seed=config.seed)
    images = [f"{name}.jpg" if name else "" for name in names]
    # A lesion has one split by construction, and `_lesions` names the rows without one.
    faults += row_faults(sheet, images, ["lesion"] * len(images), [""] * len(images))
    table = Table(LABELS, tuple(images), tuple(lesions), y, split, config.root)
    return Reading(restrict(table, config), tuple(faults))


def one_hot(sheet: Sheet, spellings: Sequence[str], key: str) -> tuple[NDArray[np.float32], list[str]]:
    """Return the labels [n, c] of a column per class, and a fault for the rows that are not of one class.

    Args:
        key: as in `Sheet.position`.
    """
    columns = [sheet.column(name, key) for name in spellings]
    y = np.array([[_VALUES.get(cell, np.nan) for cell in cells] for cells in columns], dtype=np.float32).T
    wrong = y.sum(axis=1) != 1
    y[wrong] = np.nan
    return y, fault(
        sheet, wrong, "a row must have 1.0 for one class and 0.0 for the others; use the official table"
    )


def _lesions(sheet: Sheet, names: list[str], config: IsicConfig) -> tuple[list[str], list[str]]:
    """The lesion of each row, and a fault for the rows without one."""
    if "lesion_id" in sheet.header:
        lesions, faults = sheet.column("lesion_id", _KEY), []
        what = "the lesion is blank; use the official table"
    else:
        remedy = f'set [data] lists to its folder, take {METADATA} as table, or write split = "images"'
        groupings = read_sheet(beside(config.lists_folder, GROUPINGS, remedy))
        of: dict[str, str] = {}
        pairs = zip(groupings.column("image", _KEY), groupings.column("lesion_id", _KEY), strict=True)
        torn = [of.setdefault(image, lesion) != lesion for image, lesion in pairs]
        faults = fault(groupings, torn, "an earlier row assigns its image to another lesion; keep one")
        lesions = [of.get(name, "") for name in names]
        what = f"not listed in {groupings.path}; use the official file"
    return lesions, faults + fault(sheet, map(not_, lesions), what + ' or [data] split = "images"')


ISIC = DataSet(
    IsicConfig,
    read_isic,
    "ISIC 2018 Task 3 / HAM10000 in its official formats: ground truth or metadata CSV",
    (
        PublishedTable(
            "ISIC 2018 Task 3", ("image", *SPELLINGS), {"split": "images"}, {GROUPINGS: {"split": "lesions"}}
        ),
        PublishedTable("HAM10000", ("lesion_id", "image_id", "dx", "dx_type"), {"split": "lesions"}),
    ),
)
