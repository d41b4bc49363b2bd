"""Tables as hospitals and public archives have them, each with what it means.

`CASES` has for each form of table what writes a folder of one site with it, and returns what it means: the
labels, patients and splits of its images, or what a refusal has to name. `assert_read` gives such a folder to
`suture init`, and compares. Everything in them is invented; comments say where forms occur.
"""

from __future__ import annotations

import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from dicom_files import dicom
from suture.core.errors import SutureError
from suture.data.config import load_site_config
from suture.data.images import ImageSource
from suture.data.readers import read_table
from suture.data.table import Table
from suture_prepare.new_study import look, summary, write_study
from world import write_table

N = 24
"""Images of a case."""

Cells = Sequence[object]
Label = int | None
"""None where it is unknown."""


@dataclass(frozen=True)
class Meant:
    """What a folder means.

    Attributes:
        images: their paths within the folder.
        labels: by class, those of the images; over and over where there are fewer.
        of_patient: so many images in a row are of one patient; 1 where nothing says whose they are.
        split: of each image, over and over; None where nothing says it, so that `init` divides the patients.
        named: what `init` has to name: a file, a column, a word of a cell, a line to paste.
        unnamed: what it must not.
    """

    images: Sequence[str]
    labels: Mapping[str, Sequence[Label]]
    of_patient: int = 1
    split: Sequence[str] | None = None
    named: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """What cannot be read as it is, and what `init`, or then the reader, has to name."""

    named: tuple[str, ...]
    unnamed: tuple[str, ...] = ()


Outcome = Meant | Refused
Case = Callable[[Path], Outcome]

CASES: dict[str, Case] = {}
"""Each form of table by its name."""


def assert_read(case: Case, folder: Path) -> None:
    """Write a case, read it as `suture init` would, and compare with what is meant."""
    site = folder / "site"
    site.mkdir(parents=True)
    meant, said, reading = case(site), "", None
    try:
        guess = look({"x": site})["x"]
        write_study(folder / "study", {"x": guess})
        config = folder / "study" / "x" / "suture.toml"
        said = "\n".join([*summary("x", guess, config), config.read_text()])
        reading = read_table(load_site_config(config).data)
        said = "\n".join([said, *reading.faults])
    except SutureError as error:
        said += f"\n{error}"
    ready = reading is not None and not reading.faults and not guess.is_draft
    assert ready is isinstance(meant, Meant), said
    lacking = [name for name in meant.named if name not in said]
    assert not lacking, f"{lacking} not named by:\n{said}"
    assert not [name for name in meant.unnamed if name in said], said
    if isinstance(meant, Meant) and reading is not None:
        _assert_same(reading.table, site, meant)


