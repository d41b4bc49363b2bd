"""NIH ChestX-ray14 (Wang et al., CVPR 2017) in its official format.

`Data_Entry_2017*.csv` names the findings of an image joined by "|", or "No Finding"; `train_val_list.txt` and
`test_list.txt` name the images of the official split. Any of them may be gzipped.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import nearest
from suture.core.labels import LabelSet
from suture.data.dataset import ReleaseConfig
from suture.data.published import PublishedTable
from suture.data.readers import DataSet
from suture.data.reading import (
    Reading,
    Sheet,
    beside,
    fault,
    read_sheet,
    read_text,
    restrict,
    row_faults,
    rows_text,
)
from suture.data.split import by_patient
from suture.data.table import Table

SPELLINGS = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Effusion",
    "Emphysema",
    "Fibrosis",
    "Hernia",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pleural_Thickening",
    "Pneumonia",
    "Pneumothorax",
)
"""The fourteen findings as the official table writes them."""

LABELS = LabelSet.of(SPELLINGS)

_KEY = 'dataset = "nih"'


class NihConfig(ReleaseConfig):
    """NIH ChestX-ray14; `table` is Data_Entry_2017*.csv.

    Attributes:
        split: ``official`` takes the test images from test_list.txt, and holds out 12.5 % of the patients of
            train_val_list.txt for validation; ``patients`` cuts all patients 70/10/20.
        lists: the folder of the two lists. By default, the folder of `table`.
    """

    dataset: Literal["nih"] = "nih"
    split: Literal["official", "patients"] = "official"

    def idle(self) -> dict[str, str]:
        """As in the base, and `lists` where the split reads none."""
        unread = {"lists": 'with split = "patients"; remove it'} if self.split == "patients" else {}
        return super().idle() | unread


def read_nih(config: NihConfig) -> Reading:
    """Reads the official table; every one of the fourteen findings is known (1 or 0) in every row.

    Raises:
        DataError: the table or, for the official split, a list cannot be read.
        ConfigError: `labels` names something that is not among the fourteen.
        LabelError: `labels` names one finding twice.
    """
    sheet = read_sheet(config.table)
    # Commas within the brackets of later headers split those, so columns are addressed from the front.
    images, findings, patients = (
        sheet.column(name, _KEY) for name in ("Image Index", "Finding Labels", "Patient ID")
    )
    y, faults = _values(sheet, findings)
    if config.split == "patients":
        split = by_patient(patients, y, seed=config.seed)
    else:
        split, more = _official(sheet, images, patients, y, config)
        faults += more
    faults += row_faults(sheet, images, patients, split)
    table = Table(LABELS, tuple(images), tuple(patients), y, split, config.root)
    return Reading(restrict(table, config), tuple(faults))


def _values(sheet: Sheet, findings: list[str]) -> tuple[NDArray[np.float32], list[str]]:
    """Return the labels [n, 14], and a fault for each distinct word that is no finding."""
    column = {spelling: i for i, spelling in enumerate(SPELLINGS)}
    y = np.zeros((len(findings), len(SPELLINGS)), dtype=np.float32)
    bad: dict[str, list[int]] = {}
    for row, cell in enumerate(findings):
        if cell == "No Finding":
            continue
        for word in cell.split("|"):
            if word in column:
                y[row, column[word]] = 1
            else:
                bad.setdefault(word, []).append(sheet.numbers[row])
    for numbers in bad.values():
        y[np.isin(sheet.numbers, numbers)] = np.nan
    return y, [
        f"{sheet.path} {rows_text(numbers)}: unknown finding {word!r}; {nearest(word, SPELLINGS)}"
        for word, numbers in bad.items()
    ]


def _official(
    sheet: Sheet, images: list[str], patients: list[str], y: NDArray[np.float32], config: NihConfig
) -> tuple[tuple[str, ...], list[str]]:
    """Return the split of each row by the official lists, and a fault for the rows of none or both.

    12.5 % of the patients of the first list are for validation: the 7:1:2 of FedLSM (Deng et al., 2023), by
    patients rather than by images.
    """
    train_val, test = (_names(config, name) for name in ("train_val_list.txt", "test_list.txt"))
    rows = [i for i, image in enumerate(images) if image in train_val]
    cut = by_patient([patients[i] for i in rows], y[rows], (0.875, 0.125, 0.0), config.seed)
    split = ["test" if image in test else "" for image in images]
    for i, part in zip(rows, cut, strict=True):
        split[i] = part
    stray = [(image in train_val) == (image in test) for image in images]
    what = (
        f"in neither or both of train_val_list.txt and test_list.txt of {config.lists_folder}; use the "
        'official lists or [data] split = "patients"'
    )
    return tuple(split), fault(sheet, stray, what)


def _names(config: NihConfig, name: str) -> frozenset[str]:
    remedy = 'set [data] lists to its folder, or split = "patients"'
    return frozenset(read_text(beside(config.lists_folder, name, remedy)).split())


_TABLE = PublishedTable(
    "NIH ChestX-ray14",
    ("Image Index", "Finding Labels", "Patient ID"),
    {"split": "patients"},
    beside={"test_list.txt": {"split": "official"}},
)

NIH = DataSet(NihConfig, read_nih, "NIH ChestX-ray14 in its official format: Data_Entry_2017*.csv", (_TABLE,))
