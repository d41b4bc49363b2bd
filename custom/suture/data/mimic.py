"""MIMIC-CXR-JPG (Johnson et al., arXiv:1901.07042) in its official format, or with the labels of CXR-LT.

`table` is either `mimic-cxr-2.0.0-chexpert.csv`, a row per study, or a table of CXR-LT (Holste et al., MICCAI
2023), a row per image and 26 classes. `mimic-cxr-2.0.0-metadata.csv` says which images a study has and from
which side they were taken; images lie at ``files/p10/p10000032/s50414267/DICOM.jpg`` in `root`. Any of the
tables may be gzipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suture.config import DataConfig
from suture.data.chexpert import SPELLINGS, values
from suture.data.reading import Reading, Sheet, read_sheet, restricted, row_faults, rows_text
from suture.data.split import by_patient
from suture.data.table import Table
from suture.errors import DataError
from suture.labels import LabelSet

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


@dataclass(frozen=True)
class _Images:
    """Images with what names them; `rows` are their rows of the label table."""

    sheet: Sheet
    dicoms: list[str]
    patients: list[str]
    studies: list[str]
    rows: list[int]


def read_mimic(config: DataConfig) -> Reading:
    """Reads the labels, joined with the metadata where these say what the label table does not.

    Source: Surgical Aggregation (arXiv 2301.06683): frontal views, an external test set; uncertain as absent.

    Raises:
        DataError: a table cannot be read, or has no image of the views asked for.
        ConfigError: `labels` names something that the table does not have.
        LabelError: `labels` names one finding twice.
    """
    sheet = read_sheet(config.table)
    per_image = "dicom_id" in sheet.header
    names = tuple(n for n in CXR_LT if n in sheet.header) if per_image else SPELLINGS
    if not names:
        raise DataError(f"{config.table} has none of the classes of CXR-LT; name its table of labels")
    y, faults = values(sheet, names, config)
    found = _own_images(sheet, config) if per_image else _images_of_studies(sheet, config)
    if not found.rows:
        raise DataError(f'{config.table} has no frontal image; write [data] views = "all" to use the others')
    images = [
        f"files/p{who[:2]}/p{who}/s{study}/{dicom}.jpg"
        for dicom, who, study in zip(found.dicoms, found.patients, found.studies, strict=True)
    ]
    split = _split(found, y[found.rows], config)
    if not per_image:
        faults += _without_image(sheet, config)
    faults += row_faults(found.sheet, images, found.patients, split)
    table = Table(LabelSet.of(names), tuple(images), tuple(found.patients), y[found.rows], split, config.root)
    return Reading(restricted(table, config), tuple(faults))


def _own_images(sheet: Sheet, config: DataConfig) -> _Images:
    """The images that a table of CXR-LT names itself."""
    dicoms, patients, studies = _columns(sheet, ("dicom_id", "subject_id", "study_id"))
    used = [True] * len(dicoms)
    if config.views == "frontal":
        used = [view in _FRONTAL for view in _views(sheet, dicoms, config)]
    rows = [row for row, use in enumerate(used) if use]
    dicoms, patients, studies = ([cells[row] for row in rows] for cells in (dicoms, patients, studies))
    return _Images(sheet.only(used), dicoms, _numbers(patients), _numbers(studies), rows)


def _views(sheet: Sheet, dicoms: Sequence[str], config: DataConfig) -> list[str]:
    """From which side each image was taken: not every release of CXR-LT says so itself."""
    if "ViewPosition" in sheet.header:
        return _columns(sheet, ("ViewPosition",))[0]
    metadata = read_sheet(_beside(config, METADATA))
    position = dict(zip(*_columns(metadata, ("dicom_id", "ViewPosition")), strict=True))
    return [position.get(dicom, "") for dicom in dicoms]


def _images_of_studies(sheet: Sheet, config: DataConfig) -> _Images:
    """The images of the studies that have labels: MIMIC has 227,835 studies and labels of 227,827."""
    (studies,) = _columns(sheet, ("study_id",))
    row_of = {study: row for row, study in enumerate(_numbers(studies))}
    metadata = read_sheet(_beside(config, METADATA))
    dicoms, patients, of, views = _columns(metadata, ("dicom_id", "subject_id", "study_id", "ViewPosition"))
    of = _numbers(of)
    used = [
        study in row_of and (config.views == "all" or view in _FRONTAL)
        for study, view in zip(of, views, strict=True)
    ]
    kept = [row for row, use in enumerate(used) if use]
    dicoms, patients, of = ([cells[row] for row in kept] for cells in (dicoms, patients, of))
    return _Images(metadata.only(used), dicoms, _numbers(patients), of, [row_of[study] for study in of])


def _without_image(sheet: Sheet, config: DataConfig) -> list[str]:
    """A fault for labels of a study that the metadata do not know."""
    path = _beside(config, METADATA)
    (known,) = _columns(read_sheet(path), ("study_id",))
    (studies,) = _columns(sheet, ("study_id",))
    there = set(_numbers(known))
    lost = [n for n, study in zip(sheet.numbers, _numbers(studies), strict=True) if study not in there]
    return [f"{sheet.path} {rows_text(lost)}: a study without an image in {path}"] if lost else []


def _split(found: _Images, y: NDArray[np.float32], config: DataConfig) -> tuple[str, ...]:
    if config.split_rule == "test":
        return ("test",) * len(found.rows)
    if config.split_rule == "patients":
        return by_patient(found.patients, y, seed=config.seed)
    sheet = read_sheet(_beside(config, SPLIT))
    part = dict(zip(*_columns(sheet, ("dicom_id", "split")), strict=True))
    if strange := sorted(set(part.values()) - set(_PARTS)):
        raise DataError(f"{sheet.path}: split {strange[0]!r} is none of {', '.join(_PARTS)}")
    return tuple(_PARTS.get(part.get(dicom, ""), "") for dicom in found.dicoms)


def _columns(sheet: Sheet, names: Sequence[str]) -> list[list[str]]:
    return [sheet.cells(sheet.position(name, 'dataset = "mimic"')) for name in names]


def _numbers(names: Sequence[str]) -> list[str]:
    """Numbers of patients and studies alike in all tables: 50414267, where others write s50414267."""
    return [name.lstrip("ps") for name in names]


def _beside(config: DataConfig, name: str) -> Path:
    """One of MIMIC's own tables, gzipped or not.

    Raises:
        DataError: it is not there.
    """
    folder = config.lists or config.table.parent
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name} is missing; set [data] lists to its folder")
