"""suture.data.patient_columns: which column keeps a patient's images in one split."""

from __future__ import annotations

from pathlib import Path

import pytest

from hospitals import image, table
from suture.data.config import parse_data
from suture.data.discovery import discover
from suture.data.readers import read_table


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
    assert any("'lesion_id' is taken for the patient" in warning for warning in alone.warnings)


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
