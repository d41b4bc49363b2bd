"""CheXpert (Irvin et al., AAAI 2019) in its official format: `train.csv` and `valid.csv`.

A path there starts with the name of the release, as in
`CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg`; `root` is the folder of the
release, in which the two tables lie. A blank cell is a finding that the report does not mention and
counts as absent; -1 is one of which the report is not certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.dataset import ReleaseConfig
from suture.data.published import PublishedTable
from suture.data.readers import DataSet
from suture.data.reading import Reading, Sheet, fault, read_sheet, restrict, row_faults
from suture.data.split import by_patient
from suture.data.table import Table

SPELLINGS = (
    "Enlarged Cardiomediastinum",
    "Cardiomegaly",
    "Lung Opacity",
    "Lung Lesion",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Pneumothorax",
    "Pleural Effusion",
    "Pleural Other",
    "Fracture",
    "Support Devices",
)
"""The thirteen findings as the official tables write them; "No Finding" is the absence of all."""

LABELS = LabelSet.of(SPELLINGS)

Uncertain = Literal["zeros", "ones", "ignore"]
_UNCERTAIN: dict[Uncertain, float] = {"zeros": 0.0, "ones": 1.0, "ignore": np.nan}

_KEY = 'dataset = "chexpert"'


class ChexpertConfig(ReleaseConfig):
    """CheXpert; `table` is train.csv, and `root` is the folder of the release that holds it.

    Attributes:
        split: ``patients`` cuts the patients of train.csv 70/10/20; ``official`` tests on valid.csv and holds
            out 12.5 % of the patients of train.csv for validation.
        lists: the folder of valid.csv. By default, the folder of `table`.
        views: use the ``frontal`` images only, or ``all``.
        uncertain: read a label of -1 as absent (``zeros``), as present (``ones``) or as unknown (``ignore``).
    """

    dataset: Literal["chexpert"] = "chexpert"
    split: Literal["patients", "official"] = "patients"
    views: Literal["frontal", "all"] = "frontal"
    uncertain: Uncertain = "zeros"

    def idle(self) -> dict[str, str]:
        """As in the base, and `lists` where the split reads none."""
        unread = {"lists": 'with split = "patients"; remove it'} if self.split == "patients" else {}
        return super().idle() | unread


@dataclass(frozen=True)
class _Part:
    """The rows of one of the two tables that are in use, and their faults without those of splits."""

    sheet: Sheet
    images: list[str]
    patients: list[str]
    y: NDArray[np.float32]
    faults: list[str]


def read_chexpert(config: ChexpertConfig) -> Reading:
    """Reads `train.csv`, and `valid.csv` for the official split, where it is the test set.

    Source: Surgical Aggregation (arXiv 2301.06683): frontal views, uncertain as absent (U-Zeros), 70/10/20 of
    the patients of `train.csv`.

    Raises:
        DataError: a table cannot be read, or has no image of the chosen views.
        ConfigError: `labels` names something that is not among the thirteen.
        LabelError: `labels` names one finding twice.
    """
    parts = [_read(config.table, config)]
    split = _split(parts[0], config)
    faults: list[str] = []
    if config.split == "official":
        parts.append(_read(config.lists_folder / "valid.csv", config))
        split += ("test",) * len(parts[1].images)
        faults = _in_both(*parts)
    images, patients = (tuple(x for part in parts for x in getattr(part, f)) for f in ("images", "patients"))
    y = np.concatenate([part.y for part in parts])
    table = Table(LABELS, images, patients, y, split, config.root)
    faults = [fault for part in parts for fault in part.faults] + faults
    return Reading(restrict(table, config), tuple(faults))


def _split(part: _Part, config: ChexpertConfig) -> tuple[str, ...]:
    """70/10/20 of the patients; 87.5 and 12.5 % of them where `valid.csv` is the test set."""
    fractions = (0.7, 0.1, 0.2) if config.split == "patients" else (0.875, 0.125, 0.0)
    return by_patient(part.patients, part.y, fractions, config.seed)


def _in_both(train: _Part, test: _Part) -> list[str]:
    known = set(train.patients) - {""}
    what = f"a patient who is also in {train.sheet.path}; keep each patient in one of the files"
    return fault(test.sheet, map(known.__contains__, test.patients), what)


def _read(path: Path, config: ChexpertConfig) -> _Part:
    sheet = read_sheet(path)
    paths, views = (sheet.column(name, _KEY) for name in ("Path", "Frontal/Lateral"))
    used = [config.views == "all" or view == "Frontal" for view in views]
    if not any(used):
        raise DataError(f'{path} contains no frontal image; write [data] views = "all" to use the others')
    sheet = sheet.only(used)
    names = [name.split("/") for name, use in zip(paths, used, strict=True) if use]
    images = ["/".join(parts[1:]) for parts in names]
    patients = [parts[2] if len(parts) > 2 else "" for parts in names]
    y, faults = values(sheet, SPELLINGS, _KEY, config.uncertain)
    return _Part(sheet, images, patients, y, faults + row_faults(sheet, images, patients, [""] * len(images)))


def values(
    sheet: Sheet, spellings: Sequence[str], key: str, uncertain: Uncertain | None
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the labels [n, c] of the named columns, and a fault for each column with other cells.

    Args:
        key: as in `Sheet.position`.
        uncertain: how to read -1; blank is then absent. None allows 1 and 0 alone.
    """
    meaning = {"0.0": 0.0, "0": 0.0, "1.0": 1.0, "1": 1.0}
    if uncertain:
        meaning |= {"": 0.0} | dict.fromkeys(("-1.0", "-1"), _UNCERTAIN[uncertain])
    words = "1.0, 0.0, -1.0 and blank" if uncertain else "1 and 0"
    y = np.full((len(sheet.rows), len(spellings)), np.nan, dtype=np.float32)
    faults: list[str] = []
    for column, name in enumerate(spellings):
        cells = sheet.column(name, key)
        y[:, column] = [meaning.get(cell, np.nan) for cell in cells]
        bad = [cell not in meaning for cell in cells]
        faults += fault(sheet, bad, f"{name!r} is not one of {words}")
    return y, faults


_TABLE = PublishedTable(
    "CheXpert",
    ("Path", "Frontal/Lateral", *SPELLINGS),
    {"views": "frontal", "uncertain": "zeros"},
    beside={"valid.csv": {"split": "official"}},
)

CHEXPERT = DataSet(
    ChexpertConfig,
    read_chexpert,
    "CheXpert in its official format: train.csv, valid.csv",
    (_TABLE,),
)