def _assert_same(table: Table, site: Path, meant: Meant) -> None:
    images, n = list(table.images), len(meant.images)
    if table.texts is None:
        with ImageSource(table.root, table.follow_links) as source:
            images = [_path(source, site, image) for image in images]
    assert sorted(images) == sorted(meant.images)
    row = [images.index(image) for image in meant.images]
    read = {name: table.y[row, table.labels.index(name)].tolist() for name in table.labels}
    labels = {name: [np.nan if y is None else y for y in of] for name, of in meant.labels.items()}
    np.testing.assert_equal(read, {name: [of[i % len(of)] for i in range(n)] for name, of in labels.items()})
    patients, split = [table.patients[i] for i in row], [table.split[i] for i in row]
    groups = [i // meant.of_patient for i in range(n)]
    assert len({*zip(patients, groups, strict=True)}) == len({*patients}) == len({*groups}), patients
    if meant.split is not None:
        assert split == [meant.split[i % len(meant.split)] for i in range(n)]
    else:
        assert len({*zip(patients, split, strict=True)}) == len({*patients}), "a patient in two splits"
        assert all(split), "an image in none"


def _path(source: ImageSource, site: Path, image: str) -> str:
    """The path of an image within the folder of the site; of a link that is not followed, its name."""
    path = Path(source.path(image)) if image in source else source.root / image
    return os.path.relpath(path, site)


# How a case is written


def pngs(folder: Path, names: Sequence[str], mode: str = "L") -> None:
    """Write small images that differ, with any suffix."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
        with path.open("wb") as file:
            Image.fromarray(pixels).convert(mode).save(file, format="PNG")


def workbook(path: Path, sheets: Mapping[str, Sequence[Cells]]) -> None:
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


def each(pattern: str, n: int = N) -> list[str]:
    """A text for each number i, which may hold a half, a third and a quarter of it, and its last bit y."""
    return [pattern.format(i=i, two=i // 2, three=i // 3, four=i // 4, y=i % 2) for i in range(n)]


def rows(header: str, row: str, n: int = N) -> list[Cells]:
    """A table whose rows are a pattern, as of `each`."""
    return [header.split(","), *(line.split(",") for line in each(row, n))]


NAMES, IMAGES = each("{i:02}.png"), each("img/{i:02}.png")
IDS = "image", "patient"
FLAGS = rows("image,Mass", "{i:02}.png,{y}")
SICK = {"Mass": (0, 1)}


def files(
    images: Sequence[str],
    tables: Mapping[str, object],
    outcome: Outcome | Mapping[str, Sequence[Label]] = SICK,
    *others: str,
    **meant: Any,
) -> Case:
    """Images, files that are none of the data, and tables: rows, sheets of a workbook, or what JSON holds.

    Args:
        outcome: or the labels of all images, with other fields of `Meant`.
    """
    means = outcome if isinstance(outcome, Meant | Refused) else Meant(images, outcome, **meant)

    def write(folder: Path) -> Outcome:
        pngs(folder, [*images, *others])
        for name, content in tables.items():
            if name.lower().endswith(".xlsx"):
                workbook(folder / name, cast(Any, content))
            elif name.endswith(".json"):
                (folder / name).write_text(json.dumps(content))
            else:
                write_table(folder / name, cast(Any, content))
        return means

    return write


def form(
    image: str, header: str, row: str, outcome: Any = SICK, *others: str, n: int = N, **meant: Any
) -> Case:
    """Images and t.csv with n rows, as patterns."""
    return files(each(image), {"t.csv": rows(header, row, n)}, outcome, *others, **meant)


def cells(
    columns: Mapping[str, Sequence[object]],
    outcome: Refused | Mapping[str, Sequence[Label]] = SICK,
    *named: str,
    ids: Sequence[str] = IDS,
    change: Callable[[list[Cells]], list[Cells]] = lambda rows: rows,
    title: str = "",
    delimiter: str = ",",
    encoding: str = "utf-8",
    **meant: Any,
) -> Case:
    """N images in img/, and labels.csv of two images of a patient whose columns repeat some cells."""
    lines: list[Cells] = [[*ids, *columns]]
    for i in range(N):
        lines.append([f"{i:02}.png", f"p{i // 2}", *(of[i % len(of)] for of in columns.values())])
    if not isinstance(outcome, Refused):
        meant = {"of_patient": 2, "named": named} | meant
    written = files(IMAGES, {}, outcome, **meant)

    def write(folder: Path) -> Outcome:
        path = write_table(folder / "labels.csv", change(lines), delimiter, encoding)
        path.write_bytes(title.encode() + path.read_bytes())
        return written(folder)

    return write


def parts(tables: Mapping[str, range], outcome: Outcome) -> Case:
    """The images in several tables of the same columns."""
    whole = rows("image,patient,Mass", "{i:02}.png,p{two},{y}")
    content = {f"{name}.csv": [whole[0], *(whole[i + 1] for i in of)] for name, of in tables.items()}
    return files(IMAGES, content, outcome)


KINDS = each("Mass/{i}.png", 12) + each("Normal/{i}.png", 12)
SIGNS = [
    f"{i:02}{sign}" for i, sign in enumerate([" a b", "#1", "+2", "100%", "a&b", "a,b", "it's", "[x]", "a;b"])
]
OF_NIH = [f"{17 + i // 3:08}_{i % 3:03}.png" for i in range(N)]
THREE = {"Polyps": (0, 1, 0), "Ulcer": (0, 0, 1)}
SKIN = "MEL,NV,BCC,AK,BKL,DF,VASC,SCC"
SKIN_NAMES = (
    "Melanoma,Melanocytic Nevus,Basal Cell Carcinoma,Actinic Keratosis,"
    "Benign Keratosis,Dermatofibroma,Vascular Lesion,Squamous Cell Carcinoma"
)
PADCHEST = (
    "['normal']",
    "['COPD signs', ' scoliosis']",
    "['unchanged']",
    "",
    "[]",
    "['exclude', 'scoliosis']",
)
ISIC = [f"ISIC_{i:07}{'_downsampled' * (i % 7 == 0)}" for i in range(N)]

CASES |= {
    # Public archives, by their own columns
    "padchest": files(  # lists of Python, images in numbered folders, words for what was not judged
        [f"images/{i % 3}/{i:05}_j5rk5q.png" for i in range(N)],
        {
            "PADCHEST_labels.csv": [
                ["", "ImageID", "ImageDir", "StudyID", "PatientID", "Pediatric", "Labels", "Localizations"],
                *(
                    [i, f"{i:05}_j5rk5q.png", i % 3, 12537 + i, 10**38 + i // 2, "No", listed, "[]"]
                    for i in range(N)
                    for listed in [PADCHEST[i % 6]]
                ),
            ]
        },
        {"COPD Signs": (0, 1, None, None, 0, None), "Scoliosis": (0, 1, None, None, 0, 1)},
        of_patient=2,
        named=("PadChest",),
    ),
    "isic archive": cells(  # lesion before patient, diagnoses of three levels
        {
            "diagnosis_1": ("Benign", "Malignant", "Indeterminate", ""),
            "diagnosis_3": ("Nevus", "Melanoma, NOS", "Solar or actinic keratosis", ""),
            "patient_id": each("IP_{four}"),
        },
        {"Melanocytic Nevus": (1, 0, 0, None), "Melanoma": (0, 1, 0, None)}
        | {"Solar Or Actinic Keratosis": (0, 0, 1, None)},
        ids=("isic_id", "lesion_id"),
        of_patient=4,
    ),
    "isic 2019": files(  # the classes in one table, the lesions in another
        [f"in/{name}.jpg" for name in ISIC],
        {
            "ISIC_2019_Training_GroundTruth.csv": [
                ["image", *SKIN.split(","), "UNK"],
                *([name, *(float(i % 8 == k) for k in range(8)), 0.0] for i, name in enumerate(ISIC)),
            ],
            "ISIC_2019_Training_Metadata.csv": [
                ["image", "age_approx", "lesion_id", "sex"],
                *([name, "55.0", f"BCN_{i // 3:07}", "female"] for i, name in enumerate(ISIC)),
            ],
        },
        {name: [int(i == k) for i in range(8)] for k, name in enumerate(SKIN_NAMES.split(","))},
        of_patient=3,
        named=("ISIC 2019",),
    ),
    "shenzhen": form(  # one column `label`, whose meaning only the names of the files tell
        "CXR_png/CHNCXR_{i:04}_{y}.png",
        "fname,label",
        "CXR_png/CHNCXR_{i:04}_{y}.png,{y}",
        {"Tuberculosis": (0, 1)},
    ),
    "redcap checkboxes": cells(  # raw: boxes without names, and 0 also in forms that were never filled in
        {"findings___1": (0, 1, 0, 0, 0, 1), "findings___2": (0,), "imaging_complete": (0, 2, 2)},
        {"Findings 1": (None, 1, 0, None, 0, 1), "Findings 2": (None, 0, 0)},
        *('synonyms = { "findings___1" = ', '"findings___2" = '),
        ids=("image_file", "record_id"),
    ),
    "redcap labels": cells(  # the findings in the headers, Checked and Unchecked
        {
            "Findings (choice=Effusion)": ("Checked", "Unchecked"),
            "Findings (choice=Mass)": ("Checked", "Unchecked", "Unchecked"),
            "Complete?": ("Complete", "Complete", "Complete", "Complete", "Unverified", "Incomplete"),
        },
        {"Pleural Effusion": (1, 0, 1, 0, 1, None), "Mass": (1, 0, 0, 1, 0, None)},
        ids=("Image file", "Record ID"),
    ),
    # Names of images
    "other case": form("x/Case{i:03}.PNG", "image,Mass", "case{i:03}.png,{y}"),
    "lost zeros": files(  # a spreadsheet has made 17 and 1,017 of 00000017 and 00001017
        [f"images/{17 + 500 * i:08}.png" for i in range(N)],
        {
            "t.csv": [
                ["image", "Mass"],
                *([f"{17 + 500 * i:{',' if i % 2 else ''}}", i % 2] for i in range(N)),
            ]
        },
    ),
    "numbers with a fraction": form("sub/{i:05}.png", "image,Mass", "{i}.0,{y}"),
    "uids": form(  # whose last number is not a suffix
        "images/1.2.276.{i}.15178.png",
        "SOPInstanceUID,patient,Mass",
        "1.2.276.{i}.15178,{two},{y}",
        of_patient=2,
    ),
    "one name in all folders": form("images/P{i:03}/AP.png", "patient,file,Mass", "P{i:03},AP,{y}"),
    "masks of the same names": form(
        "img/{i:02}.png",
        *("image,Mass", "{i:02}.png,{y}", SICK),
        *each("masks/{i:02}.png"),
        named=("24 files", "masks/00.png"),
    ),
    "masks in class folders": files(
        KINDS,
        {},
        {"Mass": [1] * 12 + [0] * 12},
        *(
            path.replace(".png", f"{end}.png")
            for path in KINDS
            for end in ("_mask", "_mask_1", "-label", "_Maske")
        ),
        *(path.replace("/", "/mask_") for path in KINDS),
        named=("120 files",),
    ),
    "masks with a name of their own": form(
        "HAM_images/ISIC_{i}.jpg",
        *("image,Mass", "ISIC_{i},{y}", SICK),
        *each("HAM_segmentations/ISIC_{i}_segmentation.png"),
        named=("24 files",),
    ),
    "columns of masks and previews": form(
        "data/a{i:02}/0.png",
        *("ROI mask,thumbnail_path,path,Mass", "a{i:02}/m.png,b{i:02}/0.png,a{i:02}/0.png,{y}", SICK),
        *(*each("data/a{i:02}/m.png"), *each("data/b{i:02}/0.png")),
    ),
    "no header": form("img/{i:02}.png", "00.png,p0,0", "{i:02}.png,p{i},{y}", Refused(("t.csv", "00.png"))),
    "two views in a row": form(
        "img/{i:02}f.png",
        *("patient,frontal,lateral,Mass", "p{i},{i:02}f.png,{i:02}l.png,{y}", SICK),
        *each("img/{i:02}l.png"),
        named=("'lateral'", f"{N} other"),
    ),
    "patients in file names": files(  # of NIH: 00000017_003.png is the fourth image of patient 17
        OF_NIH,
        {"t.csv": [["file", "Mass"], *([name, i % 2] for i, name in enumerate(OF_NIH))]},
        of_patient=3,
        named=("'00000017' of '00000017_000.png'", 'patient_column = "file"'),
    ),
    "views in file names": form(  # beside a running number
        "images/patient{two:03}_view{y}.png",
        *("no,file,Mass", "{i},patient{two:03}_view{y}.png,{y}"),
        of_patient=2,
        named=("patient000",),
    ),
    "patients of file names in two splits": files(  # a person has to look whether they are
        OF_NIH,
        {
            "t.csv": [
                ["file", "set", "Mass"],
                *([m, ("train", "test")[i % 2], i % 2] for i, m in enumerate(OF_NIH)),
            ]
        },
        split=("train", "test"),
        named=("two splits",),
    ),
    "addresses of files": form(
        "img/a {i:02}.png", "url,Mass", "file:///D:/PACS%20export/img/a%20{i:02}.png,{y}"
    ),
    "a literal percent sign beside the blank": files(  # two files, and each cell means the one that it spells
        [f"{i // 2:02}{('%20', ' ')[i % 2]}b.png" for i in range(N)],
        {"t.csv": [["file", "Mass"], *([f"{i // 2:02}{('%20', ' ')[i % 2]}b.png", i % 2] for i in range(N))]},
    ),
    "plus signs for blanks": form(
        "img/a {i:02}.png", "image,Mass", "a+{i:02}.png,{y}", Refused(("'a+00.png'", "'a 00.png'"))
    ),
    "names with signs": files(
        [f"img/{name}.png" for name in SIGNS],
        {"t.csv": [["image", "Mass"], *([f"{name}.png", i % 2] for i, name in enumerate(SIGNS))]},
    ),
    "names with outer blanks": files(
        [f"img/{' ' * (i % 3 == 1)}s{i:02}{' ' * (i % 3 == 2)}.png" for i in range(N)],
        {"t.csv": rows("image,Mass", " s{i:02} ,{y}")},
    ),
    "a name that is nearly a file": form(
        "scan{i:02}.png", "file,Mass", "scn_{i:02}.png,{y}", Refused(("'scn_00.png'", "'scan0"))
    ),
    "two images of one name": files(
        NAMES[2:],
        {"t.csv": rows("file,Mass", "{i:02},{y}")},
        SICK,
        *("00.png", "01.png", "00.jpg", "01.jpg"),
        named=("00.jpg", "00.png"),
    ),
    "one name in several folders": files(
        [*each("a/{i:02}.png"), *each("b/{i:02}.png")],
        {"t.csv": rows("file,Mass", "{i:02}.png,{y}")},
        Refused(("'00.png'", "'a/00.png'", "'b/00.png'")),
    ),
    "folders of studies": form(  # a row for each study, and a patient with two
        "dicom/1.2.840.{two}/IM{y}.png",
        *("StudyInstanceUID,PatientID,Mass", "1.2.840.{i},p{two},{y}", {"Mass": (0, 0, 1, 1)}),
        n=N // 2,
        of_patient=4,
    ),
    "numbers of patients and of visits": form(  # folders of both
        "x/{two}/{y}/a.png", "patient_id,Mass", "{i},{y}", {"Mass": (0, 0, 1, 1)}, n=N // 2, of_patient=2
    ),
    "labels by the number of the study": files(
        NAMES,
        {
            "images.csv": rows("file,pid,study", "{i:02}.png,{four},5{two:02}"),
            "labels.csv": rows("pid,study,Mass", "{two},5{i:02},{y}", N // 2),
        },
        {"Mass": (0, 0, 1, 1)},
        of_patient=4,
    ),
    "image and finding in one cell": files(
        NAMES,
        {
            "t.csv": [
                *rows("id,value", "{i:02}.png:Edema,{y}"),
                *([f"{i:02}.png:Mass", 1 - i % 2] for i in range(N)),
                ["01.png:Edema", 1],
            ]
        },
        {"Mass": (1, 0), "Edema": (0, 1)},
    ),
    # Class folders
    "class folders": files(  # of Kaggle
        [
            f"{part}/{kind}/{i}.{suffix}"
            for part, n in (("train", 6), ("val", 3), ("TEST", 3))
            for i, (kind, suffix) in product(range(n), (("NORMAL", "jpeg"), ("PNEUMONIA", "JPEG")))
        ],
        {},
        {"Pneumonia": (0, 1)},
        split=["train"] * 12 + ["validation"] * 6 + ["test"] * 6,
    ),
    "classes above splits": files(
        [f"{('Polyp', 'Ulcer', 'Normal')[i % 3]}/{('training', 'valid')[i % 2]}/{i}.png" for i in range(N)],
        {},
        {"Polyps": (1, 0, 0), "Ulcer": (0, 1, 0)},
        split=["train", "validation"],
    ),
    "folders of classes and patients": files(
        [f"set/{('polyp', 'ulcer')[i // 2 % 2]}/case {i // 2:02}/visit {i % 2}/{i}.png" for i in range(N)],
        {},
        {"Polyps": (1, 1, 0, 0), "Ulcer": (0, 0, 1, 1)},
        of_patient=2,
    ),
    "class folders of other depths": files(
        [f"{('polyp', 'ulcer/new')[i % 2]}/{i}.png" for i in range(N)],
        {},
        {"Polyps": (1, 0), "Ulcer": (0, 1)},
    ),
    "folders of classes in class folders": files(
        [f"{('Tumour/Viral', 'Tumour/Bacterial', 'Mass/Benign', 'Normal')[i % 4]}/{i}.png" for i in range(N)],
        {},
        {"Tumour": (1, 1, 0, 0), "Viral": (1, 0, 0, 0), "Bacterial": (0, 1, 0, 0)}
        | dict.fromkeys(("Mass", "Benign"), (0, 0, 1, 0)),
    ),
    "class folders of numbers": files(each("{three}/{y}/{i}.png"), {}, Refused(("2 levels",))),
    "arrays": files([], {"train.npz": []}, Refused(("train.npz", "PNG"))),
    # Workbooks, JSON and text files
    "titles above two headers": files(  # of a ward: merged groups, a legend, names without their zeros
        each("bilder/{i:06}.png"),
        {
            "Befunde 2023.xlsx": {
                "Befunde": [
                    *(["Klinikum Nord"], [None] * 3 + ["Befunde 2023"]),  # above a blank column
                    ["Bild", "Patient", "Datum", None, "Befunde", None],
                    [None, None, None, None, "Mass", "Edema"],
                    *([i, i // 2, date(2023, 1, 1 + i), None, ("nein", "ja")[i % 2], "ja"] for i in range(N)),
                ],
                "Legende": [["ja", "vorhanden"], ["nein", "nicht vorhanden"]],
            }
        },
        {"Mass": (0, 1), "Edema": (1,)},
        of_patient=2,
    ),
    "a sheet for each year": files(
        IMAGES, {"t.XLSX": {"22": FLAGS[:9], "23": [FLAGS[0], *FLAGS[9:]], "empty": []}}
    ),
    "two sheets of the same images": files(
        IMAGES,
        {
            "t.xlsx": {
                "first": rows("image,Mass", "{i:02}.png,0"),
                "second": FLAGS,
            }
        },
        Refused(("'first'", "'second'")),
    ),
    "datalist of monai": files(  # with its legend
        IMAGES,
        {
            "datalist.json": {
                "labels": {"0": "healthy", "1": "Polyp", "2": "Ulcer"},
                "name": "x",
                "training": [{"image": IMAGES[i], "label": i % 3, "x": None} for i in range(16)],
                "test": [{"image": IMAGES[i], "label": i % 3, "x": None} for i in range(16, N)],
            }
        },
        THREE,
        split=["train"] * 16 + ["test"] * 8,
    ),
    "json of ones and zeros": files(  # a column for each class
        IMAGES,
        {
            "list.json": {
                "labels": {"0": "Mass", "1": "Edema"},
                "train": [{"file": name, "y": [i % 2, 1 - i % 2]} for i, name in enumerate(NAMES)],
            }
        },
        {"Mass": (0, 1), "Edema": (1, 0)},
        split=["train"],
    ),
    "decimal commas": cells(  # a German export: byte order mark, semicolons, a quoted report of two lines
        {
            "Größe": ["1,80"],
            "Mass": ["1,0", "0,0", ""],
            "Text": ["Kein Erguss;\r\nHerz „normal“, sonst o. B."],
        },
        {"Mass": (1, 0, None)},
        ids=("Bilddatei", "Patientennummer"),
        delimiter=";",
        encoding="utf-8-sig",
    ),
    "delimiters at the end": cells(
        {"Mass": (0, 1)}, change=lambda rows: [rows[0], *([*row, "", ""] for row in rows[1:])]
    ),
    "headers with their codes": cells(
        {"Mass\n(0/1)": (0, 1), "Edema (1 = ja, 0 = nein)": (1, 0, 0)}, {"Mass": (0, 1), "Edema": (1, 0, 0)}
    ),
    "reports beside images": cells(
        {"report": each("No effusion, heart normal. Nothing else to be seen. {i}")},
        Refused(("labels.csv", "image, patient, report")),
    ),
    "repeated rows": cells({"Mass": (0, 1)}, change=lambda rows: [*rows, rows[4], rows[4], rows[5]]),
    "sums below": cells(
        {"Mass": (0, 1)},
        SICK,
        *("1 of 25", "'Total'", "row 26"),
        change=lambda rows: [*rows, ["Total", "", 12]],
        unnamed=("repeated = ",),
    ),
    "a header within": cells(
        {"Mass": (0, 1)}, SICK, "'image'", "row 12", change=lambda rows: [*rows[:11], rows[0], *rows[11:]]
    ),
    "units below the header": cells(
        {"Mass": (0, 1)}, SICK, "'-'", "row 2", change=lambda rows: [rows[0], ["-", "id", "0/1"], *rows[1:]]
    ),
    "an end without cells": cells(
        {"Mass": (0, 1)},
        Refused(("labels.csv", "row 26")),
        change=lambda rows: [*rows, ["Exported by the PACS"]],
    ),
    "a title above semicolons": cells({"Mass": (0, 1)}, title="Export, 2024\n", delimiter=";"),
    "lines of titles": cells({"Mass": (0, 1)}, title="Exported 2024\n\n"),
    # Cells
    "mixed words": cells({"Mass": ("POSITIVE", "Negative", "N/A", "neg")}, {"Mass": (1, 0, None, 0)}),
    "one and two": cells({"Mass": (1, 2)}, Refused(("'Mass'", "1, 2", 'values = { "2" = "?" }'))),
    "only ones": cells(  # a blank cell may mean absent, which only a person knows
        {"Mass": ("", "1"), "Edema": ("1", "")},
        {"Mass": (None, 1), "Edema": (1, None)},
        'values = { "" = 0 }',
    ),
    "marks beside blanks": cells({"Mass": ("", "x"), "Edema": ("", "X", "")}, SICK | {"Edema": (0, 1, 0)}),
    "marks where other blanks are unknown": cells(
        {"Mass": ("x", ""), "Edema": ("1", "0", "")}, {"Edema": (1, 0, None)}, "'Mass'"
    ),
    "codes with a legend": files(
        IMAGES,
        {
            "labels.csv": [["image", "label"], *([name, i % 3] for i, name in enumerate(NAMES))],
            "classes.csv": [["7", "unused"], [0, "Normal"], [1, "Polyp"], [2, "Ulcer"]],
        },
        THREE,
    ),
    "codes without a legend": cells(
        {"label": (0, 1, 2)}, Refused(('finding_column = "label"', '"0" = "label 0"', '"2" = "label 2"'))
    ),
    "lists of findings": cells(
        {"findings": ("Mass ; edema", "EDEMA", "No finding", "mass")},
        {"Mass": (1, 0, 0, 1), "Edema": (1, 1, 0, 0)},
    ),
    "lists of numpy": cells(
        {"findings": ("['mass']", "['edema' 'mass']", "['normal']")}, {"Mass": (1, 1, 0), "Edema": (0, 1, 0)}
    ),
    "lists of json": cells(
        {"findings": ('["mass"]', '["edema", "mass"]', "[]", "?")},
        {"Mass": (1, 1, 0, None), "Edema": (0, 1, 0, None)},
        delimiter="\t",
    ),
    "lists without quotes": cells(
        {"findings": ("[mass]", "[edema, mass]", "[No Finding]")}, {"Mass": (1, 1, 0), "Edema": (0, 1, 0)}
    ),
    "commas within names": cells(
        {"dx": ("Melanoma, invasive", "Nevus", "Keratosis, solar")},
        {"Melanoma, Invasive": (1, 0, 0), "Melanocytic Nevus": (0, 1, 0), "Keratosis, Solar": (0, 0, 1)},
    ),
    "shares beside a label": cells({"Edema": each("0.1{i}"), "Mass": (0, 1)}, SICK, "'Edema'", "threshold"),
    "words of an unknown column": cells(
        {"Muster": ("lepidisch", "azinär", "solide"), "Ward": ("A", "B")},
        Refused(('finding_column = "Muster"', '"solide" = "?"'), unnamed=("column 'Ward'",)),
    ),
    "grades": cells(
        {"KL": (0, 1, 2, 3, 4)},
        Refused(('finding_column = "KL"', '"4" = "KL 4"', '"1" = 0, "2" = 1, "3" = 1')),
    ),
    "missing codes": cells(
        {"Mass": (0, 1, 88), "Edema": ("1", "-9", "0"), "Nodule": ("1", "0", ".", "#N/V")},
        {"Mass": (0, 1, None), "Edema": (1, None, 0), "Nodule": (1, 0, None, None)},
        "'-9', '88'",
    ),
    "paths of classes": cells(
        {"finding": ("Lung/Pneumonia/Viral", "Lung/Pneumonia", "No Finding", "Lung/Pneumonia/Viral, Mass")},
        {"Lung": (1, 1, 0, 1), "Pneumonia": (1, 1, 0, 1), "Viral": (1, None, 0, 1), "Mass": (0, 0, 0, 1)},
    ),
    "paths with arrows": cells(
        {"diagnosis": ("Skin > Nevus", "Skin > Melanoma", "Skin")},
        {"Skin": (1,), "Melanocytic Nevus": (1, 0, None), "Melanoma": (0, 1, None)},
    ),
    # Documents in place of images
    "reports": files(
        [],
        {
            "befunde.csv": rows(
                "Auftrag,Patient,Befundtext,Mass", "10{i:02},{two},Kein Rundherd {y}.\nHerz normal {i}.,{y}"
            )
        },
        Meant(each("10{i:02}"), SICK, 2, named=('text_column = "Befundtext"',)),
    ),
    "reports without a name": files(  # nor a patient; in a workbook, with a list of findings
        [],
        {
            "reports.xlsx": {
                "reports": [
                    ["report", "diagnosis", "sex"],
                    *(
                        [
                            f"The heart is of normal size in {i}, and nothing else.",
                            "Edema;Mass"[: 5 + 5 * (i % 2)],
                            "F",
                        ]
                        for i in range(N)
                    ),
                ]
            }
        },
        Meant([str(i + 2) for i in range(N)], {"Edema": (1,), "Mass": (0, 1)}),
    ),
    "reports without their images": files(  # a table of images with a long comment is no study of texts
        [],
        {
            "labels.csv": rows(
                "image,report,Mass", "{i:02}.png,The heart is of normal size and nothing else {i},{y}"
            )
        },
        Refused(("no image",)),
    ),
    # Splits and several tables
    "split words": cells(
        {"Set": ("Training", "Training", "Validate", "Validate", "Testing", "Testing"), "Mass": (0, 1)},
        split=("train", "train", "validation", "validation", "test", "test"),
    ),
    "split flags": cells(  # is_test is no finding, and its images must not be trained on
        {"is_test": (1, 1, 0, 0), "Mass": (0, 1)}, Refused(("'is_test'",))
    ),
    "split folds": cells({"fold": (0, 1, 2, 3), "Mass": (0, 1)}, Refused(("'fold'", "'0', '1', '2', '3'"))),
    "splits of folders": files(
        [f"cxr/{('train', 'val', 'Test')[i % 3]}/{i:02}.png" for i in range(N)],
        {
            "t.csv": [
                ["path", "Mass"],
                *([f"{('train', 'val', 'Test')[i % 3]}/{i:02}.png", i % 2] for i in range(N)),
            ]
        },
        split=("train", "validation", "test"),
    ),
    "a table for each split": parts(
        {"my_train": range(12), "dev-set": range(12, 16), "test": range(16, N)},
        Meant(IMAGES, SICK, 2, ["train"] * 12 + ["validation"] * 4 + ["test"] * 8),
    ),
    "a table for each ward": parts(
        {"ward_a": range(12), "ward_b": range(12, N)},
        Meant(IMAGES, SICK, 2, named=("ward_a.csv", "ward_b.csv")),
    ),
    "a table kept apart": parts(  # nothing says that it is for training too
        {"labels": range(16), "holdout": range(16, N)}, Refused(("holdout.csv and labels.csv",))
    ),
    "two versions": parts(  # one of them may be out of date
        {"labels": range(N), "labels (1)": range(N)}, Refused(("labels (1).csv and labels.csv",))
    ),
    "columns that differ": files(
        IMAGES,
        {
            "y.csv": rows("image,Mass", "{i:02},{y}"),
            "meta.csv": rows("image,subject_id,Mass", "{i:02}.png,{four},1"),
        },
        Refused(("'Mass'",)),
    ),
    # Encodings and languages
    **{  # that cannot be told from the bytes of a table
        f"table in {encoding}": cells(
            {finding: (0, 1)},
            Refused(("labels.csv row 1", "UTF-8")),
            ids=(image, "patient"),
            encoding=encoding,
        )
        for encoding, image, finding in (
            ("shift_jis", "画像", "胸水"),
            ("cp1251", "файл", "плеврит"),
        )
    },
    "czech of windows": cells(  # cp1250 reads as cp1252: a word is shown, so that a person sees it
        {"Zvětšení": (0, 1)}, {"Zvìtšení": (0, 1)}, "cp1252", "'Zvìtšení'", "row 1", encoding="cp1250"
    ),
    **{
        f"in {language}": cells(
            {"Mass": words[2:4]}, {"Mass": (1, 0)}, ids=words[:2], delimiter=";", encoding=encoding
        )
        for language, encoding, *words in (
            ("German", "cp1252", "Bilddatei", "Pat.-Nr.", "Ja", "Nein"),
            ("French", "cp1252", "fichier", "N° patient", "oui", "non"),
            ("Spanish", "latin-1", "archivo", "paciente", "Sí", "No"),
            ("Italian", "utf-8", "immagine", "ID paziente", "sì", "no"),
            ("Portuguese", "utf-8", "imagem", "Paciente", "Sim", "Não"),
            ("Dutch", "utf-8", "afbeelding", "Patiëntnummer", "ja", "nee"),
            ("Polish", "utf-8", "plik", "pacjent", "TAK", "NIE"),
            ("Czech", "utf-8", "soubor", "číslo pacienta", "ano", "ne"),
            ("Turkish", "utf-8", "dosya", "hasta no", "evet", "hayır"),
            ("Russian", "utf-8", "файл", "пациент", "да", "нет"),
            ("Greek", "utf-8", "αρχείο", "ασθενής", "ναι", "όχι"),
            ("Finnish", "utf-8", "tiedosto", "potilas", "kyllä", "ei"),
            ("Hungarian", "utf-8", "fájl", "beteg", "igen", "nem"),
            ("Japanese", "utf-8", "画像", "患者ID", "有", "無"),
            ("Chinese", "utf-8", "图像", "病人编号", "是", "否"),
            ("Korean", "utf-8", "영상", "환자번호", "예", "아니오"),
        )
    },
}


# What is more than images and tables


def case(write: Case) -> Case:
    """Add a case under the name of its function."""
    CASES[write.__name__.replace("_", " ")] = write
    return write


@case
def chexpert(folder: Path) -> Meant:
    """train.csv and valid.csv; patients in the paths, which begin with the name of the archive."""
    images: list[str] = []
    for part, start, n in (("train", 0, 16), ("valid", 500, 8)):
        lines = rows("Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Cardiomegaly,Edema", "", 0)
        for i in range(n):
            view = f"study{i % 2 + 1}/view{i % 4 // 2 + 1}_frontal.jpg"
            found = [("1.0", "0.0", "-1.0", "")[(len(images) + k) % 4] for k in range(3)]
            images.append(f"{part}/patient{start + i // 4:05}/{view}")
            lines.append(
                [
                    f"CheXpert-v1.0-small/{images[-1]}",
                    "Female",
                    68,
                    ("Frontal", "Lateral")[i % 2],
                    "AP",
                    *found,
                ]
            )
        write_table(folder / f"{part}.csv", lines)
    pngs(folder, images)
    labels = {"Cardiomegaly": (0, None, None, 1), "Edema": (None, None, 1, 0)}
    return Meant(images, labels, 4, ["train"] * 16 + ["validation"] * 8, ('split = "patients"',))


@case
def links(folder: Path) -> Meant:
    """Images that are links into another disk, as of DVC and git-annex."""
    meant = CASES["lines of titles"](folder)
    (folder / "img").rename(folder.parent / "annex")
    (folder / "img").mkdir()
    for name in NAMES:
        (folder / "img" / name).symlink_to(folder.parent / "annex" / name)
    return replace(meant, named=(f"{N} of {N}", "follow_links = true"))  # type: ignore[return-value]


@case
def a_zip_of_images(folder: Path) -> Refused:
    """The images are still packed."""
    CASES["lines of titles"](folder)
    with zipfile.ZipFile(folder / "images.zip", "w") as packed:
        for path in sorted((folder / "img").iterdir()):
            packed.write(path, path.name)
            path.unlink()
    return Refused(("no image", "images.zip"))


@case
def a_tar_of_images(folder: Path) -> Outcome:
    """The images are in a tar, which is read as it is."""
    meant = CASES["lines of titles"](folder)
    with tarfile.open(folder / "images.tar", "w") as packed:
        for path in sorted((folder / "img").iterdir()):
            packed.add(path, path.name)
            path.unlink()
    return replace(meant, images=each("images.tar/{i:02}.png"))  # type: ignore[call-arg]


@case
def an_old_workbook(folder: Path) -> Refused:
    """A table of a kind that is not read."""
    pngs(folder / "img", NAMES)
    (folder / "Befunde.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    return Refused(("Befunde.xls", ".xlsx", ".csv"))


@case
def patients_in_another_table(folder: Path) -> Meant:
    """Labels in one table, patients in another of another form, joined by the image."""
    pngs(folder, IMAGES)
    write_table(folder / "y.csv", rows("Mass,img", "{y},{i:02}"), ";")
    meta = rows("name,subject_id", "{i:02}.png,s{three}")
    write_table(folder / "meta.tsv", [meta[0], *meta[:0:-1]], "\t", "utf-16")
    return Meant(IMAGES, SICK, 3)


@case
def two_encodings_in_one_table(folder: Path) -> Refused:
    """A header in UTF-8, and rows of Windows that were appended: one of both would have wrong letters."""
    cells({"Vergrößerung": (0, 1), "Name": ["Müller"]}, {})(folder)
    lines = (folder / "labels.csv").read_bytes().split(b"\n")
    lines[9] = lines[9].decode().encode("cp1252")
    (folder / "labels.csv").write_bytes(b"\n".join(lines))
    return Refused(("labels.csv row 1", "UTF-8"))


@case
def studies_of_dicom_headers(folder: Path) -> Meant:
    """The table names studies by a UID that only the headers state; the patient too."""
    images = [f"CD/{i // 4}/{i:04}" for i in range(N)]
    for i, image in enumerate(images):
        pixels = np.arange(i, i + 64, dtype=np.uint8).reshape(8, 8)
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        data = dicom(pixels, PatientID=f"P{i // 4}", StudyInstanceUID=f"1.2.{i // 2}")
        (folder / image).write_bytes(data)
    write_table(folder / "t.csv", rows("study,Mass", "1.2.{i},{y}", N // 2))
    return Meant(images, {"Mass": (0, 0, 1, 1)}, 4)
