"""The readers of eICU and MTSamples, and sites of eICU that share no group of diagnoses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from public_tables import change, moved
from suture.core.errors import ConfigError, DataError
from suture.data.config import load_site_config
from suture.data.readers import load_table, read_table
from suture.execution.job import load_job, with_settings
from suture_papers.metafl.eicu import EicuConfig
from suture_papers.metafl.eicu_sites import EicuSites
from suture_papers.metafl.mtsamples import MtsamplesConfig
from world import refused, write_table

HISTORY = "notes/Past History/Past History Obtain Options/"

TABLES: dict[str, Sequence[Sequence[object]]] = {
    "patient": [
        ("patientunitstayid", "apacheadmissiondx", "uniquepid"),
        (1, "Sepsis, pulmonary", "A"),
        (2, "CHF, congestive heart failure", "A"),
        (3, "Pneumonias, bacterial", "B"),
        (4, "", "C"),
        (5, "CVA, cerebrovascular accident/stroke", "D"),
    ],
    "admissionDrug": [
        ("patientunitstayid", "drugname"),
        (1, "LASIX          oral"),
        (1, "LASIX"),
        (2, "ASPIRIN"),
        (3, " "),
    ],
    "pastHistory": [
        ("patientunitstayid", "pasthistorypath"),
        (1, "notes/Past History/Organ Systems/Cardiovascular (R)/Congestive Heart Failure/CHF"),
        (1, f"{HISTORY}Performed"),
        (4, f"{HISTORY}No Health Problems"),
    ],
    "medication": [("patientunitstayid", "drugname"), (3, "HEPARIN, 5 ML"), (1, "MORPHINE")],
    "admissionDx": [
        ("patientunitstayid", "admitdxpath"),
        (1, "admission diagnosis|Sepsis"),
        (1, "admission diagnosis|Respiratory"),
        (1, "admission diagnosis|Sepsis"),
        (5, "CVA"),
    ],
    "diagnosis": [
        ("patientunitstayid", "diagnosisstring"),
        (1, "pulmonary|respiratory failure|ARDS"),
        (1, "pulmonary|respiratory failure"),
        (2, "renal|disorder of kidney|x"),
    ],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, rows in TABLES.items():
        write_table(tmp_path / f"{name}.csv", rows)
    return tmp_path / "patient.csv"


def eicu(path: Path, **more: Any) -> EicuConfig:
    return EicuConfig(table=path, **more)


def test_drugs_history_and_medication_are_the_document(path: Path) -> None:
    reading = read_table(eicu(path))
    table = reading.table
    assert (table.images, reading.absent) == (("1", "2", "3", "4"), 1)
    texts = (
        "LASIX , Congestive Heart Failure CHF , MORPHINE",
        "ASPIRIN",
        "HEPARIN, 5 ML",
        "No Health Problems",
    )
    assert table.texts == texts
    assert table.patients == ("A", "A", "B", "C")
    assert table.split[0] == table.split[1]


def test_labels_are_the_exact_parts_of_the_diagnosis_that_occur(path: Path) -> None:
    table = load_table(eicu(path))
    assert table.labels.names == ("CHF", "CVA", "Pulmonary", "Sepsis")
    # "Pneumonias" is not among the words; of the fourth stay no diagnosis is known.
    np.testing.assert_array_equal(table.y, [[0, 0, 1, 1], [1, 0, 0, 0], [0] * 4, [np.nan] * 4])
    assert load_table(eicu(path, labels=("sepsis",))).labels.names == ("Sepsis",)


def test_labels_may_be_groups_of_diagnoses(path: Path) -> None:
    names = ("Pulmonary: Respiratory Failure", "renal: disorder of kidney")
    table = load_table(eicu(path, labels_from="diagnosis", labels=names))
    np.testing.assert_array_equal(table.y, [[1, 0], [0, 1], [np.nan] * 2, [np.nan] * 2])
    with refused(path, by=DataError):
        load_table(eicu(path, labels_from="diagnosis"))


def test_what_names_the_label_is_read_only_where_it_is_asked_for(path: Path) -> None:
    said = "admission diagnosis|Sepsis , admission diagnosis|Respiratory"
    assert not any("Sepsis" in text for text in load_table(eicu(path)).texts or ())
    texts = load_table(eicu(path, leaking_text=True)).texts or ()
    assert texts[0] == f"LASIX , Congestive Heart Failure CHF , MORPHINE , {said}"
    assert texts[4] == "CVA"
    for unread in ("medication", "pastHistory"):
        (path.parent / f"{unread}.csv").unlink()
    table = load_table(eicu(path, texts=("admissionDrug",), leaking_text=True))
    assert table.texts == (f"LASIX , {said}", "ASPIRIN", "CVA")
    assert load_table(eicu(path, texts=("admissionDrug",))).texts == ("LASIX", "ASPIRIN")


def test_tables_under_other_names_and_in_another_folder(path: Path, tmp_path: Path) -> None:
    texts = load_table(eicu(path)).texts
    for name in TABLES.keys() - {"patient"}:
        file = path.with_name(f"{name}.csv")
        lists = moved(file.rename(file.with_name(file.name.replace("Drug", "drug"))), tmp_path / "lists")
    with refused("admissionDrug.csv", "lists", by=DataError):
        load_table(eicu(path))
    assert load_table(eicu(path, lists=lists)).texts == texts


@pytest.mark.parametrize(
    ("name", "before", "after", "named"),
    [
        ("medication", "drugname", "drug", ["'drugname'"]),
        ("medication", ",MORPHINE", "", ["medication.csv row 3"]),
        ("medication", "MORPHINE", "\xff", ["UTF-8"]),
        ("patient", "\n2,", "\n1,", ["row 3"]),
        ("patient", ",B", ",", ["row 4"]),
    ],
)
def test_damaged_tables_are_named(path: Path, name: str, before: str, after: str, named: list[str]) -> None:
    file = path.with_name(f"{name}.csv")
    change(file, before, after)
    file.write_bytes(file.read_text().encode("latin-1"))
    with refused(*named, by=DataError):
        load_table(eicu(path))


def test_tables_without_any_text_or_label(path: Path) -> None:
    write_table(path, [row if i == 0 else (row[0], "x", row[2]) for i, row in enumerate(TABLES["patient"])])
    with refused("patient.csv", by=DataError):
        load_table(eicu(path))
    write_table(path, [TABLES["patient"][0], (9, "Sepsis", "A")])
    with refused("admissionDrug, pastHistory, medication", by=DataError):
        load_table(eicu(path))


# Sites of eICU


def test_sites_share_no_group_and_the_server_tests_on_all(tmp_path: Path) -> None:
    """Of 390 stays a third has each group; 90 more have a diagnosis too rare to be a label."""
    groups = ("renal|failure", "pulmonary|failure", "neurologic|stroke")
    rows = {
        "patient": [(i, "", f"P{i // 2}") for i in range(480)],
        "diagnosis": [(i, f"{groups[i % 3] if i < 390 else 'rare|one'}|detail") for i in range(480)],
        "admissionDrug": [(i, f"DRUG {i % 7}") for i in range(480)],
        "pastHistory": [(0, "notes/Past History/x/CHF")],
        "medication": [(0, "HEPARIN")],
    }
    for name, lines in rows.items():
        write_table(tmp_path / "eicu" / f"{name}.csv", [TABLES[name][0], *lines])
    job = with_settings(load_job("surgical_eicu"), [f"simulation.root={tmp_path / 'eicu'}"])
    assert isinstance(job.simulation, EicuSites)
    names = job.simulation.prepare(tmp_path / "sites", tmp_path, 1, job.method)
    tables = {
        name: load_table(load_site_config(tmp_path / "sites" / name / "suture.toml").data)
        for name in (*names, "server")
    }
    known = sorted(tuple(tables[name].labels) for name in names)
    assert known == [("Neurologic: Stroke",), ("Pulmonary: Failure",), ("Renal: Failure",)]
    assert {name for (name,) in known} == set(tables["server"].labels)
    tested = tables["server"].of("test")
    assert len(tested) == pytest.approx(480 / 5, abs=8)
    assert not any(tables[name].of("test").patients for name in names)
    trained = [who for name in names for who in tables[name].patients]
    assert not set(trained) & set(tested.patients)
    (tmp_path / "eicu" / "patient.csv").unlink()
    with refused("patient.csv", "simulation.root", by=ConfigError):
        job.simulation.prepare(tmp_path / "again", tmp_path, 1, job.method)


# MTSamples

NOTES = [
    ("note_id", "description", "medical_specialty", "transcription"),
    (1, "x", " Surgery", "PREOP: ,Pain.,POSTOP: ,Pain, 1,000 ml."),
    (2, "x", " Urology", "Another."),
    (3, "x", " Urology", "PREOP: ,Pain.,POSTOP: ,Pain, 1,000 ml."),
    (4, "x", " Surgery", ""),
]


def test_rows_of_one_text_are_one_document_of_several_labels(tmp_path: Path) -> None:
    config = MtsamplesConfig(table=write_table(tmp_path / "mtsamples.csv", NOTES))
    reading = read_table(config)
    table = reading.table
    assert reading.absent == 1
    assert table.images == table.patients == ("1", "2")
    assert table.labels.names == ("Surgery", "Urology")
    assert table.y.tolist() == [[1, 1], [0, 1]]
    assert table.texts == ("PREOP: , Pain., POSTOP: , Pain, 1, 000 ml.", "Another.")
    narrow = config.model_copy(update={"labels": ("urology",)})
    assert load_table(narrow).labels.names == ("Urology",)
    change(config.table, "medical_specialty", "specialty")
    with refused("'medical_specialty'", by=DataError):
        load_table(config)
    write_table(config.table, [NOTES[0], NOTES[-1]])
    with refused("'transcription'", by=DataError):
        load_table(config)
