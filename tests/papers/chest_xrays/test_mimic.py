"""suture_papers.chest_xrays.mimic: small files of the official formats."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.chest_xrays.mimic import CXR_LT, MimicConfig
from suture_papers.chest_xrays.nih import LABELS as NIH

METADATA = """dicom_id,subject_id,study_id,PerformedProcedureStepDescription,ViewPosition,Rows,Columns
a1-f,10000032,50414267,CHEST (PA AND LAT),PA,3056,2544
a1-l,10000032,50414267,CHEST (PA AND LAT),LATERAL,3056,2544
a2-f,10000032,53189527,CHEST (PORTABLE AP),AP,2705,2539
b1-f,11000764,50771383,,AP,2705,2539
c1-f,12000980,57861150,,AP,2705,2539
"""
FOURTEEN = sorted([*SPELLINGS, "No Finding"])


def study(subject: str, number: str, **labels: str) -> str:
    cells = (labels.get(name.replace(" ", "_"), "") for name in FOURTEEN)
    return f"{subject},{number}," + ",".join(cells) + "\n"


STUDIES = (
    study("10000032", "50414267", No_Finding="1.0"),
    study("10000032", "53189527", Edema="1.0", Pneumonia="-1.0"),
    study("11000764", "50771383", Fracture="1.0", Edema="0.0"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mimic-cxr-2.0.0-metadata.csv").write_text(METADATA)
    header = f"subject_id,study_id,{','.join(FOURTEEN)}\n"
    (tmp_path / "mimic-cxr-2.0.0-chexpert.csv").write_text(header + "".join(STUDIES))
    (tmp_path / "mimic-cxr-2.0.0-split.csv").write_text(
        "dicom_id,study_id,subject_id,split\na1-f,50414267,10000032,train\na1-l,50414267,10000032,train\n"
        "a2-f,53189527,10000032,train\nb1-f,50771383,11000764,validate\nc1-f,57861150,12000980,test\n"
    )
    names = sorted([*CXR_LT, "No Finding"])
    rows = [
        ("a1-f", "10000032", "50414267", {"Hernia"}),
        ("a1-l", "10000032", "50414267", {"Hernia"}),
        ("b1-f", "11000764", "50771383", {"Mass", "Tortuous Aorta"}),
    ]
    lines = [f"dicom_id,subject_id,study_id,fpath,{','.join(names)}"]
    for dicom, subject, number, found in rows:
        lines.append(f"{dicom},{subject},{number},x.jpg," + ",".join(str(int(n in found)) for n in names))
    (tmp_path / "cxr-lt.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def config(root: Path, table: str = "mimic-cxr-2.0.0-chexpert.csv", **more: Any) -> MimicConfig:
    return MimicConfig(root=root, table=root / table, **more)


def positives(table: Any) -> list[set[str]]:
    return [{name for name, v in zip(table.labels, row, strict=True) if v == 1} for row in table.y]


def test_labels_of_a_study_go_to_its_frontal_images(root: Path) -> None:
    table = load_table(config(root))
    assert table.labels == CHEXPERT
    assert table.images == (
        "files/p10/p10000032/s50414267/a1-f.jpg",
        "files/p10/p10000032/s53189527/a2-f.jpg",
        "files/p11/p11000764/s50771383/b1-f.jpg",
    )  # study 57861150 has no labels, as a few of MIMIC have none
    assert table.patients == ("10000032", "10000032", "11000764")
    assert positives(table) == [set(), {"Edema"}, {"Fracture"}]
    assert set(table.split) == {"test"}
    every = load_table(config(root, views="all"))
    assert [Path(name).stem for name in every.images] == ["a1-f", "a1-l", "a2-f", "b1-f"]


@pytest.mark.parametrize(("rule", "value"), [("zeros", 0.0), ("ones", 1.0), ("ignore", np.nan)])
def test_what_uncertain_means(root: Path, rule: str, value: float) -> None:
    y = load_table(config(root, uncertain=rule)).y
    np.testing.assert_equal(float(y[1, CHEXPERT.names.index("Pneumonia")]), value)


def test_cxr_lt_knows_the_twenty_findings_of_nih_and_chexpert(root: Path) -> None:
    table = load_table(config(root, "cxr-lt.csv"))
    assert len(table.labels) == 25
    twenty = {*NIH, *CHEXPERT}
    assert len(twenty) == 20
    assert twenty <= set(table.labels)
    assert [Path(name).stem for name in table.images] == ["a1-f", "b1-f"]
    assert positives(table) == [{"Hernia"}, {"Mass", "Tortuous Aorta"}]
    narrow = load_table(config(root, "cxr-lt.csv", labels=("Mass", "Hernia")))
    assert narrow.labels == LabelSet(("Mass", "Hernia"))
    with pytest.raises(ConfigError, match="did you mean 'Mass'"):
        load_table(config(root, "cxr-lt.csv", labels=("Mas",)))


def test_cxr_lt_with_a_view_of_its_own_needs_no_metadata(root: Path) -> None:
    path = root / "cxr-lt.csv"
    lines = path.read_text().splitlines()
    views = ["ViewPosition", "PA", "LATERAL", "LL"]
    path.write_text("".join(f"{line},{view}\n" for line, view in zip(lines, views, strict=True)))
    (root / "mimic-cxr-2.0.0-metadata.csv").unlink()
    assert len(load_table(config(root, "cxr-lt.csv"))) == 1
    assert len(load_table(config(root, "cxr-lt.csv", views="all"))) == 3


def test_tables_may_be_gzipped_and_lie_elsewhere(root: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    plain = root / "mimic-cxr-2.0.0-metadata.csv"
    (lists / f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with pytest.raises(DataError, match=r"metadata\.csv is missing; set \[data\] lists"):
        load_table(config(root))
    assert len(load_table(config(root, lists=lists))) == 3


def test_splits(root: Path) -> None:
    assert load_table(config(root, split="official")).split == ("train", "train", "validation")
    by_patient = load_table(config(root, split="patients"))
    assert len({*zip(by_patient.patients, by_patient.split, strict=True)}) == 2
    path = root / "mimic-cxr-2.0.0-split.csv"
    path.write_text(path.read_text().replace("validate", "valid"))
    with pytest.raises(DataError, match="row 5: the split must be one of train, validate, test"):
        load_table(config(root, split="official"))
    path.write_text("\n".join(path.read_text().replace("valid,", "x,").splitlines()[:4]))
    faults = read_table(config(root, split="official")).faults
    assert any("row 5: an image that is missing from mimic-cxr-2.0.0-split.csv" in fault for fault in faults)


def test_faults_name_their_rows(root: Path) -> None:
    path = root / "mimic-cxr-2.0.0-chexpert.csv"
    path.write_text(path.read_text().replace("1.0", "yes", 1) + study("13000000", "59999999", Edema="1.0"))
    faults = read_table(config(root)).faults
    assert len(faults) == 1  # the first "1.0" is of "No Finding", which is no class
    assert "row 5: a study without an image" in faults[0]
    path.write_text(path.read_text() + study("10000032", "50414267", Hernia="1.0"))
    assert any("row 6: a repeated study" in f for f in read_table(config(root)).faults)
    path.write_text(path.read_text().replace("11000764,", "11000765,"))
    assert any("rows 4, 5: a study without an image" in f for f in read_table(config(root)).faults)
    path.write_text(path.read_text().replace("1.0", "maybe", 1))
    assert any("row 3: 'Edema' is not one of" in fault for fault in read_table(config(root)).faults)


def test_faults_of_cxr_lt_name_their_rows(root: Path) -> None:
    path = root / "cxr-lt.csv"
    whole = path.read_text()
    path.write_text(whole.replace("b1-f", "z9-f"))
    (fault,) = read_table(config(root, "cxr-lt.csv")).faults
    assert fault.startswith(f"{path} row 4: ")
    assert "mimic-cxr-2.0.0-metadata.csv" in fault
    path.write_text(whole.replace("b1-f", ""))
    faults = read_table(config(root, "cxr-lt.csv", views="all")).faults
    assert any("row 4: the image name" in fault for fault in faults)
    path.write_text(whole.replace(",1,", ",-1,", 1))
    assert any(
        "row 2: 'Hernia' is not one of 1 and 0" in f for f in read_table(config(root, "cxr-lt.csv")).faults
    )
    path.write_text(whole.replace("Mass", "Masss"))
    with pytest.raises(DataError, match="a column 'Masss'; did you mean 'Mass'"):
        load_table(config(root, "cxr-lt.csv"))


def test_tables_that_are_something_else(root: Path) -> None:
    (root / "other.csv").write_text("dicom_id,subject_id,study_id,Age\na1-f,10000032,50414267,60\n")
    with pytest.raises(DataError, match="no class of CXR-LT"):
        load_table(config(root, "other.csv"))
    metadata = root / "mimic-cxr-2.0.0-metadata.csv"
    metadata.write_text(metadata.read_text().replace(",PA,", ",LL,").replace(",AP,", ",LL,"))
    with pytest.raises(DataError, match="no frontal image"):
        load_table(config(root))
    metadata.write_text(metadata.read_text().splitlines()[0] + "\nx,9,9,,PA,1,1\n")
    with pytest.raises(DataError, match="none of the metadata's images"):
        load_table(config(root, views="all"))
    (root / "bare.csv").write_text("subject_id,study_id,Edema\n1,1,1\n")
    with pytest.raises(DataError, match="has no column 'Enlarged Cardiomediastinum'"):
        load_table(config(root, "bare.csv"))
