"""suture.data.discovery: what a hospital's folder seems to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hospitals import german, image, listed, plain, table
from suture.core.errors import DataError
from suture.data.config import parse_data
from suture.data.discovery import discover
from suture.data.readers import read_table
from suture.simulation.new_study import splits


def test_a_table_of_windows(tmp_path: Path) -> None:
    found = discover(german(tmp_path))
    assert found.data == {
        "dataset": "hospital",
        "root": str(tmp_path / "Bilder"),
        "table": str(tmp_path / "Befunde.csv"),
        "delimiter": ";",
        "encoding": "cp1252",
        "image_column": "Datei",
        "patient_column": "PatientenID",
        "labels": ["Mass", "Edema"],
    }
    assert not found.has_splits
    said = " ".join(found.warnings)
    assert "'Sex'" in said
    assert "'No Finding'" in said
    reading = read_table(parse_data(found.data | {"split": "patients"}, "test"))
    assert reading.faults == ()
    assert reading.table.patients[0] == "Ä0"
    assert reading.table.y[:3, 0].tolist() == [1, 0, 1]
    assert np.isnan(reading.table.y[2, 1])
    assert any("'Yes' is read as present" in note for note in reading.notes)


def test_a_column_of_findings(tmp_path: Path) -> None:
    found = discover(listed(tmp_path))
    assert found.data["finding_column"] == "Findings"
    assert found.data["labels"] == ["Mass", "Nodule"]
    assert found.data["image_match"] == "stem"
    assert found.data["repeated"] == "merge"
    assert found.data["patient_column"] == "mrn"
    read = read_table(parse_data(found.data | {"split": "patients"}, "test"))
    assert read.faults == ()
    assert len(read.table) == 30
    y = dict(zip(read.table.images, read.table.y.tolist(), strict=True))
    assert y["s0.png"] == [1, 1]
    assert y["s1.png"] == [1, 0]  # "No Finding" in one row, "Mass" in the other
    assert y["s2.png"] == [0, 1]
    assert np.isnan(y["s3.png"]).all()


def test_strange_words_are_asked_about_and_missing_images_counted(tmp_path: Path) -> None:
    found = discover(plain(tmp_path))
    assert found.data["split_column"] == "split"
    assert found.data["labels"] == ["Mass"]
    assert found.data["partial"] is True
    assert any("'ja', 'nein' mean" in warning for warning in found.warnings)
    assert any("1 of 30 images" in warning for warning in found.warnings)
    given_ = found.data | {"labels": ["Mass", "Hernia"], "values": {"ja": 1, "nein": 0}}
    reading = read_table(parse_data(given_, "test"))
    assert reading.faults == ()
    assert reading.absent == 1
    assert set(reading.table.y[:, 1]) == {0.0, 1.0}


def test_an_unknown_word_names_file_row_and_the_line_to_add(tmp_path: Path) -> None:
    plain(tmp_path)
    data = {"dataset": "hospital", "root": str(tmp_path / "images"), "table": str(tmp_path / "labels.csv")}
    fault = read_table(parse_data(data, "test")).faults[0]
    assert "labels.csv rows 2, 3" in fault
    assert 'values = { "nein" = 1 }' in fault


def test_an_age_is_no_label_and_absolute_paths_are_found(tmp_path: Path) -> None:
    rows = [["path", "patient_age", "subject", "Edema"]]
    for i in range(12):
        image(tmp_path / "x" / f"{i}.png", i)
        rows.append([str(tmp_path / "x" / f"{i}.png"), str(i % 2), f"s{i}", str(i % 2)])
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path / "t.csv")
    assert found.data["image_column"] == "path"
    assert found.data["patient_column"] == "subject"
    assert "Edema" in found.data["labels"]
    assert read_table(parse_data(found.data | {"split": "patients"}, "t")).table.images[0] == "0.png"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder.joinpath("t.csv").write_text("image,Mass\na.png,1\n"), "holds no image"),
        (lambda folder: image(folder / "a.png", 1), "holds no table"),
        (
            lambda folder: (image(folder / "a.png", 1), table(folder / "t.csv", [["x", "y"], ["1", "2"]])),
            "no column of t.csv names the images",
        ),
        (
            lambda folder: (
                image(folder / "a.png", 1),
                table(folder / "t.csv", [["image", "age"], ["a.png", "44"]]),
            ),
            "has no column of labels",
        ),
        (
            lambda folder: (
                image(folder / "a.png", 1),
                table(folder / "t.csv", [["image", "Mass"], ["a.png", "1"]]),
                table(folder / "u.csv", [["image", "Mass"], ["a.png", "1"]]),
            ),
            "t.csv and u.csv",
        ),
    ],
)
def test_what_cannot_be_made_out_is_one_sentence(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        discover(tmp_path)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    words=st.sampled_from([("1", "0"), ("yes", "no"), ("TRUE", "FALSE"), ("pos", "neg"), ("1.0", "0.0")]),
)
def test_the_form_of_a_table_does_not_change_its_labels(
    tmp_path: Path, delimiter: str, encoding: str, words: tuple[str, str]
) -> None:
    for i in range(4):
        image(tmp_path / "images" / f"{i}.png", i)
    rows = [["image", "patient", "Größe", "Mass"]]
    rows += [[f"{i}.png", f"p{i}", "1.8", words[i % 2]] for i in range(4)]
    table(tmp_path / "t.csv", rows, delimiter, encoding)
    data = discover(tmp_path).data
    assert data["labels"] == ["Mass"]
    assert read_table(parse_data(data | {"split": "patients"}, "t")).table.y[:, 0].tolist() == [1, 0, 1, 0]


def test_splits_in_other_words_are_not_made_anew(tmp_path: Path) -> None:
    """What the hospital keeps for its test would be trained on."""
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
    words = ["train", "holdout", "exclude"]
    table(
        tmp_path / "t.csv",
        [
            ["image", "patient", "split", "Mass"],
            *([f"{i}.png", f"p{i}", words[i % 3], "1"] for i in range(6)),
        ],
    )
    with pytest.raises(DataError, match="'exclude', 'holdout' is no split"):
        discover(tmp_path)


def test_patients_are_named_by_an_identifier_and_all_of_them(tmp_path: Path) -> None:
    rows = [["image", "PatientBirthDate", "PatientSex", "patient_image_folder", "PatientID", "Mass", "ICU"]]
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"19{i}0", "FM"[i % 2], f"f{i}", f"p{i}", str(i % 2), "1"])
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert found.data["patient_column"] == "PatientID"
    assert any("is 'ICU' a finding?" in warning for warning in found.warnings)
    rows[3][4] = ""
    table(tmp_path / "t.csv", rows)
    with pytest.raises(DataError, match="row 4: no patient"):
        discover(tmp_path)


def test_a_findings_list_is_preferred_to_flags(tmp_path: Path) -> None:
    rows = [["image", "patient", "Findings", "Ventilated", "Deleted"]]
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", "Mass|Edema", "1", "0"])
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert found.data["labels"] == ["Edema", "Mass"]
    assert sum("is not taken" in warning for warning in found.warnings) == 2


def test_rows_of_one_image_agree_on_patient_and_split(tmp_path: Path) -> None:
    folder = listed(tmp_path)
    tsv = folder / "findings.tsv"
    tsv.write_text(tsv.read_text() + "s2\tp9\tMass\r\n")
    data = discover(folder).data | {"split": "patients"}
    assert "another patient or split" in read_table(parse_data(data, "t")).faults[0]


def test_missing_images_keep_their_patients_in_the_splits(tmp_path: Path) -> None:
    found = discover(german(tmp_path))
    (tmp_path / "Bilder" / "000.png").unlink()
    (tmp_path / "Bilder" / "001.png").unlink()
    assert splits(discover(tmp_path)) == splits(found)
