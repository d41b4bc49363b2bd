"""`init` recognises published tables, by the published of their readers and of the hospital's own reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hospitals import image, table
from suture.data.config import load_site_config
from suture.data.published import PublishedTable
from suture.data.readers import DATASETS, load_reading
from suture.data.table import Table
from suture_papers.chest_xrays.chexpert import SPELLINGS as CHEXPERT
from suture_papers.chest_xrays.mimic import METADATA, SPLIT
from suture_papers.skin_lesions.flamby import SPELLINGS as ISIC2019
from suture_papers.skin_lesions.isic import SPELLINGS as ISIC2018
from suture_prepare.description import Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import write_study

N = 24


def read(folder: Path) -> tuple[Discovery, Table]:
    """What `init` finds in a folder, and the table of the site that it writes."""
    found = discover(folder)
    write_study(folder.parent / "study", {"s": found})
    return found, load_reading(load_site_config(folder.parent / "study" / "s" / "suture.toml").data).table


def present(of: Table, name: str) -> set[str]:
    """The images, by the last part of their names, that have a class."""
    column = of.y[:, of.labels.index(name)]
    return {Path(image).stem for image, value in zip(of.images, column, strict=True) if value == 1}


def unknown(of: Table, name: str) -> int:
    """How many images have no label of a class."""
    return int((of.y[:, of.labels.index(name)] != of.y[:, of.labels.index(name)]).sum())


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table(path, [list(header), *map(list, rows)])


def test_nih(tmp_path: Path) -> None:
    names = [f"{i:08}_000.png" for i in range(N)]
    for i, name in enumerate(names):
        image(tmp_path / "x" / "images" / name, i)
    rows = [[name, ("Mass|Edema", "No Finding")[i % 2], str(i // 2)] for i, name in enumerate(names)]
    write(tmp_path / "x" / "Data_Entry_2017.csv", ("Image Index", "Finding Labels", "Patient ID"), rows)
    found, of = read(tmp_path / "x")
    assert (found.data["dataset"], found.title) == ("nih", "NIH ChestX-ray14")
    assert present(of, "Edema") == {f"{i:08}_000" for i in range(0, N, 2)}
    (tmp_path / "x" / "train_val_list.txt").write_text("\n".join(names[:16]))
    (tmp_path / "x" / "test_list.txt").write_text("\n".join(names[16:]))
    official = discover(tmp_path / "x")
    assert official.data["split"] == "official"


def test_chexpert(tmp_path: Path) -> None:
    for part, first in (("train", 0), ("valid", 100)):
        rows = []
        for i in range(first, first + N):
            path = f"{part}/patient{i:05}/study1/view1_frontal.jpg"
            image(tmp_path / "x" / path, i)
            rows.append([f"CheXpert-v1.0-small/{path}", "Frontal", ("1.0", "0.0")[i % 2], *[""] * 12])
        write(tmp_path / "x" / f"{part}.csv", ("Path", "Frontal/Lateral", *CHEXPERT), rows)
    found, of = read(tmp_path / "x")
    assert found.data["dataset"] == "chexpert"
    assert of.split.count("test") == N
    assert (of.y[:, of.labels.index(CHEXPERT[0])] == 1).sum() == N


def test_mimic(tmp_path: Path) -> None:
    folder, studies, images, splits = tmp_path / "x", [], [], []
    for i in range(N):
        image(folder / f"files/p10/p10{i:06}/s{i}/d{i}.jpg", i)
        studies.append([f"10{i:06}", str(i), "1.0", *["0.0"] * 12])
        images.append([f"d{i}", f"10{i:06}", str(i), "PA"])
        splits.append([f"d{i}", ("train", "validate", "test")[i % 3]])
    write(folder / "mimic-cxr-2.0.0-chexpert.csv", ("subject_id", "study_id", *CHEXPERT), studies)
    write(folder / METADATA, ("dicom_id", "subject_id", "study_id", "ViewPosition"), images)
    write(folder / SPLIT, ("dicom_id", "split"), splits)
    found, of = read(folder)
    assert (found.data["dataset"], found.data["split"]) == ("mimic", "official")
    assert [of.split.count(part) for part in ("train", "validation", "test")] == [8, 8, 8]


@pytest.mark.parametrize(
    ("header", "word", "classes", "file"),
    [
        (("image", *ISIC2018), "isic2018", ISIC2018, "ISIC2018_Task3_Training_GroundTruth.csv"),
        (("image", *ISIC2019, "UNK"), "flamby_isic", ISIC2019, "ISIC_2019_Training_GroundTruth.csv"),
    ],
)
def test_isic(header: Sequence[str], word: str, classes: Sequence[str], file: str, tmp_path: Path) -> None:
    rows = []
    for i in range(N):
        image(tmp_path / "x" / "in" / f"ISIC_{i:07}.jpg", i)
        ones = ["1.0" if i % len(classes) == k else "0.0" for k in range(len(classes))]
        rows.append([f"ISIC_{i:07}", *ones, *["0.0"] * ("UNK" in header)])
    write(tmp_path / "x" / file, header, rows)
    found, of = read(tmp_path / "x")
    assert found.data["dataset"] == word
    assert of.labels.label_type == "multiclass"
    assert present(of, "Melanoma") == {f"ISIC_{i:07}" for i in range(0, N, len(classes))}


PADCHEST = ("['Mass', 'scoliosis']", "['exclude']", "['normal']")

HOSPITAL: list[tuple[str, Sequence[str], Any, str, str]] = [
    (
        "BRAX",
        ("DicomPath", "PngPath", "PatientID", "ViewPosition", "No Finding", "Cardiomegaly"),
        lambda i: [
            f"d/{i}.dcm",
            f"images/{i}/v.png",
            f"id_{i // 2}",
            "PA",
            "0",
            ("1.0", "-1.0", "0.0")[i % 3],
        ],
        "images/{i}/v.png",
        "Cardiomegaly",
    ),
    (
        "RSNA Pneumonia Detection Challenge",
        ("patientId", "x", "y", "width", "height", "Target"),
        lambda i: [f"u-{i}", "1.5", "2", "3", "4", ("1", "0", "0")[i % 3]],
        "png/u-{i}.png",
        "Pneumonia",
    ),
    (
        "ISIC 2020",
        ("image_name", "patient_id", "sex", "diagnosis", "benign_malignant", "target"),
        lambda i: [f"ISIC_{i}", f"IP_{i // 4}", "male", "?", ("m", "b")[i % 3 > 0], ("1", "0", "0")[i % 3]],
        "train/ISIC_{i}.jpg",
        "Melanoma",
    ),
    (
        "Shenzhen and Montgomery chest X-rays",
        ("file", "label"),
        lambda i: [f"CHNCXR_{i:04}_{int(i % 3 == 0)}.png", ("1", "0", "0")[i % 3]],
        "CXR_png/CHNCXR_{i:04}_{one}.png",
        "Tuberculosis",
    ),
    (
        "PadChest",
        ("ImageID", "ImageDir", "PatientID", "Labels", "Localizations"),
        lambda i: [f"{i}_a.png", str(i % 2), str(i), PADCHEST[i % 3], "[]"],
        "{half}/{i}_a.png",
        "Mass",
    ),
]


@pytest.mark.parametrize(("title", "header", "row", "path", "name"), HOSPITAL)
def test_tables_that_the_hospitals_reader_reads(
    title: str, header: Sequence[str], row: Any, path: str, name: str, tmp_path: Path
) -> None:
    rows, ones = [], set()
    for i in range(N):
        file = path.format(i=i, one=int(i % 3 == 0), half=i % 2)
        image(tmp_path / "x" / file, i)
        rows.append([f'"{cell}"' for cell in row(i)])
        ones |= {file} if i % 3 == 0 else set()
    write(tmp_path / "x" / "table.csv", header, rows)
    found, of = read(tmp_path / "x")
    assert found.title == title
    assert name in of.labels
    column = of.y[:, of.labels.index(name)]
    hits = [file for file, value in zip(of.images, column, strict=True) if value == 1]
    assert sorted(Path(file).stem for file in hits) == sorted(Path(file).stem for file in ones)
    assert unknown(of, name) == (8 if title in ("BRAX", "PadChest") else 0)
    assert len(of) == N


def test_the_reader_of_another_package_is_recognised_and_a_broken_one_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for i in range(N):
        image(tmp_path / "x" / "img" / f"{i}.png", i)
        rows.append([f"{i}.png", ("Mass", "No Finding")[i % 2], str(i), "x"])
    write(tmp_path / "x" / "t.csv", ("Image Index", "Finding Labels", "Patient ID", "their own"), rows)
    nih = DATASETS.find("nih")
    theirs = replace(nih, published=(PublishedTable("Theirs", ("their own",), {"split": "patients"}),))
    broken = replace(nih, published=(PublishedTable("Broken", ("their own",), {"split": "official"}),))
    monkeypatch.setitem(DATASETS._values, "nih", theirs)
    assert discover(tmp_path / "x").title == "Theirs"
    monkeypatch.setitem(DATASETS._values, "nih", broken)
    found = discover(tmp_path / "x")
    assert (found.data["dataset"], found.data["labels"]) == ("hospital", ["Mass"])
    assert any("looks like Broken, but its reader refuses it" in text for text in found.warnings)
