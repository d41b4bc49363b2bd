"""`init` recognises published tables, by the published of their readers and of the hospital's own reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from official import write_chexpert, write_mimic, write_nih
from suture.data.config import load_site_config
from suture.data.published import PublishedTable
from suture.data.readers import DATASETS, load_reading
from suture.data.table import Table
from suture_papers.chest_xrays.mimic import SPLIT
from suture_papers.skin_lesions import flamby, isic
from suture_prepare.description import Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import write_study
from world import write_image, write_table

N = 24


def read(folder: Path) -> tuple[Discovery, Table]:
    """What `init` finds in a folder, and the table of the site that it writes."""
    found = discover(folder)
    study = folder.with_name(f"study of {folder.name}")
    write_study(study, {"s": found})
    return found, load_reading(load_site_config(study / "s" / "suture.toml").data).table


def present(of: Table, name: str) -> set[str]:
    """The images, by the last part of their names, that have a class."""
    column = of.y[:, of.labels.index(name)]
    return {Path(image).stem for image, value in zip(of.images, column, strict=True) if value == 1}


def test_releases_of_chest_x_rays(tmp_path: Path) -> None:
    """Their official lists, where they lie beside the table, divide it."""
    root = write_nih(tmp_path / "nih", N)
    found, of = read(root)
    assert (found.title, found.data["split"]) == ("NIH ChestX-ray14", "patients")
    assert present(of, "Edema") == {"00000003_000", "00000017_000"}
    for name, first in (("train_val", 0), ("test", 16)):
        names = [f"{i:08}_000.png" for i in range(first, first + 16)]
        (root / f"{name}_list.txt").write_text("\n".join(names))
    assert discover(root).data["split"] == "official"

    found, of = read(write_chexpert(tmp_path / "chexpert", N))
    assert (found.data["dataset"], found.data["split"]) == ("chexpert", "official")
    assert (of.split.count("test"), len(present(of, "Edema"))) == (10, 1)

    root = write_mimic(tmp_path / "mimic", N)
    (root / "cxr-lt.csv").unlink()
    parts = ("train", "validate", "test")
    write_table(root / SPLIT, [["dicom_id", "split"], *((f"d{i}", parts[i % 3]) for i in range(N))])
    found, of = read(root)
    assert (found.data["dataset"], found.data["split"]) == ("mimic", "official")
    assert [of.split.count(part) for part in ("train", "validation", "test")] == [8, 8, 8]


@pytest.mark.parametrize(
    ("word", "classes", "more", "file"),
    [
        ("isic2018", isic.SPELLINGS, (), isic.TRUTH),
        ("flamby_isic", flamby.SPELLINGS, ("UNK",), "ISIC_2019_Training_GroundTruth.csv"),
    ],
)
def test_isic(word: str, classes: Sequence[str], more: Sequence[str], file: str, tmp_path: Path) -> None:
    rows = [["image", *classes, *more]]
    for i in range(N):
        write_image(tmp_path / "x" / "in" / f"ISIC_{i:07}.jpg", i)
        rows.append([f"ISIC_{i:07}", *(f"{i % len(classes) == k:.1f}" for k in range(len(classes)))])
        rows[-1] += ["0.0"] * len(more)
    write_table(tmp_path / "x" / file, rows)
    found, of = read(tmp_path / "x")
    assert found.data["dataset"] == word
    assert of.labels.label_type == "multiclass"
    assert present(of, "Melanoma") == {f"ISIC_{i:07}" for i in range(0, N, len(classes))}


PADCHEST = ("['Mass', 'scoliosis']", "['exclude']", "['normal']")

# Title, header, row i, its image, a class of every third row, and how many rows say nothing of it.
HOSPITAL: list[tuple[str, str, Callable[[int], Sequence[object]], str, str, int]] = [
    (
        "BRAX",
        "DicomPath,PngPath,PatientID,ViewPosition,No Finding,Cardiomegaly",
        lambda i: [f"d/{i}.dcm", f"images/{i}/v.png", f"id_{i // 2}", "PA", 0, ("1.0", "-1.0", "0.0")[i % 3]],
        "images/{i}/v.png",
        "Cardiomegaly",
        8,
    ),
    (
        "RSNA Pneumonia Detection Challenge",
        "patientId,x,y,width,height,Target",
        lambda i: [f"u-{i}", "1.5", 2, 3, 4, int(i % 3 == 0)],
        "png/u-{i}.png",
        "Pneumonia",
        0,
    ),
    (
        "ISIC 2020",
        "image_name,patient_id,sex,diagnosis,benign_malignant,target",
        lambda i: [f"ISIC_{i}", f"IP_{i // 4}", "male", "?", "mbb"[i % 3], int(i % 3 == 0)],
        "train/ISIC_{i}.jpg",
        "Melanoma",
        0,
    ),
    (
        "Shenzhen and Montgomery chest X-rays",
        "file,label",
        lambda i: [f"CHNCXR_{i:04}_{int(i % 3 == 0)}.png", int(i % 3 == 0)],
        "CXR_png/CHNCXR_{i:04}_{one}.png",
        "Tuberculosis",
        0,
    ),
    (
        "PadChest",
        "ImageID,ImageDir,PatientID,Labels,Localizations",
        lambda i: [f"{i}_a.png", i % 2, i, PADCHEST[i % 3], "[]"],
        "{half}/{i}_a.png",
        "Mass",
        8,
    ),
]


@pytest.mark.parametrize(("title", "header", "row", "path", "name", "unknown"), HOSPITAL)
def test_tables_that_the_hospitals_reader_reads(
    title: str,
    header: str,
    row: Callable[[int], Sequence[object]],
    path: str,
    name: str,
    unknown: int,
    tmp_path: Path,
) -> None:
    files = [path.format(i=i, one=int(i % 3 == 0), half=i % 2) for i in range(N)]
    for i, file in enumerate(files):
        write_image(tmp_path / "x" / file, i)
    write_table(tmp_path / "x" / "table.csv", [header.split(","), *map(row, range(N))])
    found, of = read(tmp_path / "x")
    assert (found.title, len(of)) == (title, N)
    column = of.y[:, of.labels.index(name)]
    hits = [Path(image).stem for image, value in zip(of.images, column, strict=True) if value == 1]
    assert sorted(hits) == sorted(Path(file).stem for file in files[::3])
    assert np.isnan(column).sum() == unknown


def test_the_reader_of_another_package_is_recognised_and_a_broken_one_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["Image Index", "Finding Labels", "Patient ID", "their own"]]
    for i in range(N):
        write_image(tmp_path / "x" / "img" / f"{i}.png", i)
        rows.append([f"{i}.png", ("Mass", "No Finding")[i % 2], str(i), "x"])
    write_table(tmp_path / "x" / "t.csv", rows)
    nih = DATASETS.find("nih")
    theirs = replace(nih, published=(PublishedTable("Theirs", ("their own",), {"split": "patients"}),))
    broken = replace(nih, published=(PublishedTable("Broken", ("their own",), {"split": "official"}),))
    monkeypatch.setitem(DATASETS._values, "nih", theirs)
    assert discover(tmp_path / "x").title == "Theirs"
    monkeypatch.setitem(DATASETS._values, "nih", broken)
    found = discover(tmp_path / "x")
    assert (found.data["dataset"], found.data["labels"]) == ("hospital", ["Mass"])
    assert any("Broken" in text for text in found.warnings)
