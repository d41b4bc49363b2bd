"""Tables as public data sets publish them, which `suture init` recognises by their columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suture.data.reading import Sheet


@dataclass(frozen=True)
class PublishedTable:
    """A published table.

    Attributes:
        title: of the data set.
        columns: that the table has, all of them.
        data: keys of ``[data]``. Those of the hospital's own table are filled in where they are not given.
        beside: further keys where a file of that name, gzipped or not, is in the table's folder.
        names: a pattern of the file names of its images, where the columns alone are too common.
    """

    title: str
    columns: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: str = ""

    def recognises(self, sheet: Sheet, images: Collection[str]) -> bool:
        """Whether a table is this one, beside images of these paths."""
        return {*self.columns} <= {*sheet.header} and (
            not self.names or all(re.search(self.names, name) for name in images)
        )

    def keys(self, folder: Path) -> dict[str, Any]:
        """The keys of ``[data]`` for a table in a folder."""
        found = dict(self.data)
        for name, keys in self.beside.items():
            if any(map(Path.is_file, (folder / name, folder / f"{name}.gz"))):
                found |= keys
        return found


HOSPITAL = (
    PublishedTable("BRAX", ("DicomPath", "PngPath", "PatientID", "Cardiomegaly")),
    PublishedTable(
        "PadChest",
        ("ImageID", "ImageDir", "PatientID", "Labels", "Localizations"),
        {
            "finding_column": "Labels",
            "values": dict.fromkeys(("exclude", "unchanged", "suboptimal study"), "unknown"),
        },
    ),
    PublishedTable(
        "VinDr-CXR, labels by radiologist", ("image_id", "rad_id", "Aortic enlargement", "Cardiomegaly")
    ),
    PublishedTable(
        "VinDr-CXR, boxes", ("image_id", "class_name", "rad_id", "x_min"), {"finding_column": "class_name"}
    ),
    PublishedTable(
        "RSNA Pneumonia Detection Challenge",
        ("patientId", "x", "y", "width", "height", "Target"),
        {"patient_column": "patientId", "labels": ["Target"], "synonyms": {"Target": "Pneumonia"}},
    ),
    PublishedTable(
        "ISIC 2020",
        ("image_name", "patient_id", "diagnosis", "benign_malignant", "target"),
        {"labels": ["target"], "synonyms": {"target": "Melanoma"}},
    ),
    PublishedTable(
        "ISIC archive",
        ("isic_id", "lesion_id", "diagnosis_1", "diagnosis_3"),
        {"finding_column": "diagnosis_3", "synonyms": {"Melanoma, NOS": "Melanoma"}},
    ),
    PublishedTable(
        "Shenzhen and Montgomery chest X-rays",
        ("label",),
        {"labels": ["label"], "synonyms": {"label": "Tuberculosis"}},
        names=r"(CHN|MCU)CXR_\d+_[01]\.\w+$",
    ),
)
"""Those that the hospital's reader reads; each other reader declares its own (`readers.DataSet`)."""
