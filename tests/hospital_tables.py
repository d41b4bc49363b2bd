"""Tables as hospitals and public archives have them, each with what it means.

`CASES` has for each form of table a function that writes a folder of one site with it, and returns what it
means: the labels, patients and splits of its images, or what the refusal has to say. `misread` gives such a
folder to `suture init`, and compares. Everything in them is invented; docstrings say where forms occur.
"""

from __future__ import annotations

import csv
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from PIL import Image

from suture.core.errors import SutureError
from suture.data.config import load_site_config
from suture.data.images import ImageSource
from suture.data.readers import read_table
from suture.data.table import Table
from suture_prepare.new_study import look, summary, write_study

N = 24
"""Images of a case."""

OPEN = None
"""A label that is unknown."""

Cells = Sequence[object]
Label = int | None


@dataclass(frozen=True)
class Meant:
    """What a folder means.

    Attributes:
        images: their paths within the folder.
        labels: of each image, by class.
        patients: of each image; None where nothing says whose it is, so that each is on its own.
        split: of each image; None where nothing says it, so that `init` divides the patients.
        asks: regular expressions of what `init` has to say or ask.
    """

    images: Sequence[str]
    labels: Mapping[str, Sequence[Label]]
    patients: Sequence[str] | None = None
    split: Sequence[str] | None = None
    asks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """What cannot be read, and regular expressions of what `init`, or then the reader, has to say of it."""

    said: tuple[str, ...]


Case = Callable[[Path], Meant | Refused]

CASES: dict[str, Case] = {}
"""Each form of table by its name."""


def case(write: Case) -> Case:
    """Add a case under the name of its function."""
    CASES[write.__name__.replace("_", " ")] = write
    return write


def misread(case: Case, folder: Path) -> str:
    """Write a case, read it as `suture init` would, and return how that differs from what is meant.

    Empty where it does not differ. A refusal counts as misread where data are meant to be read.
    """
    site = folder / "site"
    site.mkdir(parents=True)
    meant, said = case(site), ""
    try:
        guess = look({"x": site})["x"]
        write_study(folder / "study", {"x": guess})
        config = folder / "study" / "x" / "suture.toml"
        said = "\n".join([*summary("x", guess, config), config.read_text()])
        reading = read_table(load_site_config(config).data)
    except SutureError as error:
        said += f"\n{error}"
        return _lacks(said, meant.said) if isinstance(meant, Refused) else f"refused: {said}"
    if isinstance(meant, Refused):
        texts = "\n".join([said, *reading.faults])
        return _lacks(texts, meant.said) if reading.faults or guess.is_draft else "read, not refused"
    if reading.faults or guess.is_draft:
        return "\n".join(["not ready", *reading.faults, said])
    return _lacks(said, meant.asks) or _difference(reading.table, site, meant)


def _lacks(text: str, patterns: Sequence[str]) -> str:
    lacking = [pattern for pattern in patterns if not re.search(pattern, text)]
    return f"{lacking} not in:\n{text}" if lacking else ""


def _difference(table: Table, site: Path, meant: Meant) -> str:
    images = list(table.images)
    if table.texts is None:
        with ImageSource(table.root, table.follow_links) as source:
            images = [_path(source, site, image) for image in images]
    if sorted(images) != sorted(meant.images):
        return f"images {sorted({*images} ^ {*meant.images})[:4]} ({len(images)} for {len(meant.images)})"
    row = [images.index(image) for image in meant.images]
    if {*table.labels} != meant.labels.keys():
        return f"labels {', '.join(table.labels)} for {', '.join(meant.labels)}"
    for name, values in meant.labels.items():
        read = [None if np.isnan(y) else int(y) for y in table.y[row, table.labels.index(name)]]
        if read != [*values]:
            return f"{name}: {read} for {[*values]}"
    patients = [table.patients[i] for i in row]
    groups = meant.patients if meant.patients is not None else meant.images
    if len({*zip(patients, groups, strict=True)}) != len({*patients}) or len({*patients}) != len({*groups}):
        return f"patients {patients[:6]} for {list(groups[:6])}"
    split = [table.split[i] for i in row]
    if meant.split is not None:
        return "" if split == [*meant.split] else f"splits {split} for {[*meant.split]}"
    if len({*zip(patients, split, strict=True)}) > len({*patients}) or not all(split):
        return "a patient in two splits, or an image in none"
    return ""


def _path(source: ImageSource, site: Path, image: str) -> str:
    """The path of an image within the folder of the site; of a link that is not followed, its name."""
    path = Path(source.path(image)) if image in source else source.root / image
    return os.path.relpath(path, site)


def pngs(folder: Path, names: Sequence[str], mode: str = "L") -> None:
    """Write small images that differ, with any suffix."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
        with path.open("wb") as file:
            Image.fromarray(pixels).convert(mode).save(file, format="PNG")


def table(path: Path, rows: Sequence[Cells], delimiter: str = ",", encoding: str = "utf-8") -> None:
    """Write a table; the first row is the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


def plain(
    folder: Path, header: Cells, row: Callable[[int], Cells], file: str = "labels.csv", **how: str
) -> None:
    """Write N rows, and an image for each in ``img``: 00.png and so on."""
    pngs(folder / "img", names())
    table(folder / file, [header, *(row(i) for i in range(N))], **how)


def names(pattern: str = "{:02}.png") -> list[str]:
    """The names of the N images by a pattern of their numbers."""
    return [pattern.format(i) for i in range(N)]


def in_img() -> list[str]:
    """Those of `plain`, within the folder of the site."""
    return names("img/{:02}.png")


def every(*values: Label) -> list[Label]:
    """The values of N images, over and over."""
    return [values[i % len(values)] for i in range(N)]


