"""MIMIC-CXR-JPG (Johnson et al., arXiv:1901.07042) in its official format, or with the labels of CXR-LT.

`table` is either `mimic-cxr-2.0.0-chexpert.csv`, a row per study, or a table of CXR-LT (Holste et al., MICCAI
2023), a row per image and 26 classes. `mimic-cxr-2.0.0-metadata.csv` says which images a study has and from
which side they were taken; images lie at ``files/p10/p10000032/s50414267/DICOM.jpg`` in `root`. Any of the
tables may be gzipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import compress
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import ConfigError, DataError
from suture.core.files import within_folder
from suture.core.labels import LabelSet
from suture.data.archives import reports, unpacking
from suture.data.dataset import DatasetConfig, ReleaseConfig
from suture.data.limits import FOLLOW
from suture.data.published import PublishedTable
from suture.data.readers import DataSet
from suture.data.reading import Reading, Sheet, beside, fault, read_sheet, read_text, restrict, row_faults
from suture.data.split import by_patient
from suture.data.table import Table
from suture_papers.chest_xrays.chexpert import LABELS, SPELLINGS, Uncertain, values

CXR_LT = (
    *("Atelectasis", "Calcification of the Aorta", "Cardiomegaly", "Consolidation", "Edema", "Emphysema"),
    *("Enlarged Cardiomediastinum", "Fibrosis", "Fracture", "Hernia", "Infiltration", "Lung Lesion"),
    *("Lung Opacity", "Mass", "Nodule", "Pleural Effusion", "Pleural Other", "Pleural Thickening"),
    *("Pneumomediastinum", "Pneumonia", "Pneumoperitoneum", "Pneumothorax", "Subcutaneous Emphysema"),
    *("Support Devices", "Tortuous Aorta"),
)
"""The classes of CXR-LT; its 26th, "No Finding", is the absence of all."""

METADATA = "mimic-cxr-2.0.0-metadata.csv"
SPLIT = "mimic-cxr-2.0.0-split.csv"
_FRONTAL = ("AP", "PA")
_PARTS = {"train": "train", "validate": "validation", "test": "test"}


_KEY = 'dataset = "mimic"'


def _undrawn(split: str) -> dict[str, str]:
    remedy = f'with split = "{split}"; remove it, or write split = "patients"'
    return {} if split == "patients" else {"seed": remedy}


class MimicConfig(ReleaseConfig):
    """MIMIC-CXR-JPG; `table` is mimic-cxr-2.0.0-chexpert.csv or a table of CXR-LT.

    Attributes:
        split: ``test`` uses every image for testing; ``official`` reads mimic-cxr-2.0.0-split.csv;
            ``patients`` cuts the patients 70/10/20.
        lists: the folder of MIMIC's metadata and split tables. By default, the folder of `table`.
        views: use the ``frontal`` images only, or ``all``.
        uncertain: read a label of -1 as absent (``zeros``), as present (``ones``) or as unknown (``ignore``).
    """

    dataset: Literal["mimic"] = "mimic"
    split: Literal["test", "official", "patients"] = "test"
    views: Literal["frontal", "all"] = "frontal"
    uncertain: Uncertain = "zeros"

    def idle(self) -> dict[str, str]:
        """As in the base, and `seed` where nothing is drawn."""
        return super().idle() | _undrawn(self.split)


@dataclass(frozen=True)
class _Images:
    """The images in use, with their identifiers.

    Attributes:
        sheet: the rows that list the images, for messages.
        rows: the row of the label table that each image belongs to.
        faults: what is wrong with the join of the two tables.
    """

    sheet: Sheet
    dicoms: list[str]
    patients: list[str]
    studies: list[str]
    rows: list[int]
    faults: list[str]


def read_mimic(config: MimicConfig) -> Reading:
    """Reads the labels, joined with the metadata where these say what the label table does not.

    Source: Surgical Aggregation (arXiv 2301.06683): frontal views, an external test set; uncertain as absent.

    Raises:
        DataError: a table cannot be read, or has no image of the chosen views.
        ConfigError: `labels` names something that the table does not have.
        LabelError: `labels` names one finding twice.
    """
    sheet = read_sheet(config.table)
    per_image = "dicom_id" in sheet.header
    if per_image and config.uncertain != "zeros":
        raise ConfigError(f"[data] uncertain has no effect for {config.table}, which has no -1; remove it")
    names = _classes(sheet) if per_image else SPELLINGS
    y, faults = values(sheet, names, _KEY, None if per_image else config.uncertain)
    found = _own_images(sheet, config) if per_image else _images_of_studies(sheet, config)
    if not found.rows:
        why = "none of the metadata's images" if config.views == "all" else "no frontal image"
        raise DataError(f"{config.table} has {why}; correct [data] table, lists or views")
    images = [
        f"files/p{who[:2]}/p{who}/s{study}/{dicom}.jpg" if dicom else ""
        for dicom, who, study in zip(found.dicoms, found.patients, found.studies, strict=True)
    ]
    split, more = _split(found, y[found.rows], config)
    faults += [*found.faults, *more, *row_faults(found.sheet, images, found.patients, split)]
    table = Table(LabelSet.of(names), tuple(images), tuple(found.patients), y[found.rows], split, config.root)
    return Reading(restrict(table, config), tuple(faults))


def _classes(sheet: Sheet) -> tuple[str, ...]:
    """The classes of CXR-LT that a table has: releases differ, so one may be absent, but not misspelt."""
    names = tuple(name for name in CXR_LT if name in sheet.header)
    for column in sheet.header:
        close = get_close_matches(column, CXR_LT, n=1, cutoff=0.85)
        if close and column not in CXR_LT:
            raise DataError(f"{sheet.path} has a column {column!r}; did you mean {close[0]!r}?")
    if not names:
        raise DataError(f"{sheet.path} has no class of CXR-LT; name its table of labels")
    return names


def _own_images(sheet: Sheet, config: MimicConfig) -> _Images:
    """The images of a table of CXR-LT, which has one row for each."""
    dicoms, patients, studies = _columns(sheet, ("dicom_id", "subject_id", "study_id"))
    used, faults = [True] * len(dicoms), []
    if config.views == "frontal":
        views = _views(sheet, dicoms, config)
        used = [view in _FRONTAL for view in views]
        unknown = [view is None for view in views]
        faults = fault(sheet, unknown, f"an image that is missing from {METADATA}")
    rows = [row for row, use in enumerate(used) if use]
    dicoms, patients, studies = ([cells[row] for row in rows] for cells in (dicoms, patients, studies))
    return _Images(sheet.only(used), dicoms, _numbers(patients), _numbers(studies), rows, faults)


def _views(sheet: Sheet, dicoms: Sequence[str], config: MimicConfig) -> list[str] | list[str | None]:
    """The view position of each image, from the table itself where its release of CXR-LT has that column."""
    if "ViewPosition" in sheet.header:
        return _columns(sheet, ("ViewPosition",))[0]
    metadata = read_sheet(_beside(config, METADATA))
    position = dict(zip(*_columns(metadata, ("dicom_id", "ViewPosition")), strict=True))
    return [position.get(dicom) for dicom in dicoms]


def _images_of_studies(sheet: Sheet, config: MimicConfig) -> _Images:
    """The images of the studies that have labels: MIMIC has 227,835 studies and labels of 227,827."""
    labelled = list(zip(*map(_numbers, _columns(sheet, ("subject_id", "study_id"))), strict=True))
    row_of = {study: row for row, study in reversed(list(enumerate(labelled)))}
    metadata = read_sheet(_beside(config, METADATA))
    dicoms, patients, studies, views = _columns(
        metadata, ("dicom_id", "subject_id", "study_id", "ViewPosition")
    )
    of = list(zip(_numbers(patients), _numbers(studies), strict=True))
    used = [
        study in row_of and (config.views == "all" or view in _FRONTAL)
        for study, view in zip(of, views, strict=True)
    ]
    twice = [row_of[study] != row for row, study in enumerate(labelled)]
    there = set(of)
    lost = [study not in there for study in labelled]
    faults = fault(sheet, twice, "a repeated study; remove the row")
    faults += fault(sheet, lost, f"a study without an image in {METADATA}")
    in_use = list(compress(of, used))
    return _Images(
        metadata.only(used),
        list(compress(dicoms, used)),
        [who for who, _ in in_use],
        [study for _, study in in_use],
        [row_of[study] for study in in_use],
        faults,
    )


def _split(found: _Images, y: NDArray[np.float32], config: MimicConfig) -> tuple[tuple[str, ...], list[str]]:
    """The split of each image, and a fault for those that the official list does not have."""
    if config.split == "test":
        return ("test",) * len(found.rows), []
    if config.split == "patients":
        return by_patient(found.patients, y, seed=config.seed), []
    sheet = read_sheet(_beside(config, SPLIT))
    dicoms, words = _columns(sheet, ("dicom_id", "split"))
    strange = [word not in _PARTS for word in words]
    part = {dicom: _PARTS.get(word, "") for dicom, word in zip(dicoms, words, strict=True)}
    absent = [dicom not in part for dicom in found.dicoms]
    faults = fault(sheet, strange, f"the split must be one of {', '.join(_PARTS)}")
    faults += fault(found.sheet, absent, f"an image that is missing from {SPLIT}")
    return tuple(part.get(dicom, "") for dicom in found.dicoms), faults


def _columns(sheet: Sheet, names: Sequence[str]) -> list[list[str]]:
    return [sheet.column(name, _KEY) for name in names]


def _numbers(names: Sequence[str]) -> list[str]:
    """Normalise the numbers of patients and studies: 50414267, where some tables write s50414267."""
    return [name.lstrip("ps") for name in names]


def _beside(config: MimicConfig, name: str) -> Path:
    return beside(config.lists_folder, name, "set [data] lists to its folder")


_KEY = 'dataset = "mimic_reports"'


class MimicReportsConfig(DatasetConfig):
    """The reports of MIMIC-CXR; `table` is mimic-cxr-2.0.0-chexpert.csv, and `root` holds the reports.

    Attributes:
        root: the folder that holds files/, or its archive.
        split: ``patients`` cuts the patients 70/10/20; ``test`` uses every report for testing.
        uncertain: read a label of -1 as absent (``zeros``), as present (``ones``) or as unknown (``ignore``).
    """

    names_known: ClassVar[bool] = True
    dataset: Literal["mimic_reports"] = "mimic_reports"
    split: Literal["patients", "test"] = "patients"
    uncertain: Uncertain = "zeros"

    @property
    def holds_text(self) -> bool:
        """True: the reports are files."""
        return True

    def idle(self) -> dict[str, str]:
        """As in the base, but for the files of reports; and `seed` where nothing is drawn."""
        idle = {key: why for key, why in super().idle().items() if key not in ("partial", "follow_links")}
        return idle | _undrawn(self.split)


def read_mimic_reports(config: MimicReportsConfig) -> Reading:
    """Reads the report of each labelled study: subject and study number join the two, never their order.

    Source: PMFL (Zhang et al., arXiv:2112.05321): blank and uncertain findings are absent. A report whose
    study has no labels is left out, as MIMIC has a few; a study without a report is a fault unless `partial`.

    Raises:
        DataError: the table or `root` cannot be read, or no study has a report.
        ConfigError: `labels` names something that is not among the thirteen.
        LabelError: `labels` names one finding twice.
    """
    sheet = read_sheet(config.table)
    patients, studies = (
        [cell.lstrip("ps") for cell in sheet.column(name, _KEY)] for name in ("subject_id", "study_id")
    )
    y, faults = values(sheet, SPELLINGS, _KEY, config.uncertain)
    names = [f"files/p{who[:2]}/p{who}/s{study}.txt" for who, study in zip(patients, studies, strict=True)]
    texts = _texts(config, names)
    here = np.array([bool(text) for text in texts], dtype=np.bool_)
    if not here.any():
        raise DataError(f"{config.root} contains no report of {config.table}, such as {names[0]}")
    split = ("test",) * len(names) if config.split == "test" else by_patient(patients, y, seed=config.seed)
    faults += row_faults(sheet, studies, patients, split, "document")
    if not config.partial:
        faults += fault(sheet, ~here, "a study without a report; correct [data] root, or set partial")
    table = Table(LABELS, tuple(studies), tuple(patients), y, split, config.root, tuple(texts)).rows(here)
    return Reading(restrict(table, config), tuple(faults), absent=int((~here).sum()))


def _texts(config: MimicReportsConfig, names: Sequence[str]) -> list[str]:
    """The report of each name; the empty string where there is none."""
    root = config.root
    if root.is_dir():
        inside, paths = within_folder(root), [root / name for name in names]
        for path in paths if not config.follow_links else ():
            if not inside(path):
                raise DataError(f"{path} leads out of {root}; {FOLLOW}")
        return [read_text(path).strip() if path.is_file() else "" for path in paths]
    wanted = frozenset(names)
    with unpacking(root, "take the folder of files/, or its archive"):
        # The archive may have a folder of its own around files/.
        found = {
            name[name.find("files/") :]: data.decode("utf-8").strip()
            for name, data in reports(root, lambda name: name[name.find("files/") :] in wanted)
        }
    return [found.get(name, "") for name in names]


_DRAWN, _OFFICIAL = {"split": "patients", "views": "frontal"}, {SPLIT: {"split": "official"}}

MIMIC = DataSet(
    MimicConfig,
    read_mimic,
    "MIMIC-CXR-JPG in its official format, or with the labels of CXR-LT",
    (
        PublishedTable("MIMIC-CXR-JPG", ("subject_id", "study_id", *SPELLINGS), _DRAWN, _OFFICIAL),
        PublishedTable("CXR-LT", ("dicom_id", "subject_id", "study_id", *CXR_LT[:8]), _DRAWN, _OFFICIAL),
    ),
)


MIMIC_REPORTS = DataSet(
    MimicReportsConfig, read_mimic_reports, "MIMIC-CXR's free-text reports with the labels of CheXpert"
)
