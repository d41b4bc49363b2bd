"""Small releases of the public data sets, written in their official formats."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.chest_xrays.mimic import CXR_LT
from suture_papers.chest_xrays.nih import SPELLINGS as NIH
from suture_papers.skin_lesions.isic import METADATA
from suture_papers.skin_lesions.isic import SPELLINGS as ISIC


def _image(path: Path, seed: int, color: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (16, 16, 3) if color else (16, 16)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_nih(root: Path, patients: int = 120) -> Path:
    """One image a patient; every second one has two findings."""
    lines = ["Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position"]
    for i in range(patients):
        found = f"{NIH[i % 14]}|{NIH[(i + 5) % 14]}" if i % 2 else "No Finding"
        lines.append(f"{i:08d}_000.png,{found},0,{i},50,F,PA")
        _image(root / "images" / f"{i:08d}_000.png", i)
    (root / "Data_Entry_2017.csv").write_text("\n".join(lines) + "\n")
    return root


def write_chexpert(root: Path, patients: int = 60) -> Path:
    """One frontal image a patient in train.csv, ten more in valid.csv; every third one has each finding."""
    for name, first, n in (("train", 0, patients), ("valid", patients, 10)):
        rows = ["Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding," + ",".join(SPELLINGS)]
        for i in range(first, first + n):
            image = f"{name}/patient{i:05d}/study1/view1_frontal.jpg"
            _image(root / image, i)
            labels = ",".join("1.0" if (i + k) % 3 == 0 else "" for k in range(len(SPELLINGS)))
            rows.append(f"CheXpert-v1.0-small/{image},Female,68,Frontal,AP,,{labels}")
        (root / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return root


def write_mimic(root: Path, patients: int = 30) -> Path:
    """One frontal image a patient, with metadata, the labels of its study and those of CXR-LT."""
    metadata = ["dicom_id,subject_id,study_id,ViewPosition"]
    studies = ["subject_id,study_id," + ",".join(SPELLINGS)]
    images = ["dicom_id,subject_id,study_id," + ",".join(CXR_LT)]
    for i in range(patients):
        who, study = f"1{i:07d}", f"5{i:07d}"
        _image(root / f"files/p{who[:2]}/p{who}/s{study}/d{i}.jpg", i)
        metadata.append(f"d{i},{who},{study},{'AP' if i % 2 else 'PA'}")
        studies.append(f"{who},{study}," + ",".join("1.0" if (i + k) % 3 == 0 else "" for k in range(13)))
        images.append(f"d{i},{who},{study}," + ",".join(str(int((i + k) % 4 == 0)) for k in range(25)))
    for name, lines in (
        ("mimic-cxr-2.0.0-metadata.csv", metadata),
        ("mimic-cxr-2.0.0-chexpert.csv", studies),
        ("cxr-lt.csv", images),
    ):
        (root / name).write_text("\n".join(lines) + "\n")
    return root


def write_ham10000(root: Path, lesions: int = 70) -> Path:
    """Two images of each lesion; the seven classes take turns."""
    lines = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    for i in range(2 * lesions):
        lines.append(f"HAM_{i // 2:07d},ISIC_{i:07d},{ISIC[i // 2 % 7].lower()},histo,80.0,male,scalp")
        _image(root / "images" / f"ISIC_{i:07d}.jpg", i, color=True)
    (root / METADATA).write_text("\n".join(lines) + "\n")
    return root


Report = tuple[str, str, tuple[str, ...]]
"""Findings, impression, and the MeSH codes of a report of Indiana University."""


def write_openi(root: Path, reports: Sequence[Report]) -> Path:
    """The archive of reports CXR1, CXR2, ..., in the order of their names as Open-i has them."""
    folder = root / "ecgen-radiology"
    folder.mkdir(parents=True)
    for i, (findings, impression, codes) in enumerate(reports, 1):
        terms = "".join(f"<major>{code}</major>" for code in codes)
        (folder / f"{i}.xml").write_text(
            f'<?xml version="1.0" encoding="utf-8"?><eCitation><uId id="CXR{i}"/><MedlineCitation><Article>'
            f'<Abstract><AbstractText Label="INDICATION">Cough</AbstractText>'
            f'<AbstractText Label="FINDINGS">{findings}</AbstractText>'
            f'<AbstractText Label="IMPRESSION">{impression}</AbstractText></Abstract></Article>'
            f"</MedlineCitation><MeSH>{terms}</MeSH></eCitation>"
        )
    path = root / "NLMCXR_reports.tgz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "ecgen-radiology")
    return path
