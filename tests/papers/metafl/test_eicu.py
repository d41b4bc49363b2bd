"""suture_papers.metafl.eicu: stays in intensive care as text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture_papers.metafl.eicu import EicuConfig

PATIENT = """patientunitstayid,apacheadmissiondx,uniquepid
1,"Sepsis, pulmonary",A
2,"CHF, congestive heart failure",A
3,"Pneumonias, bacterial",B
4,,C
5,"CVA, cerebrovascular accident/stroke",D
"""
TABLES = {
    "admissionDrug": "patientunitstayid,drugname\n1,LASIX          oral\n1,LASIX\n2,ASPIRIN\n3, \n",
    "pastHistory": (
        "patientunitstayid,pasthistorypath\n"
        "1,notes/Past History/Organ Systems/Cardiovascular (R)/Congestive Heart Failure/CHF\n"
        "1,notes/Past History/Past History Obtain Options/Performed\n"
        "4,notes/Past History/Past History Obtain Options/No Health Problems\n"
    ),
    "medication": 'patientunitstayid,drugname\n3,"HEPARIN, 5 ML"\n1,MORPHINE\n',
    "admissionDx": (
        "patientunitstayid,admitdxpath\n"
        "1,admission diagnosis|Sepsis\n1,admission diagnosis|Respiratory\n"
        "1,admission diagnosis|Sepsis\n5,CVA\n"
    ),
    "diagnosis": (
        "patientunitstayid,diagnosisstring\n"
        "1,pulmonary|respiratory failure|ARDS\n"
        "1,pulmonary|respiratory failure\n2,renal|disorder of kidney|x\n"
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, text in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    path = tmp_path / "patient.csv"
    path.write_text(PATIENT)
    return path


def config(path: Path, **more: Any) -> EicuConfig:
    return EicuConfig(table=path, **more)


def test_drugs_history_and_medication_are_the_document(path: Path) -> None:
    reading = read_table(config(path))
    table = reading.table
    assert table.images == ("1", "2", "3", "4")
    assert table.texts == (
        "LASIX , Congestive Heart Failure CHF , MORPHINE",
        "ASPIRIN",
        "HEPARIN, 5 ML",
        "No Health Problems",
    )
    assert reading.absent == 1
    assert table.patients == ("A", "A", "B", "C")
    assert table.split[0] == table.split[1]


def test_labels_are_the_exact_parts_of_the_diagnosis_that_occur(path: Path) -> None:
    table = load_table(config(path))
    nan = np.nan
    assert table.labels.names == ("CHF", "CVA", "Pulmonary", "Sepsis")
    # "Pneumonias" is not among the words; of the fourth stay no diagnosis is known.
    np.testing.assert_array_equal(table.y, [[0, 0, 1, 1], [1, 0, 0, 0], [0] * 4, [nan] * 4])
    assert load_table(config(path, labels=("sepsis",))).labels.names == ("Sepsis",)
    with pytest.raises(ConfigError, match=r"'Sepsys'; did you mean 'Sepsis'"):
        load_table(config(path, labels=("Sepsys",)))


def test_labels_may_be_groups_of_diagnoses(path: Path) -> None:
    names = ("Pulmonary: Respiratory Failure", "renal: disorder of kidney")
    table = load_table(config(path, labels_from="diagnosis", labels=names))
    np.testing.assert_array_equal(table.y, [[1, 0], [0, 1], [np.nan] * 2, [np.nan] * 2])
    with pytest.raises(DataError, match=r"no label .*100 rows"):
        load_table(config(path, labels_from="diagnosis"))


def test_what_names_the_label_is_read_only_where_it_is_asked_for(path: Path) -> None:
    said = "admission diagnosis|Sepsis , admission diagnosis|Respiratory"
    assert not any("Sepsis" in text for text in load_table(config(path)).texts or ())
    table = load_table(config(path, leaking_text=True))
    assert table.texts is not None
    assert table.texts[0] == f"LASIX , Congestive Heart Failure CHF , MORPHINE , {said}"
    assert table.texts[4] == "CVA"


def test_the_documents_of_the_paper_are_drugs_and_the_admission_diagnosis(path: Path) -> None:
    for unread in ("medication", "pastHistory"):
        (path.parent / f"{unread}.csv").unlink()
    table = load_table(config(path, texts=("admissionDrug",), leaking_text=True))
    both = "LASIX , admission diagnosis|Sepsis , admission diagnosis|Respiratory"
    assert table.texts == (both, "ASPIRIN", "CVA")
    assert load_table(config(path, texts=("admissionDrug",))).texts == ("LASIX", "ASPIRIN")


def test_tables_under_other_names_and_in_another_folder(path: Path, tmp_path: Path) -> None:
    texts = load_table(config(path)).texts
    lists = tmp_path / "lists"
    lists.mkdir()
    for name, text in TABLES.items():
        (tmp_path / f"{name}.csv").unlink()
        (lists / f"{name}.csv".replace("Drug", "drug")).with_suffix(".csv.gz").write_bytes(
            gzip.compress(text.encode())
        )
    with pytest.raises(DataError, match=r"admissionDrug\.csv .*is missing.*set \[data\] lists"):
        load_table(config(path))
    assert load_table(config(path, lists=lists)).texts == texts


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("medication", "patientunitstayid,drug\n1,x\n", "no column 'drugname'"),
        (
            "medication",
            "patientunitstayid,drugname\n1,x\n2\n",
            r"medication\.csv row 3 has 1 cells where the header",
        ),
        ("medication", "patientunitstayid,drugname\n1,\xff\n", "not UTF-8"),
        ("patient", PATIENT.replace("\n2,", "\n1,"), "row 3: a repeated document"),
        ("patient", PATIENT.replace(",B", ","), "row 4: the patient is blank"),
    ],
)
def test_damaged_tables_are_named(path: Path, name: str, text: str, says: str) -> None:
    path.with_name(f"{name}.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=says):
        load_table(config(path))


def test_tables_without_any_text_or_label(path: Path) -> None:
    path.write_text(PATIENT.replace("CHF,", "x,").replace("CVA,", "x,").replace("Sepsis, pulmonary", "x"))
    with pytest.raises(DataError, match=r"patient\.csv: no row has a label"):
        load_table(config(path))
    path.write_text("patientunitstayid,apacheadmissiondx,uniquepid\n9,Sepsis,A\n")
    with pytest.raises(DataError, match="admissionDrug, pastHistory, medication; correct"):
        load_table(config(path))


@pytest.mark.complete
@pytest.mark.data
def test_the_demo_is_read(data_root: Path) -> None:
    path = data_root / "eicu_demo" / "patient.csv.gz"
    reading = read_table(config(path))
    table = reading.table
    assert (len(table), reading.absent, reading.faults) == (2350, 170, ())
    assert dict(zip(table.labels, (table.y == 1).sum(axis=0).tolist(), strict=True)) == {
        "Asthma": 10,
        "CHF": 101,
        "CVA": 54,
        "Cardiomyopathy": 10,
        "Pneumonia": 101,
        "Pulmonary": 140,
        "Sepsis": 285,
    }
    assert np.isnan(table.y).any(axis=1).sum() == 198
    groups = load_table(config(path, labels_from="diagnosis"))
    assert len(groups.labels) == 18
    parts = dict(zip(table.patients, table.split, strict=True))
    assert all(parts[who] == part for who, part in zip(table.patients, table.split, strict=True))
