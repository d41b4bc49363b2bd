"""suture.data.patient_columns: which column keeps a patient's images in one split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hospitals import site
from suture.data.config import parse_data
from suture.data.readers import read_table
from suture.data.reading import Reading
from suture_prepare.discovery import discover

N = 60
NAMES = [f"{i}.png" for i in range(N)]
PEOPLE = [f"K{i // 2}" for i in range(N)]
NESTED = [f"V{i // 4:03}" for i in range(N)]
MASS = ["0", "1"] * (N // 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, which write each a table of their own beside the same images."""
    return tmp_path_factory.mktemp("site")


def columns(folder: Path, **of: Sequence[str]) -> Path:
    """A table of the images, these columns, and Mass."""
    cells = {"image": NAMES, "Mass": MASS} | of
    return site(folder, list(cells), *zip(*cells.values(), strict=True))


def chosen(folder: Path) -> str:
    return str(discover(folder).data["patient_column"])


def read(folder: Path, patient: str, **more: object) -> Reading:
    data = {"dataset": "hospital", "root": folder / "images", "table": folder / "t.csv", "labels": ["Mass"]}
    return read_table(parse_data(data | {"patient_column": patient, "split": "patients"} | more, "t"))


NAMED = [
    *("fine: patient", "lesion_id: patient_id", "case_id: Subject", "StudyInstanceUID: MRN"),
    *("lesion_id: Fall", "lesion_id: Patient-Nr", "Lung Lesion: accession_number"),
    *("patientunitstayid: uniquepid", "patient_visit_id: subject_id", "patient_class: subject"),
    *("person_id: subject_id", "encounter_id: hadm_id", "lesion_id: encounter_id"),
    *("encounter_id: PatientAccountNumber", "study_id: patient_file_number", "StudyUID: patient_update_id"),
    *("case_id: participant", "exam_nr: pat_nr", "visit_id: Fallnummer"),
    *("encounter_id: medical_record_number", "study_id: id_paciente", "visit_id: PIZ"),
    "visit_id: study_subject_id",
]
"""A column, and one that is better."""


@pytest.mark.parametrize("names", NAMED)
def test_the_patient_is_the_column_in_which_the_others_nest(names: str, folder: Path) -> None:
    fine, patient = names.split(": ")
    assert chosen(columns(folder, **{fine: PEOPLE, patient: NESTED})) == patient


def test_the_runner_up_is_named_and_a_mere_lesion_asked_about(folder: Path) -> None:
    found = discover(columns(folder, lesion_id=PEOPLE, patient_id=NESTED))
    assert "'lesion_id'" in found.reasons["patient_column"]
    assert found.warnings == ()
    alone = discover(columns(folder, lesion_id=PEOPLE))
    assert alone.data["patient_column"] == "lesion_id"
    assert any("'lesion_id'" in warning for warning in alone.warnings)
    finding = discover(columns(folder, **{"Lung Lesion": MASS}))
    assert (finding.data["patient_column"], finding.data["labels"]) == ("image", ["Mass", "Lung Lesion"])


@pytest.mark.parametrize("own", ["lesion_id", "image"])
def test_patients_that_the_chosen_column_tears_apart_are_a_fault(own: str, folder: Path) -> None:
    columns(folder, lesion_id=PEOPLE, patient_id=NESTED)
    assert any("'patient_id'" in fault and "15 values" in fault for fault in read(folder, own).faults)
    assert read(folder, "patient_id").faults == ()


SORTING = {
    "visit": ("1", "2", "3", "4"),
    "case": ("case", "control"),
    "study": ("NIH", "MIMIC-CXR", "PadChest"),
    "Examination": ("PA", "Lateral"),
    "patient_class": ("inpatient", "outpatient"),
    "PatientRegion": ("north", "south", "west"),
    "reporting_person": tuple(f"R{i}" for i in range(20)),
    "Subject": ("Chest", "Abdomen"),
    "Lung Lesion": ("ja", "nein"),
}


@pytest.mark.parametrize("own", ["participant_id", "PIZ", "ID", "case_id", "Kennung", "lesion_id"])
def test_a_column_that_sorts_images_is_no_better_patient(own: str, folder: Path) -> None:
    for other, values in SORTING.items():
        columns(folder, **{own: PEOPLE, other: [values[i % len(values)] for i in range(N)]})
        assert chosen(folder) in (own, "image")
        is_label = {"labels": ["Mass", other], "values": {"ja": 1, "nein": 0}} if "Lesion" in other else {}
        reading = read(folder, own, **is_label)
        assert (reading.faults, reading.notes) == ((), ())
        columns(folder, **{own: PEOPLE, other: [values[i // 2 % len(values)] for i in range(N)]})
        assert read(folder, own).faults == ()


def test_a_column_that_the_site_uses_otherwise_is_no_better_patient(folder: Path) -> None:
    columns(folder, case_id=PEOPLE, subject=NESTED)
    assert "'subject'" in read(folder, "case_id").faults[0]
    assert read(folder, "case_id", attribute_column="subject").faults == ()
    label = {"labels": ["Mass", "subject"], "values": dict.fromkeys(NESTED, 1)}
    assert read(folder, "case_id", **label).faults == ()


def test_a_patient_under_an_unknown_name_beside_a_better_one_is_noted(folder: Path) -> None:
    reading = read(columns(folder, Kennung=PEOPLE, subject=NESTED), "Kennung")
    assert reading.faults == ()
    assert any('patient_column = "subject"' in note for note in reading.notes)


def test_of_two_names_of_one_rank_the_torn_one_is_a_fault_where_the_other_nests(folder: Path) -> None:
    columns(folder, person_id=PEOPLE, subject_id=NESTED)
    assert "'subject_id'" in read(folder, "person_id").faults[0]
    columns(folder, person_id=PEOPLE, subject_id=[f"S{i % 30}" for i in range(N)])
    reading = read(folder, "person_id")
    assert reading.faults == ()
    assert any("'subject_id'" in note for note in reading.notes)


def test_what_is_said_of_a_patient_names_none_and_few_patients_are_patients(folder: Path) -> None:
    for name in (
        *("PatientBirthDate", "patient_count", "patient_file", "PatientFileName"),
        *("subject_type", "patientAge", "Patientenname", "patienttype"),
    ):
        assert chosen(columns(folder, **{name: NESTED})) == "image", name
    for name in ("patient_id", "patient", "subject"):
        assert chosen(columns(folder, **{name: [str(2 + i // 20) for i in range(N)]})) == name
