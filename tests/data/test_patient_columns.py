"""suture.data.patient_columns: which column keeps a patient's images in one split."""

from __future__ import annotations

from pathlib import Path

import pytest

from hospitals import image, table
from suture.data.config import parse_data
from suture.data.readers import read_table
from suture_prepare.discovery import discover


def lesions(folder: Path, header: list[str], n: int = 48) -> Path:
    """Images of n / 8 patients with 4 lesions each; columns in the given order, and one of a finding."""
    cells = {
        "image": [f"{i}.png" for i in range(n)],
        "lesion": [f"L{i // 2}" for i in range(n)],
        "patient": [f"P{i // 8}" for i in range(n)],
        "finding": [str(i // 2 % 2) for i in range(n)],
    }
    kinds = {"isic_id": "image", "image": "image", "Mass": "finding", "Lung Lesion": "finding"}
    kinds |= dict.fromkeys(("lesion_id", "case_id", "Fall", "StudyInstanceUID", "accession_number"), "lesion")
    for i in range(n):
        image(folder / "images" / f"{i}.png", i)
    columns = [cells[kinds.get(name, "patient")] for name in header]
    table(folder / "t.csv", [header, *map(list, zip(*columns, strict=True))])
    return folder


@pytest.mark.parametrize(
    ("header", "patient"),
    [
        (["isic_id", "lesion_id", "patient_id", "Mass"], "patient_id"),
        (["image", "case_id", "Subject", "Mass"], "Subject"),
        (["image", "StudyInstanceUID", "MRN", "Mass"], "MRN"),
        (["image", "lesion_id", "Fall", "Mass"], "Fall"),
        (["image", "patient_age", "lesion_id", "Patient-Nr", "Mass"], "Patient-Nr"),
        (["image", "Lung Lesion", "accession_number"], "accession_number"),
        (["image", "Patients", "patient_id", "Mass"], "patient_id"),
    ],
)
def test_the_patient_comes_before_the_case_and_the_lesion(
    header: list[str], patient: str, tmp_path: Path
) -> None:
    found = discover(lesions(tmp_path, header))
    assert found.data["patient_column"] == patient


def test_the_runner_up_is_named_and_a_mere_lesion_asked_about(tmp_path: Path) -> None:
    found = discover(lesions(tmp_path / "a", ["image", "lesion_id", "patient_id", "Mass"]))
    assert "'lesion_id'" in found.reasons["patient_column"]
    assert found.warnings == ()
    alone = discover(lesions(tmp_path / "b", ["image", "lesion_id", "Mass"]))
    assert alone.data["patient_column"] == "lesion_id"
    assert any("'lesion_id' is used as the patient" in warning for warning in alone.warnings)


def test_a_finding_is_no_patient(tmp_path: Path) -> None:
    found = discover(lesions(tmp_path, ["image", "Lung Lesion"]))
    assert found.data["patient_column"] == "image"
    assert found.data["labels"] == ["Lung Lesion"]


@pytest.mark.parametrize("chosen", ["lesion_id", "image"])
def test_patients_that_the_chosen_column_tears_apart_are_a_fault(chosen: str, tmp_path: Path) -> None:
    found = discover(lesions(tmp_path, ["image", "lesion_id", "patient_id", "Mass"]))
    data = found.data | {"split": "patients", "patient_column": chosen}
    faults = read_table(parse_data(data, "t")).faults
    assert any("column 'patient_id'" in fault and "of its 6 values" in fault for fault in faults)
    assert read_table(parse_data(found.data | {"split": "patients"}, "t")).faults == ()


def site(folder: Path, n: int = 60, **columns: list[str]) -> tuple[Path, dict[str, object]]:
    """A table of n images with Mass, and a [data] whose column of patients is the first of the given ones."""
    for i in range(n):
        image(folder / "images" / f"{i}.png", i)
    cells = {"image": [f"{i}.png" for i in range(n)], **columns, "Mass": ["0", "1"] * (n // 2)}
    table(folder / "t.csv", [list(cells), *map(list, zip(*cells.values(), strict=True))])
    data = {"dataset": "hospital", "root": str(folder / "images"), "table": str(folder / "t.csv")}
    return folder, data | {
        "patient_column": next(iter(columns)),
        "labels": ["Mass"],
        "split": "patients",
    }


def each(n: int, *values: str) -> list[str]:
    return [values[i % len(values)] for i in range(n)]


PEOPLE = [f"K{i // 2}" for i in range(60)]
NESTED = [f"V{i // 4:03}" for i in range(60)]


@pytest.mark.parametrize("own", ["participant_id", "PIZ", "ID", "case_id", "Kennung", "lesion_id"])
@pytest.mark.parametrize(
    ("other", "values"),
    [
        ("visit", ("1", "2", "3", "4")),
        ("case", ("case", "control")),
        ("study", ("NIH", "MIMIC-CXR", "PadChest")),
        ("Examination", ("PA", "Lateral")),
        ("patient_class", ("inpatient", "outpatient")),
        ("PatientRegion", ("north", "south", "west")),
        ("reporting_person", tuple(f"R{i}" for i in range(20))),
        ("Subject", ("Chest", "Abdomen")),
        ("Lung Lesion", ("ja", "nein")),
    ],
)
def test_a_column_that_sorts_images_is_no_better_patient(
    own: str, other: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    folder, data = site(tmp_path, **{own: PEOPLE, other: each(60, *values)})
    assert discover(folder).data["patient_column"] in (own, "image")
    if other == "Lung Lesion":
        data |= {"labels": ["Mass", "Lung Lesion"], "values": {"ja": 1, "nein": 0}}
    reading = read_table(parse_data(data, "t"))
    assert (reading.faults, reading.notes) == ((), ())
    by_patient = site(tmp_path, **{own: PEOPLE, other: [values[i // 2 % len(values)] for i in range(60)]})
    assert read_table(parse_data(by_patient[1] | {"labels": ["Mass"]}, "t")).faults == ()


@pytest.mark.parametrize("key", ["attribute_column", "labels"])
def test_a_column_that_the_site_uses_otherwise_is_no_better_patient(key: str, tmp_path: Path) -> None:
    _, data = site(tmp_path, case_id=PEOPLE, subject=NESTED)
    assert "'subject'" in read_table(parse_data(data, "t")).faults[0]
    if key == "labels":
        words = dict.fromkeys(NESTED, 1)
        data |= {"labels": ["Mass", "subject"], "values": words}
    else:
        data |= {"attribute_column": "subject"}
    assert read_table(parse_data(data, "t")).faults == ()


def test_a_patient_under_an_unknown_name_beside_a_better_one_is_noted(tmp_path: Path) -> None:
    _, data = site(tmp_path, Kennung=PEOPLE, subject=NESTED)
    reading = read_table(parse_data(data, "t"))
    assert reading.faults == ()
    assert any("column 'subject'" in note and 'patient_column = "subject"' in note for note in reading.notes)


def test_of_two_names_of_one_rank_the_torn_one_is_a_fault_where_the_other_nests(tmp_path: Path) -> None:
    _, data = site(tmp_path, person_id=PEOPLE, subject_id=NESTED)
    assert "'subject_id'" in read_table(parse_data(data, "t")).faults[0]
    crossed = [f"S{i % 30}" for i in range(60)]
    _, data = site(tmp_path, person_id=PEOPLE, subject_id=crossed)
    reading = read_table(parse_data(data, "t"))
    assert reading.faults == ()
    assert any("column 'subject_id'" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("fine", "patient"),
    [
        ("patientunitstayid", "uniquepid"),
        ("patient_visit_id", "subject_id"),
        ("patient_class", "subject"),
        ("person_id", "subject_id"),
        ("encounter_id", "hadm_id"),
        ("lesion_id", "encounter_id"),
        ("encounter_id", "PatientAccountNumber"),
        ("study_id", "patient_file_number"),
        ("StudyUID", "patient_update_id"),
        ("case_id", "participant"),
        ("exam_nr", "pat_nr"),
        ("visit_id", "Fallnummer"),
        ("encounter_id", "medical_record_number"),
        ("study_id", "id_paciente"),
        ("visit_id", "PIZ"),
        ("visit_id", "study_subject_id"),
    ],
)
def test_the_patient_is_the_column_in_which_the_others_nest(fine: str, patient: str, tmp_path: Path) -> None:
    folder, _ = site(tmp_path, **{fine: PEOPLE, patient: NESTED})
    assert discover(folder).data["patient_column"] == patient


@pytest.mark.parametrize(
    "name",
    [
        "PatientBirthDate",
        "patient_count",
        "patient_file",
        "PatientFileName",
        "subject_type",
        "patientAge",
        "Patientenname",
        "patienttype",
    ],
)
def test_what_is_said_of_a_patient_names_none(name: str, tmp_path: Path) -> None:
    folder, _ = site(tmp_path, **{name: NESTED})
    assert discover(folder).data["patient_column"] == "image"


@pytest.mark.parametrize("name", ["patient_id", "patient", "subject"])
def test_few_patients_of_many_images_are_patients(name: str, tmp_path: Path) -> None:
    folder, _ = site(tmp_path, **{name: [str(2 + i // 20) for i in range(60)]})
    assert discover(folder).data["patient_column"] == name
