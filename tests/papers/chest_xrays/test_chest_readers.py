"""The readers of NIH ChestX-ray14, CheXpert and MIMIC-CXR-JPG: small files of the official formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from public_tables import at_fault, change, moved, present, sizes
from suture.core.errors import ConfigError, DataError, LabelError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.chexpert import SPELLINGS, ChexpertConfig
from suture_papers.chest_xrays.mimic import CXR_LT, METADATA, SPLIT, MimicConfig
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.chest_xrays.nih import NihConfig
from world import refused, write_table

UNCERTAIN = pytest.mark.parametrize(("rule", "value"), [("zeros", 0.0), ("ones", 1.0), ("ignore", np.nan)])


# NIH

V2020 = ["Image Index", "Finding Labels", "Follow-up #", "Patient ID", "OriginalImage[Width", "Height]"]
ROWS = (
    ("00000001_000.png", "Cardiomegaly", "1"),
    ("00000001_001.png", "Cardiomegaly|Effusion", "1"),
    ("00000002_000.png", "No Finding", "2"),
    ("00000003_000.png", "Pleural_Thickening", "3"),
)


def nih(folder: Path, rows: Any = ROWS, more: tuple[str, ...] = (), **settings: Any) -> NihConfig:
    """The table of the version of 2020, or with one more and empty column at the end."""
    lines = [[image, found, 0, who, 2682, 2749, *more] for image, found, who in rows]
    table = write_table(folder / "Data_Entry_2017.csv", [[*V2020, *more], *lines])
    return NihConfig(root=folder, table=table, **{"split": "patients", **settings})


@pytest.mark.parametrize("more", [(), ("",)])
def test_both_headers_of_nih_are_read(tmp_path: Path, more: tuple[str, ...]) -> None:
    table = load_table(nih(tmp_path, more=more))
    assert table.images[1] == "00000001_001.png"
    assert table.patients == ("1", "1", "2", "3")
    expected = [{"Cardiomegaly"}, {"Cardiomegaly", "Pleural Effusion"}, set(), {"Pleural Thickening"}]
    assert present(table) == expected
    assert not np.isnan(table.y).any()


def test_a_site_may_annotate_some_classes(tmp_path: Path) -> None:
    table = load_table(nih(tmp_path, labels=("Effusion", "Cardiomegaly")))
    assert table.labels.names == ("Pleural Effusion", "Cardiomegaly")
    assert table.y.tolist() == [[0, 1], [1, 1], [0, 0], [0, 0]]
    with refused("Effusion", "Pleural Effusion", by=LabelError):
        load_table(nih(tmp_path, labels=("Effusion", "Pleural Effusion")))
    with refused("Cardiomegally", "'Cardiomegaly'", by=ConfigError):
        load_table(nih(tmp_path, labels=("Cardiomegally",)))


def test_unknown_words_of_nih_and_a_contradiction_are_faults(tmp_path: Path) -> None:
    config = nih(tmp_path, (*ROWS, ("4.png", "Efusion|Mass", "4"), ("5.png", "No Finding|Mass", "5")))
    assert at_fault(config) == ["Data_Entry_2017.csv row 6", "Data_Entry_2017.csv row 7"]
    assert np.isnan(read_table(config).table.y[4:]).all()
    with refused("'Efusion'", "'Effusion'", by=DataError):
        load_table(config)
    config.table.write_text("image\n1\n")
    with refused(config.table, "Image Index", by=DataError):
        load_table(config)


def test_the_official_lists_decide_and_a_patient_stays_together(tmp_path: Path) -> None:
    rows = [(f"{p:03d}_{i}.png", ("No Finding", "Mass")[p % 2], str(p)) for p in range(100) for i in (0, 1)]
    config = nih(tmp_path, rows, split="official")
    with refused("train_val_list.txt", "lists", by=DataError):
        load_table(config)
    (tmp_path / "train_val_list.txt").write_text("".join(f"{i}\n" for i, _, p in rows if int(p) < 80))
    (tmp_path / "test_list.txt").write_text("".join(f"{i}\r\n" for i, _, p in rows if int(p) >= 80))
    lists = moved(tmp_path / "test_list.txt", tmp_path)
    table = load_table(config)
    assert sizes(table) == [140, 20, 40]
    assert set(table.split[160:]) == {"test"}
    assert table.split[0::2] == table.split[1::2]
    assert load_table(config.model_copy(update={"seed": 1})).split != table.split
    (tmp_path / "train_val_list.txt").write_text(rows[0][0])
    assert at_fault(config.model_copy(update={"lists": lists}))[0].startswith("Data_Entry_2017.csv rows 3, 4")


# CheXpert


def chexpert_rows(patient: int, view: str = "frontal", folder: str = "train", **labels: str) -> list[str]:
    path = f"CheXpert-v1.0-small/{folder}/patient{patient:05}/study1/view1_{view}.jpg"
    return [path, view.capitalize(), *(labels.get(name.replace(" ", "_"), "") for name in SPELLINGS)]


def chexpert(folder: Path, **settings: Any) -> ChexpertConfig:
    head = ["Path", "Frontal/Lateral", *SPELLINGS]
    first = chexpert_rows(1, Edema="1.0", Lung_Opacity="-1.0")
    others = chexpert_rows(1, "lateral"), chexpert_rows(2, Edema="0.0"), chexpert_rows(3, Fracture="1.0")
    write_table(folder / "valid.csv", [head, chexpert_rows(64541, folder="valid", Edema="1.0")])
    table = write_table(folder / "train.csv", [head, first, *others])
    return ChexpertConfig(root=folder, table=table, **settings)


def test_frontal_images_of_chexpert_with_blank_as_absent(tmp_path: Path) -> None:
    table = load_table(chexpert(tmp_path))
    assert table.images[0] == "train/patient00001/study1/view1_frontal.jpg"
    assert table.patients == ("patient00001", "patient00002", "patient00003")
    assert present(table) == [{"Edema"}, set(), {"Fracture"}]
    assert not np.isnan(table.y).any()
    every = load_table(chexpert(tmp_path, views="all"))
    assert every.patients[:2] == ("patient00001",) * 2
    assert every.split[0] == every.split[1]


@UNCERTAIN
def test_what_uncertain_means_in_chexpert(tmp_path: Path, rule: str, value: float) -> None:
    y, opacity = load_table(chexpert(tmp_path, uncertain=rule)).y, CHEXPERT.names.index("Lung Opacity")
    np.testing.assert_equal(float(y[0, opacity]), value)
    assert not np.isnan(np.delete(y, opacity, axis=1)).any()


def test_the_official_split_of_chexpert_tests_on_valid_csv(tmp_path: Path) -> None:
    config = chexpert(tmp_path, split="official")
    table = load_table(config)
    assert table.of("test").images == ("valid/patient64541/study1/view1_frontal.jpg",)
    assert "test" not in table.split[:-1]
    change(tmp_path / "valid.csv", "patient64541", "patient00001")
    assert at_fault(config) == ["valid.csv row 2"]
    with pytest.raises(DataError) as caught:
        load_table(config)
    assert "patient00001" not in str(caught.value)
    (tmp_path / "valid.csv").unlink()
    with refused("valid.csv", by=DataError):
        load_table(config)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (",1.0", ",yes", ("train.csv row 2", "Edema")),
        ("Fracture", "Fractures", ("train.csv", "'Fracture'", "'Fractures'")),
        ("", "", ("train.csv", 'views = "all"')),
    ],
)
def test_faults_of_chexpert_are_named(tmp_path: Path, before: str, after: str, named: Any) -> None:
    config = chexpert(tmp_path)
    change(config.table, before, after)
    if not before:
        config.table.write_text(config.table.read_text().replace(",Frontal,", ",Lateral,"))
    with refused(*named, by=DataError):
        load_table(config)


# MIMIC

STUDIES: dict[tuple[str, str], dict[str, str]] = {
    ("10000032", "50414267"): {"No Finding": "1.0"},
    ("10000032", "53189527"): {"Edema": "1.0", "Pneumonia": "-1.0"},
    ("11000764", "50771383"): {"Fracture": "1.0", "Edema": "0.0"},
}
IMAGES = [
    ("a1-f", "10000032", "50414267", "PA", "train"),
    ("a1-l", "10000032", "50414267", "LATERAL", "train"),
    ("a2-f", "10000032", "53189527", "AP", "train"),
    ("b1-f", "11000764", "50771383", "AP", "validate"),
    ("c1-f", "12000980", "57861150", "AP", "test"),
]
OF_IMAGES = {"a1-f": {"Hernia"}, "a1-l": {"Hernia"}, "b1-f": {"Mass", "Tortuous Aorta"}}
STUDIES_CSV, LT = "mimic-cxr-2.0.0-chexpert.csv", "cxr-lt.csv"


@pytest.fixture
def mimic(tmp_path: Path) -> Path:
    fourteen, many = sorted([*SPELLINGS, "No Finding"]), sorted([*CXR_LT, "No Finding"])
    studies = [[*who, *(found.get(name, "") for name in fourteen)] for who, found in STUDIES.items()]
    write_table(tmp_path / STUDIES_CSV, [["subject_id", "study_id", *fourteen], *studies])
    head = ["dicom_id", "subject_id", "study_id"]
    write_table(tmp_path / METADATA, [[*head, "ViewPosition"], *(row[:4] for row in IMAGES)])
    write_table(tmp_path / SPLIT, [["dicom_id", "split"], *((row[0], row[4]) for row in IMAGES)])
    rows = [[*row[:3], *(int(n in OF_IMAGES[row[0]]) for n in many)] for row in IMAGES if row[0] in OF_IMAGES]
    write_table(tmp_path / LT, [[*head, *many], *rows])
    return tmp_path


def of(root: Path, table: str = STUDIES_CSV, **settings: Any) -> MimicConfig:
    return MimicConfig(root=root, table=root / table, **settings)


def test_labels_of_a_study_go_to_its_frontal_images(mimic: Path) -> None:
    table = load_table(of(mimic))
    assert table.labels == CHEXPERT
    assert table.images == (
        "files/p10/p10000032/s50414267/a1-f.jpg",
        "files/p10/p10000032/s53189527/a2-f.jpg",
        "files/p11/p11000764/s50771383/b1-f.jpg",
    )  # study 57861150 has no labels, as a few of MIMIC have none
    assert table.patients == ("10000032", "10000032", "11000764")
    assert present(table) == [set(), {"Edema"}, {"Fracture"}]
    assert set(table.split) == {"test"}
    every = load_table(of(mimic, views="all"))
    assert [Path(name).stem for name in every.images] == ["a1-f", "a1-l", "a2-f", "b1-f"]


def test_cxr_lt_knows_the_twenty_findings_of_nih_and_chexpert(mimic: Path) -> None:
    table = load_table(of(mimic, LT))
    assert len(table.labels) == 25
    assert len({*NIH, *CHEXPERT}) == 20
    assert {*NIH, *CHEXPERT} <= set(table.labels)
    assert [Path(name).stem for name in table.images] == ["a1-f", "b1-f"]
    assert present(table) == [{"Hernia"}, {"Mass", "Tortuous Aorta"}]


def test_cxr_lt_with_a_view_of_its_own_needs_no_metadata(mimic: Path) -> None:
    lines = (mimic / LT).read_text().splitlines()
    views = ["ViewPosition", "PA", "LATERAL", "LL"]
    (mimic / LT).write_text("".join(f"{line},{view}\n" for line, view in zip(lines, views, strict=True)))
    (mimic / METADATA).unlink()
    assert [len(load_table(of(mimic, LT, views=views))) for views in ("frontal", "all")] == [1, 3]


def test_tables_of_mimic_may_be_gzipped_and_lie_elsewhere(mimic: Path) -> None:
    lists = moved(mimic / METADATA, mimic / "lists")
    with refused(METADATA, "[data] lists", by=DataError):
        load_table(of(mimic))
    assert len(load_table(of(mimic, lists=lists))) == 3


def test_splits_of_mimic(mimic: Path) -> None:
    assert load_table(of(mimic, split="official")).split == ("train", "train", "validation")
    drawn = load_table(of(mimic, split="patients"))
    assert len({*zip(drawn.patients, drawn.split, strict=True)}) == 2
    change(mimic / SPLIT, "b1-f", "x")
    assert at_fault(of(mimic, split="official")) == [f"{METADATA} row 5"]
    change(mimic / SPLIT, "validate", "valid")
    with refused(f"{SPLIT} row 5", by=DataError):
        load_table(of(mimic, split="official"))


OF_IMAGE = ["dicom_id", "subject_id", "study_id"]
A1 = ["a1-f", "10000032", "50414267"]


@pytest.mark.parametrize(
    ("file", "rows", "views", "named"),
    [
        ("other.csv", [[*OF_IMAGE, "Age"], [*A1, 60]], "frontal", ["CXR-LT"]),
        ("near.csv", [[*OF_IMAGE, "Masss"], [*A1, 1]], "frontal", ["'Masss'", "'Mass'"]),
        ("bare.csv", [["subject_id", "study_id", "Edema"], [1, 1, 1]], "frontal", SPELLINGS[:1]),
        (METADATA, [[*OF_IMAGE, "ViewPosition"], [*A1, "LL"]], "frontal", ["frontal"]),
        (METADATA, [[*OF_IMAGE, "ViewPosition"], ["x", 9, 9, "PA"]], "all", ["metadata"]),
    ],
)
def test_tables_that_are_something_else_than_mimic(
    mimic: Path, file: str, rows: list[list[object]], views: str, named: list[str]
) -> None:
    write_table(mimic / file, rows)
    table = STUDIES_CSV if file == METADATA else file
    with refused(table, *named, by=DataError):
        load_table(of(mimic, table, views=views))