def pairs(pattern: str = "p{}") -> list[str]:
    """Patients of two images each."""
    return [pattern.format(i // 2) for i in range(N)]


# --- Public archives, by their own columns ---


@case
def brax(folder: Path) -> Meant:
    """BRAX 1.1.0 (PhysioNet): two columns of paths, 0, 1, -1 and blank, an age in words."""
    findings = ["No Finding", "Cardiomegaly", "Edema", "Pleural Effusion"]
    header = ["DicomPath", "PngPath", "PatientID", "PatientAge", "AccessionNumber", *findings, "ViewPosition"]
    rows: list[Cells] = [header]
    images = [f"images/id_{i // 2:08}/Study_{i}.{i}/Series_1/image-{i:05}.png" for i in range(N)]
    pngs(folder, images)
    for i, image in enumerate(images):
        dicom = image.replace("images", "Anonymized_DICOMs").replace(".png", ".dcm")
        cells = [("1.0", "0.0", "-1.0", "")[(i + k) % 4] for k in range(4)]
        rows.append([dicom, image, f"id_{i // 2:08}", "60 or more", f"{i:08}.1234", *cells, "PA"])
    table(folder / "master_spreadsheet_update.csv", rows)
    labels = {name: every(*np.roll([1, 0, None, None], -k)) for k, name in enumerate(findings) if k}
    return Meant(images, labels, pairs(), asks=("recognised as BRAX",))


@case
def chexpert(folder: Path) -> Meant:
    """CheXpert: train.csv and valid.csv, patients in the paths, which begin with the name of the archive."""
    findings = ["No Finding", "Cardiomegaly", "Edema"]
    images, patients, split = [], [], []
    for part, start, n in (("train", 0, 16), ("valid", 500, 8)):
        rows: list[Cells] = [["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *findings]]
        for i in range(n):
            patient = f"patient{start + i // 4:05}"
            images.append(f"{part}/{patient}/study{i % 2 + 1}/view{i % 4 // 2 + 1}_frontal.jpg")
            cells = [("1.0", "0.0", "-1.0", "")[(len(images) - 1 + k) % 4] for k in range(3)]
            rows.append(
                [
                    f"CheXpert-v1.0-small/{images[-1]}",
                    "Female",
                    68,
                    ("Frontal", "Lateral")[i % 2],
                    "AP",
                    *cells,
                ]
            )
            patients.append(patient)
            split.append({"train": "train", "valid": "validation"}[part])
        table(folder / f"{part}.csv", rows)
    pngs(folder, images)
    labels = {"Cardiomegaly": every(0, None, None, 1), "Edema": every(None, None, 1, 0)}
    return Meant(images, labels, patients, split, ('no test.*\n?.*split = "patients"',))


@case
def padchest(folder: Path) -> Meant:
    """PadChest: lists of Python, images in numbered folders, words for images that were not judged."""
    lists = [
        "['normal']",
        "['COPD signs', ' scoliosis']",
        "['unchanged']",
        "",
        "[]",
        "['exclude', 'scoliosis']",
    ]
    header = ["", "ImageID", "ImageDir", "StudyID", "PatientID", "Pediatric", "Labels", "Localizations"]
    images = [f"{i % 3}/12537415194350574702589_{i:05}_j5rk5q.png" for i in range(N)]
    pngs(folder / "images", images)
    rows = [
        [i, image[2:], i % 3, 12537 + i, 10**38 + i // 2, "No", lists[i % 6], "[]"]
        for i, image in enumerate(images)
    ]
    table(folder / "PADCHEST_labels.csv", [header, *rows])
    labels = {"COPD Signs": every(0, 1, None, None, 0, None), "Scoliosis": every(0, 1, None, None, 0, 1)}
    return Meant([f"images/{name}" for name in images], labels, pairs(), asks=("recognised as PadChest",))


@case
def vindr(folder: Path) -> Meant:
    """VinDr-CXR: a row for each radiologist and image."""
    header = ["image_id", "rad_id", "Aortic enlargement", "Cardiomegaly", "No finding"]
    images = [f"{i * 7919:032x}" for i in range(N)]
    pngs(folder / "train", [f"{name}.png" for name in images])
    rows: list[Cells] = [header]
    for i, name in enumerate(images):
        for k, rater in enumerate(("R8", "R9", "R10")):
            found = [int(i % 4 == 0), int(k < i % 4)]  # 0, 1, 2 or 3 of three see a large heart
            rows.append([name, rater, *found, int(not any(found))])
    table(folder / "image_labels_train.csv", rows)
    labels = {"Aortic Enlargement": every(1, 0, 0, 0), "Cardiomegaly": every(0, 0, 1, 1)}
    return Meant([f"train/{name}.png" for name in images], labels, asks=('repeated = "merge"',))


@case
def isic_archive(folder: Path) -> Meant:
    """The export of the ISIC archive: lesion before patient, diagnoses of three levels."""
    of = [
        ("Benign", "Nevus"),
        ("Malignant", "Melanoma, NOS"),
        ("Indeterminate", "Solar or actinic keratosis"),
        ("", ""),
    ]
    header = ["isic_id", "attribution", "diagnosis_1", "diagnosis_3", "lesion_id", "patient_id"]
    pngs(folder / "images", names("ISIC_{:07}.JPG"), "RGB")
    rows = [[f"ISIC_{i:07}", "Anonymous", *of[i % 4], f"IL_{i // 2}", f"IP_{i // 4}"] for i in range(N)]
    table(folder / "metadata.csv", [header, *rows])
    labels = {
        "Melanocytic Nevus": every(1, 0, 0, None),
        "Melanoma": every(0, 1, 0, None),
        "Solar Or Actinic Keratosis": every(0, 0, 1, None),
    }
    return Meant(names("images/ISIC_{:07}.JPG"), labels, [f"IP_{i // 4}" for i in range(N)])


@case
def isic_2019(folder: Path) -> Meant:
    """ISIC 2019: the classes in one table, the lesions in another."""
    classes = ["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK"]
    stems = [f"ISIC_{i:07}" + ("_downsampled" if i % 7 == 0 else "") for i in range(N)]
    pngs(folder / "ISIC_2019_Training_Input", [f"{name}.jpg" for name in stems], "RGB")
    truth = [[name, *(f"{float(i % 8 == k)}" for k in range(8)), "0.0"] for i, name in enumerate(stems)]
    table(folder / "ISIC_2019_Training_GroundTruth.csv", [["image", *classes], *truth])
    meta = [[name, "55.0", f"BCN_{i // 3:07}", "female"] for i, name in enumerate(stems)]
    table(folder / "ISIC_2019_Training_Metadata.csv", [["image", "age_approx", "lesion_id", "sex"], *meta])
    full = (
        "Melanoma", "Melanocytic Nevus", "Basal Cell Carcinoma", "Actinic Keratosis", "Benign Keratosis",
        "Dermatofibroma", "Vascular Lesion", "Squamous Cell Carcinoma",
    )  # fmt: skip
    labels = {name: [int(i % 8 == k) for i in range(N)] for k, name in enumerate(full)}
    images = [f"ISIC_2019_Training_Input/{name}.jpg" for name in stems]
    return Meant(images, labels, [str(i // 3) for i in range(N)], asks=("recognised as ISIC 2019",))


@case
def lesions_before_patients(folder: Path) -> Meant:
    """`lesion_id` stands before `patient_id`, and nests in it."""
    header = ["isic_id", "lesion_id", "patient_id", "Melanoma"]
    plain(folder, header, lambda i: [f"{i:02}", f"IL_{i // 2}", f"IP_{i // 4}", i % 2])
    return Meant(in_img(), {"Melanoma": every(0, 1)}, [str(i // 4) for i in range(N)])


@case
def shenzhen(folder: Path) -> Meant:
    """Shenzhen: one column `label`, whose meaning only the names of the files tell."""
    images = [f"CXR_png/CHNCXR_{i:04}_{i % 2}.png" for i in range(N)]
    pngs(folder, images)
    table(folder / "shenzhen.csv", [["fname", "label"], *([name, i % 2] for i, name in enumerate(images))])
    return Meant(images, {"Tuberculosis": every(0, 1)})


@case
def open_images(folder: Path) -> Meant:
    """Open Images: a row for each image and class, of which some are verified to be absent."""
    classes = ("Mass", "Edema")
    pngs(folder / "images", names("{:016x}.jpg"))
    rows = [
        [f"{i:016x}", "verification", name, (i + k) % 2]
        for i in range(N)
        for k, name in enumerate(classes)
        if (i + k) % 3
    ]
    table(folder / "labels.csv", [["ImageID", "Source", "LabelName", "Confidence"], *rows])
    labels = {
        name: [(i + k) % 2 if (i + k) % 3 else None for i in range(N)] for k, name in enumerate(classes)
    }
    return Meant(names("images/{:016x}.jpg"), labels)


@case
def redcap_checkboxes(folder: Path) -> Meant:
    """REDCap, raw: boxes without names, and 0 also in forms that were never filled in."""
    pngs(folder / "files", names("{}_cxr.png"))
    rows: list[Cells] = [
        [
            "record_id",
            "redcap_repeat_instance",
            "image_file",
            "findings___1",
            "findings___2",
            "imaging_complete",
        ]
    ]
    for i in range(N):
        done = i % 3 != 0
        rows.append([1000 + i // 2, 1 + i % 2, f"{i}_cxr.png", int(done and i % 2), 0, 2 if done else 0])
    table(folder / "export_DATA.csv", rows)
    labels = {
        "Findings 1": [i % 2 if i % 3 else None for i in range(N)],
        "Findings 2": [0 if i % 3 else None for i in range(N)],
    }
    line = r'synonyms = \{ "findings___1" = "NAME OF THE FINDING", "findings___2" = "NAME OF THE FINDING" \}'
    return Meant(names("files/{}_cxr.png"), labels, pairs(), asks=(line,))


@case
def redcap_labels(folder: Path) -> Meant:
    """REDCap, with labels: the findings in the headers, Checked and Unchecked."""
    header = ["Record ID", "Image file", "Findings (choice=Effusion)", "Findings (choice=Mass)", "Complete?"]
    boxes = ("Checked", "Unchecked")
    plain(folder, header, lambda i: [i // 2, f"{i:02}.png", boxes[i % 2], boxes[i % 3 > 0], "Complete"])
    return Meant(in_img(), {"Pleural Effusion": every(1, 0), "Mass": every(1, 0, 0)}, pairs())


# --- Names of images ---


@case
def other_case(folder: Path) -> Meant:
    """The table of a Windows machine says case00.png, the folder has Case00.PNG."""
    pngs(folder / "images", names("Case{:03}.PNG"))
    rows = [[f"case{i:03}.png", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(names("images/Case{:03}.PNG"), {"Mass": every(0, 1)}, pairs())


@case
def lost_zeros(folder: Path) -> Meant:
    """A spreadsheet has made 17 and 1,017 of 00000017 and 00001017."""
    pngs(folder / "images", [f"{17 + 500 * i:08}.png" for i in range(N)])
    rows = [[f"{17 + 500 * i:,}" if i % 2 else 17 + 500 * i, i // 2, i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant([f"images/{17 + 500 * i:08}.png" for i in range(N)], {"Mass": every(0, 1)}, pairs())


@case
def uids(folder: Path) -> Meant:
    """UIDs without a suffix, whose last number is not a suffix either."""
    pngs(folder / "images", names("1.2.276.0.723.{}.15178.png"))
    rows = [[f"1.2.276.0.723.{i}.15178", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["SOPInstanceUID", "patient", "Mass"], *rows])
    return Meant(names("images/1.2.276.0.723.{}.15178.png"), {"Mass": every(0, 1)}, pairs())


@case
def one_name_in_all_folders(folder: Path) -> Meant:
    """Each patient's folder has an AP.png; the table has the folder and the file in two columns."""
    pngs(folder / "images", names("P{:03}/AP.png"))
    table(
        folder / "labels.csv",
        [["patient", "file", "Mass"], *([f"P{i:03}", "AP.png", i % 2] for i in range(N))],
    )
    return Meant(names("images/P{:03}/AP.png"), {"Mass": every(0, 1)})


@case
def links(folder: Path) -> Meant:
    """Images that are links into another disk, as of DVC and git-annex."""
    pngs(folder.parent / "annex", names())
    (folder / "img").mkdir()
    for name in names():
        (folder / "img" / name).symlink_to(folder.parent / "annex" / name)
    table(folder / "labels.csv", [["image", "Mass"], *([name, i % 2] for i, name in enumerate(names()))])
    return Meant(
        in_img(), {"Mass": every(0, 1)}, asks=(rf"{N} of {N} images are links", "follow_links = true")
    )


@case
def masks_beside_images(folder: Path) -> Meant:
    """A folder of masks has the names of the images."""
    plain(folder, ["image", "Mass"], lambda i: [f"img/{i:02}.png", i % 2])
    pngs(folder / "masks", names())
    return Meant(in_img(), {"Mass": every(0, 1)})


@case
def masks_of_the_same_names(folder: Path) -> Meant:
    """The same, and the table does not say the folder."""
    plain(folder, ["image", "Mass"], lambda i: [f"{i:02}.png", i % 2])
    pngs(folder / "masks", names())
    return Meant(in_img(), {"Mass": every(0, 1)}, asks=("24 files such as .masks/00.png. are masks",))


@case
def no_header(folder: Path) -> Refused:
    """The first row is an image."""
    pngs(folder / "img", names())
    table(folder / "labels.csv", [[f"{i:02}.png", f"p{i}", i % 2] for i in range(N)])
    return Refused(("labels.csv", "header", r"00\.png"))


@case
def two_views_in_a_row(folder: Path) -> Meant:
    """A row has a frontal and a lateral image."""
    pngs(folder / "img", [*names("{:02}f.png"), *names("{:02}l.png")])
    rows = [[f"p{i}", f"{i:02}f.png", f"{i:02}l.png", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["patient", "frontal", "lateral", "Mass"], *rows])
    asks = (f"column 'lateral' names {N} other images",)
    return Meant(names("img/{:02}f.png"), {"Mass": every(0, 1)}, asks=asks)


@case
def patients_in_file_names(folder: Path) -> Meant:
    """NIH's names: 00000017_003.png is the fourth image of patient 17. No column says so."""
    stems = [f"{17 + i // 3:08}_{i % 3:03}.png" for i in range(N)]
    pngs(folder / "images", stems)
    table(folder / "labels.csv", [["file", "Mass"], *([name, i % 2] for i, name in enumerate(stems))])
    images = [f"images/{name}" for name in stems]
    asks = ("'00000017' of '00000017_000.png'", 'patient_column = "file"')
    return Meant(images, {"Mass": every(0, 1)}, [name[7:15] for name in images], asks=asks)


@case
def views_in_file_names(folder: Path) -> Meant:
    """patient001_view2.png, beside a table whose only id-like column is a running number."""
    stems = [f"patient{i // 2:03}_view{i % 2}.png" for i in range(N)]
    pngs(folder / "images", stems)
    table(
        folder / "labels.csv", [["no", "file", "Mass"], *([i, name, i % 2] for i, name in enumerate(stems))]
    )
    return Meant([f"images/{name}" for name in stems], {"Mass": every(0, 1)}, pairs(), asks=("patient000",))


@case
def addresses(folder: Path) -> Meant:
    """Addresses of a web server in place of paths."""
    plain(folder, ["url", "Mass"], lambda i: [f"https://pacs.example/export/img/{i:02}.png", i % 2])
    return Meant(in_img(), {"Mass": every(0, 1)})


@case
def folders_of_studies(folder: Path) -> Meant:
    """A row for each study, whose folder has several images, and a patient with two studies."""
    images = [f"1.2.840.{i // 2}/IM{i % 2}.png" for i in range(N)]
    pngs(folder / "dicom", images)
    rows = [[f"1.2.840.{i}", f"p{i // 2}", ("pos", "neg")[i % 2]] for i in range(N // 2)]
    table(folder / "studies.csv", [["StudyInstanceUID", "PatientID", "Mass"], *rows])
    patients = [str(i // 4) for i in range(N)]
    return Meant([f"dicom/{name}" for name in images], {"Mass": every(1, 1, 0, 0)}, patients)


@case
def numbers_of_patients_and_of_visits(folder: Path) -> Meant:
    """Folders of patients have folders of visits, both with small numbers."""
    images = [f"{1 + i // 2}/{1 + i % 2}/xray.png" for i in range(N)]
    pngs(folder / "images", images)
    table(folder / "labels.csv", [["patient_id", "Mass"], *([1 + i, i % 2] for i in range(N // 2))])
    return Meant([f"images/{name}" for name in images], {"Mass": every(0, 0, 1, 1)}, pairs())


@case
def patients_of_file_names_in_two_splits(folder: Path) -> Meant:
    """The same, but the splits of the table tear what may be patients: a person has to look."""
    stems = [f"{17 + i // 3:08}_{i % 3:03}.png" for i in range(N)]
    pngs(folder / "images", stems)
    split = ["train", "test"] * (N // 2)
    rows = [[name, part, i % 2] for i, (name, part) in enumerate(zip(stems, split, strict=True))]
    table(folder / "labels.csv", [["file", "set", "Mass"], *rows])
    asks = ("if these are patients, they lie in two splits", "no column names the patients")
    return Meant([f"images/{name}" for name in stems], {"Mass": every(0, 1)}, split=split, asks=asks)


@case
def days_in_file_names(folder: Path) -> Meant:
    """2021-03-01_07.png: a day is no patient."""
    stems = [f"2021-0{1 + i // 8}-1{i // 2 % 4}_{i:02}.png" for i in range(N)]
    pngs(folder / "images", stems)
    table(folder / "labels.csv", [["file", "Mass"], *([name, i % 2] for i, name in enumerate(stems))])
    return Meant(
        [f"images/{name}" for name in stems], {"Mass": every(0, 1)}, asks=("no column names the patients",)
    )


@case
def a_label_for_each_patient(folder: Path) -> Meant:
    """A row for each patient, whose images are in a folder of that name."""
    images = [f"P{i // 2:03}/{i}.png" for i in range(N)]
    pngs(folder / "images", images)
    rows = [[f"P{i:03}", 40 + i, i % 2] for i in range(N // 2)]
    table(folder / "patients.csv", [["patient_id", "age", "Mass"], *rows])
    return Meant([f"images/{name}" for name in images], {"Mass": every(0, 0, 1, 1)}, pairs())


# --- Class folders and archives ---


@case
def class_folders(folder: Path) -> Meant:
    """Kaggle's chest X-rays: folders of splits and of classes, and no table."""
    images: list[str] = []
    split: list[str] = []
    sick: list[Label] = []
    for part, n in (("train", 6), ("val", 3), ("test", 3)):
        for kind in ("NORMAL", "PNEUMONIA"):
            for i in range(n):
                file = (
                    f"IM-{len(images):04}-0001.jpeg"
                    if kind == "NORMAL"
                    else f"person{len(images)}_bacteria_{i}.JPEG"
                )
                images.append(f"{part}/{kind}/{file}")
                split.append("validation" if part == "val" else part)
                sick.append(int(kind == "PNEUMONIA"))
    pngs(folder, images)
    return Meant(images, {"Pneumonia": sick}, split=split)


@case
def a_zip_of_images(folder: Path) -> Refused:
    """The images are still packed."""
    plain(folder, ["image", "Mass"], lambda i: [f"{i:02}.png", i % 2])
    with zipfile.ZipFile(folder / "images.zip", "w") as packed:
        for path in sorted((folder / "img").iterdir()):
            packed.write(path, path.name)
            path.unlink()
    return Refused((r"contains no image", r"unpack images\.zip"))


@case
def a_tar_of_images(folder: Path) -> Meant:
    """The images are in a tar, which is read as it is."""
    plain(folder, ["image", "Mass"], lambda i: [f"{i:02}.png", i % 2])
    with tarfile.open(folder / "images.tar", "w") as packed:
        for path in sorted((folder / "img").iterdir()):
            packed.add(path, path.name)
            path.unlink()
    return Meant(names("images.tar/{:02}.png"), {"Mass": every(0, 1)})


# --- Workbooks ---


def workbook(path: Path, **sheets: Sequence[Cells]) -> None:
    """Write a workbook; a sheet whose name begins with ``hidden`` is hidden."""
    import openpyxl

    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        sheet.sheet_state = "hidden" if title.startswith("hidden") else "visible"
        for row in rows:
            sheet.append(row)
    book.save(path)


@case
def titles_above_two_headers(folder: Path) -> Meant:
    """A workbook of a ward: titles, merged groups of columns, a legend, names without their zeros."""
    pngs(folder / "bilder", names("{:06}.png"))
    rows: list[Cells] = [["Klinikum Nord, Befunde 2023"], [], ["Bild", "Patient", "Datum", "Befunde", None]]
    rows += [[None, None, None, "Mass", "Edema"]]
    rows += [
        [i, 4000 + i // 2, date(2023, 1, 1 + i), ("ja", "nein")[i % 2], ("nein", "ja")[i % 2]]
        for i in range(N)
    ]
    legend = [["ja", "vorhanden"], ["nein", "nicht vorhanden"]]
    workbook(folder / "Befunde 2023.xlsx", Befunde=rows, Legende=legend)
    return Meant(names("bilder/{:06}.png"), {"Mass": every(1, 0), "Edema": every(0, 1)}, pairs())


@case
def a_sheet_for_each_year(folder: Path) -> Meant:
    """Sheets of the same columns, with other images each."""
    pngs(folder / "img", names())
    header = ["image", "patient", "Mass"]

    def row(i: int) -> list[str]:
        return [f"{i:02}.png", f"p{i // 2}", ("yes", "no")[i % 2]]

    sheets: dict[str, list[Cells]] = {
        "2022": [header, *map(row, range(10))],
        "2023": [header, *map(row, range(10, N))],
        "empty": [],
    }
    workbook(folder / "list.XLSX", **sheets)
    return Meant(in_img(), {"Mass": every(1, 0)}, pairs())


@case
def a_hidden_sheet(folder: Path) -> Meant:
    """A hidden sheet has an older version of the table."""
    pngs(folder / "img", names())

    def rows(mass: int) -> list[Cells]:
        others = [[f"{i:02}.png", float(i // 2), mass] for i in range(1, N)]
        return [["image", "patient", "Mass"], ["00.png", 0.0, 0], *others]

    workbook(folder / "list.xlsx", hidden_old=rows(0), new=rows(1))
    return Meant(in_img(), {"Mass": [0, *[1] * (N - 1)]}, pairs())


@case
def two_sheets_of_the_same_images(folder: Path) -> Refused:
    """Two sheets contradict each other, and nothing says which is right."""
    pngs(folder / "img", names())
    header: list[object] = ["image", "Mass"]
    a, b = ([header, *([name, (i + k) % 2] for i, name in enumerate(names()))] for k in (0, 1))
    workbook(folder / "list.xlsx", first=a, second=b)
    return Refused(("'first'", "'second'", "hide"))


# --- Text files ---


@case
def decimal_commas(folder: Path) -> Meant:
    """A German export: byte order mark, semicolons, 1,0 and 0,0, a quoted report of two lines."""
    report = "Kein Erguss;\r\nHerz „normal“, sonst o. B."
    header = ["Bilddatei", "Patientennummer", "Größe", "Mass", "Befundtext"]
    row = lambda i: [f"{i:02}.png", f"{i // 2},0", "1,80", ("1,0", "0,0", "")[i % 3], report]  # noqa: E731
    plain(folder, header, row, delimiter=";", encoding="utf-8-sig")
    return Meant(in_img(), {"Mass": every(1, 0, None)}, pairs())


@case
def upper_case_suffix(folder: Path) -> Meant:
    """LABELS.CSV and A.PNG, tabs, names of columns with blanks around them."""
    pngs(folder / "IMG", names("{:02}.PNG"))
    rows = [[f"{i:02}.PNG", f"p{i // 2}", f" {i % 2} "] for i in range(N)]
    table(folder / "LABELS.CSV", [[" Image ", "Patient ", "Mass "], *rows], delimiter="\t")
    return Meant(names("IMG/{:02}.PNG"), {"Mass": every(0, 1)}, pairs())


@case
def written_by_pandas(folder: Path) -> Meant:
    """`to_csv` of a frame with blanks: an index without a name, 1.0 and 0.0, patients such as 12.0."""
    header = ["", "filename", "subject", "Mass", "Edema"]
    plain(
        folder, header, lambda i: [i, f"{i:02}.png", f"{i // 2}.0", f"{i % 2}.0", ("1.0", "", "0.0")[i % 3]]
    )
    return Meant(in_img(), {"Mass": every(0, 1), "Edema": every(1, None, 0)}, pairs())


@case
def delimiters_at_the_end(folder: Path) -> Meant:
    """Each row ends with delimiters, and the header does not."""
    plain(folder, ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2, "", ""])
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs())


@case
def headers_with_their_codes(folder: Path) -> Meant:
    """The header says what the cells are, in two lines of a cell."""
    header = ["image", "patient", "Mass\n(0/1)", "Edema (1 = ja, 0 = nein)"]
    plain(folder, header, lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2, int(i % 3 == 0)])
    return Meant(in_img(), {"Mass": every(0, 1), "Edema": every(1, 0, 0)}, pairs())


@case
def codes_beside_names(folder: Path) -> Meant:
    """A class is given twice, by its number and by its name."""
    kinds = ("Normal", "Polyp", "Ulcer")
    plain(
        folder,
        ["image", "patient", "code", "diagnosis"],
        lambda i: [f"{i:02}.png", i // 2, i % 3, kinds[i % 3]],
    )
    return Meant(in_img(), {"Polyps": every(0, 1, 0), "Ulcer": every(0, 0, 1)}, pairs())


@case
def reports_beside_images(folder: Path) -> Refused:
    """Images with a report each, and no labels."""
    text = "No effusion, heart normal. Nothing else to be seen."
    plain(folder, ["image", "patient", "report"], lambda i: [f"{i:02}.png", f"p{i // 2}", f"{text} {i}"])
    return Refused((r"labels\.csv has no label columns", "image, patient, report", "Write 1 and 0"))


@case
def repeated_rows(folder: Path) -> Meant:
    """Some rows are there twice."""

    def row(i: int) -> list[object]:
        return [f"{i:02}.png", f"p{i // 2}", i % 2]

    plain(folder, ["image", "patient", "Mass"], row)
    header: list[object] = ["image", "patient", "Mass"]
    rows = [header, *map(row, range(N)), row(3), row(3), row(4)]
    table(folder / "labels.csv", rows)
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs())


@case
def sums_below(folder: Path) -> Meant:
    """The last row has the sums of the columns."""
    row = lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2]  # noqa: E731
    plain(folder, ["image", "patient", "Mass"], row)
    table(folder / "labels.csv", [["image", "patient", "Mass"], *map(row, range(N)), ["Total", "", 12]])
    return Meant(
        in_img(),
        {"Mass": every(0, 1)},
        pairs(),
        asks=(r"1 of 25 rows without an image.*'Total' in row 26", r"(?s)^((?!repeated).)*$"),
    )


@case
def a_header_within(folder: Path) -> Meant:
    """Two tables were pasted below each other, each with its header."""
    header, row = ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2]
    plain(folder, header, row)
    table(folder / "labels.csv", [header, *map(row, range(10)), header, *map(row, range(10, N))])
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs(), asks=("'image' in row 12",))


@case
def units_below_the_header(folder: Path) -> Meant:
    """The second row has the units of the columns."""
    header, units = ["image", "patient", "age", "Mass"], ["-", "id", "years", "0/1"]
    row = lambda i: [f"{i:02}.png", f"p{i // 2}", 40 + i, i % 2]  # noqa: E731
    plain(folder, header, row)
    table(folder / "labels.csv", [header, units, *map(row, range(N))])
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs(), asks=("'-' in row 2",))


@case
def an_old_workbook(folder: Path) -> Refused:
    """A table of a kind that is not read."""
    pngs(folder / "img", names())
    (folder / "Befunde.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    return Refused((r"Befunde\.xls", r"save Befunde\.xls as \.xlsx or \.csv"))


@case
def an_end_without_cells(folder: Path) -> Refused:
    """A line of text below the table."""
    plain(folder, ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2])
    with (folder / "labels.csv").open("a") as file:
        file.write("Exported by the PACS\n")
    return Refused((r"labels\.csv row 26 has 1 cell",))


# --- Languages ---


def in_language(image: str, patient: str, yes: str, no: str, encoding: str = "utf-8") -> Case:
    """A table whose columns and cells are in a language."""

    def write(folder: Path) -> Meant:
        row = lambda i: [f"{i:02}.png", f"p{i // 2}", (yes, no)[i % 2]]  # noqa: E731
        plain(folder, [image, patient, "Mass"], row, delimiter=";", encoding=encoding)
        return Meant(in_img(), {"Mass": every(1, 0)}, pairs())

    return write


LANGUAGES = {
    "German": ("Bilddatei", "Pat.-Nr.", "Ja", "Nein", "cp1252"),
    "French": ("fichier", "N° patient", "oui", "non", "cp1252"),
    "Spanish": ("archivo", "paciente", "Sí", "No", "latin-1"),
    "Italian": ("immagine", "ID paziente", "sì", "no"),
    "Portuguese": ("imagem", "Paciente", "Sim", "Não"),
    "Dutch": ("afbeelding", "Patiëntnummer", "ja", "nee"),
    "Polish": ("plik", "pacjent", "TAK", "NIE"),
    "Czech": ("soubor", "číslo pacienta", "ano", "ne"),
    "Turkish": ("dosya", "hasta no", "evet", "hayır"),
    "Russian": ("файл", "пациент", "да", "нет"),
    "Greek": ("αρχείο", "ασθενής", "ναι", "όχι"),
    "Finnish": ("tiedosto", "potilas", "kyllä", "ei"),
    "Hungarian": ("fájl", "beteg", "igen", "nem"),
    "Japanese": ("画像", "患者ID", "有", "無"),
    "Chinese": ("图像", "病人编号", "是", "否"),
    "Korean": ("영상", "환자번호", "예", "아니오"),
}


for language, words in LANGUAGES.items():
    CASES[f"in {language}"] = in_language(*words)


# --- Cells ---


@case
def mixed_words(folder: Path) -> Meant:
    """POSITIVE, negative and N/A, in any case."""
    words = ("POSITIVE", "Negative", "N/A", "neg")
    plain(folder, ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", words[i % 4]])
    return Meant(in_img(), {"Mass": every(1, 0, None, 0)}, pairs())


@case
def one_and_two(folder: Path) -> Refused:
    """SPSS and many forms write 1 for yes and 2 for no."""
    plain(folder, ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", 1 + i % 2])
    return Refused((r"column 'Mass' is left out: its values are 1, 2", r'values = \{ "2" = "\?" \}'))


@case
def two_columns_of_words(folder: Path) -> Refused:
    """Words of two columns are asked about in one line, which can be pasted as it is."""
    rows = lambda i: [f"{i:02}.png", ("wohl", "kaum")[i % 2], ("klar", "nie gesehen")[i % 2]]  # noqa: E731
    plain(folder, ["image", "Mass", "Edema"], rows)
    words = " = .*, ".join(f'"{word}"' for word in ("kaum", "klar", "nie gesehen", "wohl"))
    return Refused((f"values = {{ {words} = ",))


@case
def only_ones(folder: Path) -> Meant:
    """1 or blank: a blank cell may mean absent, which only a person knows."""
    plain(
        folder,
        ["image", "patient", "Mass", "Edema"],
        lambda i: [f"{i:02}.png", f"p{i // 2}", ("1", "")[i % 2], ("", "1")[i % 2]],
    )
    labels = {"Mass": every(1, None), "Edema": every(None, 1)}
    return Meant(in_img(), labels, pairs(), asks=(r'values = \{ "" = 0 \}',))


@case
def codes_with_a_legend(folder: Path) -> Meant:
    """0, 1 and 2, whose names are in another table."""
    plain(folder, ["image", "patient", "label"], lambda i: [f"{i:02}.png", i // 2, i % 3])
    table(folder / "classes.csv", [["id", "name"], [0, "Normal"], [1, "Polyp"], [2, "Ulcer"]])
    return Meant(in_img(), {"Polyps": every(0, 1, 0), "Ulcer": every(0, 0, 1)}, pairs())


@case
def codes_without_a_legend(folder: Path) -> Refused:
    """0, 1 and 2, and nothing says what they are."""
    plain(folder, ["image", "patient", "label"], lambda i: [f"{i:02}.png", i // 2, i % 3])
    return Refused(('finding_column = "label"', '"0" = "label 0", "1" = "label 1", "2" = "label 2"'))


@case
def lists_of_findings(folder: Path) -> Meant:
    """Findings in one cell, with blanks around the separators and in any case."""
    cells = ("Mass ; edema", "EDEMA", "No finding", "mass")
    plain(folder, ["image", "patient", "findings"], lambda i: [f"{i:02}.png", f"p{i // 2}", cells[i % 4]])
    return Meant(in_img(), {"Mass": every(1, 0, 0, 1), "Edema": every(1, 1, 0, 0)}, pairs())


@case
def json_of_lists(folder: Path) -> Meant:
    """A list in JSON with a list of findings for each image."""
    pngs(folder / "img", names())
    rows = [
        {"file": f"img/{i:02}.png", "patient": f"p{i // 2}", "labels": (["Mass"], [])[i % 2]}
        for i in range(N)
    ]
    (folder / "data.json").write_text(json.dumps(rows))
    return Meant(in_img(), {"Mass": every(1, 0)}, pairs())


@case
def shares(folder: Path) -> Refused:
    """Numbers of a model or of readers, between 0 and 1."""
    plain(folder, ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", f"0.{10 + i}"])
    return Refused(("'Mass' is left out: its numbers lie between 0 and 1", "threshold"))


@case
def reports(folder: Path) -> Meant:
    """Documents in place of images: a text, a number for each, a patient."""
    text = (
        "Kein Erguss, Herz normal groß.\nKein Rundherd zu sehen.",
        "Deutlicher Rundherd rechts, sonst unauffällig.",
    )
    rows = [[1000 + i, f"p{i // 2}", text[i % 2] + f" Bild {i}.", i % 2] for i in range(N)]
    table(folder / "befunde.csv", [["Auftrag", "Patient", "Befundtext", "Mass"], *rows], ";", "cp1252")
    return Meant(names("10{:02}"), {"Mass": every(0, 1)}, pairs(), asks=('text_column = "Befundtext"',))


@case
def reports_without_a_name(folder: Path) -> Meant:
    """The same in a workbook, without a number; the labels are a list of findings."""
    findings = ("Mass; Edema", "No Finding", "Edema")
    text = "The heart is of normal size, and there is nothing else to be seen"
    rows: list[Cells] = [[f"{text} in {i}", findings[i % 3], "F"] for i in range(N)]
    workbook(folder / "reports.xlsx", reports=[["report", "diagnosis", "sex"], *rows])
    asks = ("no column names the patients", "the number of its row")
    return Meant([str(i + 2) for i in range(N)], {"Edema": every(1, 0, 1), "Mass": every(1, 0, 0)}, asks=asks)


@case
def reports_without_their_images(folder: Path) -> Refused:
    """A table of images with a long comment, and the images are elsewhere: this is no study of texts."""
    text = "The heart is of normal size, and there is nothing else to be seen"
    rows = [[f"{i:02}.png", f"{text} in {i}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "report", "Mass"], *rows])
    return Refused(("contains no image",))


# --- Splits and several tables ---


@case
def split_words(folder: Path) -> Meant:
    """Training, Validation and Testing, of a column with another name."""
    words = ("Training", "Validation", "Testing")
    plain(
        folder, ["image", "patient", "Set", "Mass"], lambda i: [f"{i:02}.png", f"p{i}", words[i % 3], i % 2]
    )
    parts = [("train", "validation", "test")[i % 3] for i in range(N)]
    return Meant(in_img(), {"Mass": every(0, 1)}, split=parts)


@case
def split_flags(folder: Path) -> Refused:
    """is_test says 1 or 0: it is no finding, and its images must not be trained on."""
    plain(
        folder,
        ["image", "patient", "is_test", "Mass"],
        lambda i: [f"{i:02}.png", f"p{i}", int(i % 4 == 0), i % 2],
    )
    return Refused(("'is_test'", "train, validation"))


@case
def split_dates(folder: Path) -> Refused:
    """A column `split` of days."""
    plain(
        folder,
        ["image", "patient", "split", "Mass"],
        lambda i: [f"{i:02}.png", f"p{i}", f"2024-01-{1 + i:02}", i % 2],
    )
    return Refused(("column 'split': '2024-01-01'.* is not a split",))


@case
def splits_of_folders(folder: Path) -> Meant:
    """The table lists train/00.png and Test/01.png: what is in Test must not be trained on."""
    parts = [("train", "train", "val", "Test")[i // 2 % 4] for i in range(N)]
    images = [f"cxr/{part}/{i:02}.png" for i, part in enumerate(parts)]
    pngs(folder, images)
    rows = [[name, f"p{i // 2}", i % 2] for i, name in enumerate(images)]
    table(folder / "labels.csv", [["path", "patient", "Mass"], *rows])
    words = {"train": "train", "val": "validation", "Test": "test"}
    return Meant(images, {"Mass": every(0, 1)}, pairs(), [words[part] for part in parts])


@case
def split_folds(folder: Path) -> Refused:
    """Numbers of folds."""
    plain(folder, ["image", "patient", "fold", "Mass"], lambda i: [f"{i:02}.png", f"p{i}", i % 5, i % 2])
    return Refused(("column 'fold': '0', '1', '2', '3' is not a split",))


def _parts(folder: Path, patient: Callable[[int], str], parts: Mapping[str, range]) -> list[str]:
    pngs(folder / "img", names())
    for part, of in parts.items():
        rows = [[f"{i:02}.png", patient(i), i % 2] for i in of]
        table(folder / f"{part}.csv", [["image", "patient", "Mass"], *rows])
    words = {"dev": "validation", "my_train": "train"}
    return [words.get(part, part) for i in range(N) for part, of in parts.items() if i in of]


@case
def a_table_for_each_split(folder: Path) -> Meant:
    """my_train.csv, dev.csv and test.csv."""
    split = _parts(
        folder, lambda i: f"p{i // 2}", {"my_train": range(12), "dev": range(12, 16), "test": range(16, N)}
    )
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs(), split)


@case
def a_sheet_for_each_split(folder: Path) -> Meant:
    """Sheets named after splits."""
    pngs(folder / "img", names())
    header, row = ["image", "patient", "Mass"], lambda i: [f"{i:02}.png", f"p{i // 2}", i % 2]
    parts = {"Train": range(12), "Valid": range(12, 16), "Test": range(16, N)}
    workbook(folder / "list.xlsx", **{part: [header, *map(row, of)] for part, of in parts.items()})
    split = ["train"] * 12 + ["validation"] * 4 + ["test"] * 8
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs(), split)


@case
def a_table_kept_apart(folder: Path) -> Refused:
    """holdout.csv has the columns of labels.csv, and nothing says that it is for training too."""
    _parts(folder, lambda i: f"p{i // 2}", {"labels": range(16), "holdout": range(16, N)})
    return Refused((r"holdout\.csv and labels\.csv", "give the path of the table"))


@case
def a_patient_in_train_and_test(folder: Path) -> Refused:
    """train.csv and test.csv have other images of the same patients."""
    _parts(folder, lambda i: f"p{i % 12}", {"train": range(16), "test": range(16, N)})
    return Refused(("8 patients in two splits",))


@case
def a_table_for_each_ward(folder: Path) -> Meant:
    """Two tables of the same columns, with other images each."""
    _parts(folder, lambda i: f"p{i // 2}", {"ward_a": range(12), "ward_b": range(12, N)})
    return Meant(in_img(), {"Mass": every(0, 1)}, pairs(), asks=("ward_a.csv", "ward_b.csv"))


@case
def two_versions(folder: Path) -> Refused:
    """Two tables of the same images and columns, of which one may be out of date."""
    _parts(folder, lambda i: f"p{i // 2}", {"labels": range(N), "labels (1)": range(N)})
    return Refused((r"labels \(1\)\.csv and labels\.csv", "give the path of the table"))


@case
def patients_in_another_table(folder: Path) -> Meant:
    """Labels in one table, patients in another, joined by the image."""
    plain(folder, ["image", "Mass"], lambda i: [f"{i:02}.png", i % 2])
    rows = [["subject_id", "file"], *([f"s{i // 3}", f"{i:02}"] for i in reversed(range(N)))]
    table(folder / "meta.tsv", rows, "\t", "utf-16")
    return Meant(in_img(), {"Mass": every(0, 1)}, [f"s{i // 3}" for i in range(N)])


# --- Encodings, and names with signs ---


def in_encoding(encoding: str, image: str, patient: str, finding: str) -> Case:
    """A table with foreign words in an encoding that cannot be told from its bytes."""

    def write(folder: Path) -> Refused:
        plain(folder, [image, patient, finding], _row, encoding=encoding)
        return Refused((r"labels\.csv row 1: .*neither UTF-8 nor", "save the table as UTF-8"))

    return write


def _row(i: int) -> Cells:
    return [f"{i:02}.png", f"p{i // 2}", i % 2]


for _encoding, *_words in (
    ("shift_jis", "画像", "患者ID", "胸水"),
    ("euc_jp", "画像", "患者ID", "胸水"),
    ("gb18030", "图像", "病人编号", "胸腔积液"),
    ("big5", "影像", "病人編號", "胸腔積液"),
    ("euc_kr", "영상", "환자번호", "흉수"),
    ("cp1251", "файл", "пациент", "плеврит"),
    ("cp1253", "αρχείο", "ασθενής", "πλευρίτιδα"),
):
    CASES[f"table in {_encoding}"] = in_encoding(_encoding, *_words)


@case
def a_class_in_another_encoding_than_the_header(folder: Path) -> Refused:
    """Shift-JIS in row 3 alone, in a column of findings."""
    row = lambda i: [f"{i:02}.png", f"p{i // 2}", "胸水" if i == 1 else "Mass"]  # noqa: E731
    plain(folder, ["image", "patient", "finding"], row, encoding="shift_jis")
    return Refused((r"labels\.csv row 3: ", "save the table as UTF-8"))


@case
def two_encodings_in_one_table(folder: Path) -> Refused:
    """A header in UTF-8, and rows of Windows that were appended: one of both would have wrong letters."""
    plain(folder, ["image", "patient", "Vergrößerung"], lambda i: [f"{i:02}.png", f"Müller {i // 2}", i % 2])
    lines = (folder / "labels.csv").read_bytes().split(b"\n")
    lines[9] = lines[9].decode().encode("cp1252")
    (folder / "labels.csv").write_bytes(b"\n".join(lines))
    return Refused((r"labels\.csv row 1: ", "save the table as UTF-8"))


@case
def czech_of_windows(folder: Path) -> Meant:
    """cp1250 reads as cp1252, with other letters: `init` shows a word, so that a person sees it."""
    plain(folder, ["image", "patient", "Zvětšení"], _row, encoding="cp1250")
    wrong = "Zvětšení".encode("cp1250").decode("cp1252")
    return Meant(in_img(), {wrong: every(0, 1)}, pairs(), asks=(rf"cp1252, such as '{wrong}' in row 1",))


@case
def names_as_in_an_address(folder: Path) -> Meant:
    """The table has %20 and %C3%A9 where files have a blank and an accent."""
    images = names("img/caf\u00e9 scan {:02}.png")
    pngs(folder, images)
    rows = [[f"caf%C3%A9%20scan%20{i:02}.png", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 1)}, pairs())


@case
def addresses_of_files(folder: Path) -> Meant:
    """Addresses of a browser: file:///D:/..., with %20."""
    images = names("img/scan {:02}.png")
    pngs(folder, images)
    rows = [[f"file:///D:/PACS%20export/img/scan%20{i:02}.png", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 1)}, pairs())


@case
def names_with_signs(folder: Path) -> Meant:
    """Blanks, #, +, %, &, commas, quotes and brackets, in names as the file system has them."""
    signs = [" a b", "#1", "+2", "100%", "a&b", "a,b", "it's", "(1)", "[x]", "a;b", "a=b", "~c"]
    images = [f"img/{i:02}{signs[i % len(signs)]}.png" for i in range(N)]
    pngs(folder, images)
    rows = [[image.removeprefix("img/"), f"p{i // 2}", i % 2] for i, image in enumerate(images)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 1)}, pairs())


@case
def a_literal_percent_sign_beside_the_blank(folder: Path) -> Meant:
    """`a%20b` and `a b` are two files here, and each cell means the one that it spells."""
    images = [f"img/{i // 2:02}{'%20' if i % 2 else ' '}b.png" for i in range(N)]
    pngs(folder, images)
    rows = [[image.removeprefix("img/"), f"p{i // 2}", i % 2] for i, image in enumerate(images)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 1)}, pairs())


@case
def names_with_outer_blanks(folder: Path) -> Meant:
    """Files of which some begin with a blank, or have one before the suffix; cells have blanks around."""
    images = [f"img/{' ' * (i % 3 == 1)}s{i:02}{' ' * (i % 3 == 2)}.png" for i in range(N)]
    pngs(folder, images)
    rows = [[f" s{i:02} ", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 1)}, pairs())


@case
def plus_signs_for_blanks(folder: Path) -> Refused:
    """`scan+01` may be another file than `scan 01`: it is shown, and not guessed."""
    pngs(folder, names("img/scan {:02}.png"))
    rows = [[f"scan+{i:02}.png", f"p{i // 2}", i % 2] for i in range(N)]
    table(folder / "labels.csv", [["image", "patient", "Mass"], *rows])
    return Refused((r"'scan\+00\.png'", r"'scan 00\.png'"))


# --- Everyday inputs: a table, and what it means ---


def as_rows(header: Cells, row: Callable[[int], Cells], outcome: Meant | Refused, title: str = "") -> Case:
    """A table of `plain`, maybe below a title and with semicolons."""

    def write(folder: Path) -> Meant | Refused:
        plain(folder, header, row, delimiter=";" if title else ",")
        path = folder / "labels.csv"
        path.write_text(f"{title}\n" * bool(title) + path.read_text())
        return outcome

    return write


def as_files(
    images: Sequence[str],
    others: Sequence[str],
    tables: Mapping[str, Sequence[Cells]],
    outcome: Meant | Refused,
) -> Case:
    """Images, files that are none of the data, and tables."""

    def write(folder: Path) -> Meant | Refused:
        pngs(folder, [*images, *others])
        for name, rows in tables.items():
            table(folder / name, rows)
        return outcome

    return write


def _with(*cells: Callable[[int], object]) -> Callable[[int], Cells]:
    """Rows of an image, a patient of two images, and these cells."""
    return lambda i: [f"{i:02}.png", f"p{i // 2}", *(cell(i) for cell in cells)]


def _turn(*words: object) -> Callable[[int], object]:
    return lambda i: words[i % len(words)]


_SICK = every(0, 1)
_IDS = ["image", "patient"]
_ALL = [f"{i:02}.png" for i in range(N)]
_PLACES = "caecum", "rectum", "sigmoid"
_AB = [f"{kind}/{i}" for kind in ("Mass", "Normal") for i in range(12)]
_VISITS = [f"set/{('polyp', 'ulcer')[i // 12]}/case {i // 2:02}/visit {i % 2}/{i}.png" for i in range(N)]
_UNEVEN = [f"{('polyp', 'ulcer/new')[i % 2]}/{i}.png" for i in range(N)]
_DEEP = "Pneumonia/Viral", "Pneumonia/Bacterial", "Tumour/Benign", "Normal"
_NESTED = [f"{_DEEP[i % 4]}/{i}.png" for i in range(N)]
_CELLS = [
    (f"{i:02}.png:{kind}", int(i % 2 == k)) for i in range(N) for k, kind in enumerate(("Mass", "Edema"))
]
_LAST = every(*[0] * 12, *[1] * 12)
_LUNG = "Lung/Pneumonia/Viral", "Lung/Pneumonia", "No Finding", "Lung/Pneumonia/Viral, Mass"

CASES |= {
    "own words": as_rows(
        [*_IDS, "histology", "location"],
        _with(_turn("adenoma", "serrated", "lipoma"), _turn(*_PLACES[:2])),
        Meant(
            in_img(),
            {"Adenoma": every(1, 0, 0), "Serrated": every(0, 1, 0), "Lipoma": every(0, 0, 1)},
            pairs(),
        ),
    ),
    "words of an unknown column": as_rows(
        [*_IDS, "Muster", "Ward"],
        _with(_turn("lepidisch", "azinär", "solide"), _turn("A", "B")),
        Refused((r'finding_column = "Muster"', r'(?s)^((?!column .Ward).)*$', r"\"solide\" = \"\?\"")),
    ),
    "grades": as_rows(
        [*_IDS, "KL"],
        _with(_turn(0, 1, 2, 3, 4)),
        Refused((r'finding_column = "KL"', r'"4" = "KL 4"', r'"1" = 0, "2" = 1, "3" = 1')),
    ),
    "missing codes": as_rows(
        [*_IDS, "Mass", "Edema", "Nodule"],
        _with(_turn(0, 1, 88), _turn("1", "-9", "0"), _turn("1", "0", ".", "#N/V")),
        Meant(
            in_img(),
            {"Mass": every(0, 1, None), "Edema": every(1, None, 0), "Nodule": every(1, 0, None, None)},
            pairs(),
            asks=("'-9', '88' beside 1 and 0 count as missing",),
        ),
    ),
    "paths of classes": as_rows(
        [*_IDS, "finding"],
        lambda i: [f"{i:02}.png", f"p{i // 2}", _LUNG[i % 4]],
        Meant(
            in_img(),
            {"Lung": every(1, 1, 0, 1), "Pneumonia": every(1, 1, 0, 1), "Viral": every(1, None, 0, 1)}
            | {"Mass": every(0, 0, 0, 1)},
            pairs(),
        ),
    ),
    "paths with arrows": as_rows(
        [*_IDS, "diagnosis"],
        _with(_turn("Skin > Nevus", "Skin > Melanoma", "Skin")),
        Meant(
            in_img(),
            {"Skin": every(1), "Melanocytic Nevus": every(1, 0, None), "Melanoma": every(0, 1, None)},
            pairs(),
        ),
    ),
    "a title above semicolons": as_rows(
        [*_IDS, "Mass"], _with(_turn(0, 1)), Meant(in_img(), {"Mass": _SICK}, pairs()), title="Export, 2024"
    ),
    "lesions in German": as_rows(
        ["Datei", "Nummer der Läsion", "Mass"], _with(_turn(0, 1)), Meant(in_img(), {"Mass": _SICK}, pairs())
    ),
    "splits to validate": as_rows(
        [*_IDS, "split", "Mass"],
        lambda i: [f"{i:02}.png", f"p{i}", ("train", "validate", "test")[i % 3], i % 2],
        Meant(in_img(), {"Mass": _SICK}, split=[("train", "validation", "test")[i % 3] for i in range(N)]),
    ),
    "masks in class folders": as_files(
        [f"{path}.png" for path in _AB],
        [
            f"{folder}/{start}{name}{end}.png"
            for folder, _, name in (path.rpartition("/") for path in _AB)
            for start, end in (("", "_mask"), ("", "_mask_1"), ("mask_", ""), ("", "-label"), ("", "_Maske"))
        ],
        {},
        Meant([f"{path}.png" for path in _AB], {"Mass": every(*[1] * 12, *[0] * 12)}, asks=("120 files",)),
    ),
    "masks with a name of their own": as_files(
        names("HAM_images/ISIC_{}.jpg"),
        names("HAM_segmentations/ISIC_{}_segmentation.png"),
        {"t.csv": [["image", "Mass"], *([f"ISIC_{i}", i % 2] for i in range(N))]},
        Meant(names("HAM_images/ISIC_{}.jpg"), {"Mass": _SICK}, asks=("24 files",)),
    ),
    "columns of masks and previews": as_files(
        names("data/a{:02}/0.png"),
        [*names("data/a{:02}/m.png"), *names("data/b{:02}/0.png")],
        {
            "t.csv": [
                ["ROI mask", "thumbnail_path", "path", "Mass"],
                *([f"a{i:02}/m.png", f"b{i:02}/0.png", f"a{i:02}/0.png", i % 2] for i in range(N)),
            ]
        },
        Meant(names("data/a{:02}/0.png"), {"Mass": _SICK}),
    ),
    "folders of classes and patients": as_files(
        _VISITS, [], {}, Meant(_VISITS, {"Polyps": [1] * 12 + [0] * 12, "Ulcer": _LAST}, pairs())
    ),
    "class folders of other depths": as_files(
        _UNEVEN, [], {}, Meant(_UNEVEN, {"Polyps": every(1, 0), "Ulcer": every(0, 1)})
    ),
    "folders of classes in class folders": as_files(
        _NESTED,
        [],
        {},
        Meant(
            _NESTED,
            {
                "Pneumonia": every(1, 1, 0, 0),
                "Viral": every(1, 0, 0, 0),
                "Bacterial": every(0, 1, 0, 0),
                "Tumour": every(0, 0, 1, 0),
                "Benign": every(0, 0, 1, 0),
            },
        ),
    ),
    "image and finding in one cell": as_files(
        _ALL,
        [],
        {"t.csv": [["id", "value"], *_CELLS, _CELLS[3]]},
        Meant(_ALL, {"Mass": every(1, 0), "Edema": every(0, 1)}),
    ),
    "labels by the number of the study": as_files(
        _ALL,
        [],
        {
            "images.csv": [["file", "pid", "study"], *([m, i // 4, 50 + i // 2] for i, m in enumerate(_ALL))],
            "labels.csv": [["pid", "study", "Mass"], *([i // 2, 50 + i, i % 2] for i in range(N // 2))],
        },
        Meant(_ALL, {"Mass": every(0, 0, 1, 1)}, [str(i // 4) for i in range(N)]),
    ),
    "two images of one name": as_files(
        _ALL,
        ["00.jpg", "01.jpg"],
        {"t.csv": [["file", "Mass"], *([f"{i:02}", i % 2] for i in range(N))]},
        Meant(_ALL[2:], {"Mass": _SICK[2:]}, asks=("2 of these .* such as 00.jpg and 00.png",)),
    ),
    "one name in several folders": as_files(
        [f"{side}/{name}" for side in "ab" for name in _ALL],
        [],
        {"t.csv": [["file", "Mass"], *([name, i % 2] for i, name in enumerate(_ALL))]},
        Refused(("'00.png' is most like 'a/00.png' and 'b/00.png'; write the path",)),
    ),
    "words for the value of a finding": as_rows(
        [*_IDS, "finding", "present"],
        _with(_turn("Mass", "Edema"), _turn("wohl", "kaum", "wohl", "wohl")),
        Refused(('values = { "kaum" = "\\?", "wohl" = "\\?" }', "what do 'kaum', 'wohl' mean")),
    ),
    "arrays": as_files([], [], {"train.npz": []}, Refused(("train.npz as a PNG",))),
    "a name that is nearly a file": as_files(
        names("scan{:02}.png"),
        [],
        {"t.csv": [["file", "Mass"], *([f"scn_{i:02}.png", i % 2] for i in range(N))]},
        Refused((r"'scn_00.png' is most like 'scan0\d.png'",)),
    ),
}  # fmt: skip


@case
def studies_of_dicom_headers(folder: Path) -> Meant:
    """The table names studies by a UID that only the headers state; the patient too."""
    import pydicom
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import UID

    images = [f"CD/{i // 4}/{i:04}" for i in range(N)]
    for i, image in enumerate(images):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.1")
        meta.MediaStorageSOPClassUID = meta.MediaStorageSOPInstanceUID = UID(f"1.2.3.{i}")
        of = pydicom.Dataset()
        of.file_meta, of.PatientID, of.StudyInstanceUID = meta, f"P{i // 4}", f"1.2.{i // 2}"
        of.Rows = of.Columns = 8
        of.SamplesPerPixel, of.PhotometricInterpretation, of.PixelRepresentation = 1, "MONOCHROME2", 0
        of.BitsAllocated = of.BitsStored = 8
        of.HighBit, of.PixelData = 7, bytes(range(i, i + 64))
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        of.save_as(folder / image, enforce_file_format=True)
    rows = [[f"1.2.{i}", i % 2] for i in range(N // 2)]
    table(folder / "t.csv", [["study", "Mass"], *rows])
    return Meant(images, {"Mass": every(0, 0, 1, 1)}, [str(i // 4) for i in range(N)])
