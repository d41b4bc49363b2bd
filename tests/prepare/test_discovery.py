"""suture_prepare.discovery: what a hospital's folder seems to be. More forms: test_hospital_tables.py."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hospitals import german, image, listed, plain, site
from suture.core.errors import DataError
from suture.data.config import parse_data
from suture.data.images import stem
from suture.data.readers import read_table
from suture.data.reading import Reading
from suture_prepare.description import Answers, Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import look, splits, write_study
from world import refused, write_table

MASS = [["image", "patient", "Mass"], *([f"{i}.png", f"p{i}", i % 2] for i in range(8))]


def read(found: Discovery, **more: object) -> Reading:
    return read_table(parse_data(found.data | {"split": "patients"} | more, "t"))


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
    assert (found.has_splits, found.warnings) == (False, ())
    assert found.left_out.keys() == {"Größe", "Age", "Sex", "No Finding"}
    reading = read(found)
    assert reading.faults == ()
    assert reading.table.patients[0] == "Ä0"
    assert reading.table.y[:3, 0].tolist() == [1, 0, 1]
    assert np.isnan(reading.table.y[2, 1])
    assert any("'Yes'" in note for note in reading.notes)


def test_a_column_of_findings(tmp_path: Path) -> None:
    found = discover(listed(tmp_path))
    expected = {"finding_column": "Findings", "labels": ["Mass", "Nodule"], "image_match": "stem"}
    assert found.data == found.data | expected | {"repeated": "merge", "patient_column": "mrn"}
    reading = read(found)
    assert reading.faults == ()
    assert len(reading.table) == 30
    y = dict(zip(reading.table.images, reading.table.y.tolist(), strict=True))
    assert y["s0.png"] == [1, 1]
    assert y["s1.png"] == [1, 0]  # "No Finding" in one row, "Mass" in the other
    assert any("1 image" in note for note in reading.notes)
    assert y["s2.png"] == [0, 1]
    assert np.isnan(y["s3.png"]).all()
    path = tmp_path / "findings.tsv"
    path.write_text(path.read_text() + "s2\tp9\tMass\r\n")
    assert "patient or split" in read(discover(tmp_path)).faults[0]


def test_strange_words_are_asked_about_and_missing_images_counted(tmp_path: Path) -> None:
    found = discover(plain(tmp_path))
    assert (found.data["split_column"], found.data["labels"]) == ("split", ["Mass"])
    assert found.data["partial"] is True
    said = "\n".join(found.warnings)
    assert all(named in said for named in ("'Hernia'", "kaum, sicher", "1 of 30", "'0.png'", "row 2"))
    more = {"labels": ["Mass", "Hernia"], "values": {"sicher": 1, "kaum": 0}}
    reading = read_table(parse_data(found.data | more, "test"))
    assert (reading.faults, reading.absent) == ((), 1)
    assert set(reading.table.y[:, 1]) == {0.0, 1.0}


def test_an_unknown_word_names_file_row_and_the_line_to_add(tmp_path: Path) -> None:
    plain(tmp_path)
    data = {"dataset": "hospital", "root": str(tmp_path / "images"), "table": str(tmp_path / "labels.csv")}
    fault = read_table(parse_data(data, "test")).faults[0]
    assert "labels.csv rows 2, 3" in fault
    line = fault.splitlines()[-1]
    assert line == 'values = { "kaum" = "?", "sicher" = "?" }'
    meant = line.replace('"kaum" = "?", "sicher" = "?"', '"kaum" = "unknown", "sicher" = 1')
    pasted = read_table(parse_data(data | tomllib.loads(meant), "test"))
    assert pasted.faults == ()
    assert np.nansum(pasted.table.y[:, 1]) == 24


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("1.2.840.7", "1.2.840.7"),
        ("a/1.2.840.7.DCM", "1.2.840.7"),
        ("study.v2", "study.v2"),
        ("study.v2.jpeg", "study.v2"),
        (r"C:\x\scan.NII.GZ", "scan"),
        ("x.dicom", "x"),
        (".png", ""),
    ],
)
def test_only_the_suffix_of_an_image_is_cut(cell: str, name: str) -> None:
    assert stem(cell) == name


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({}, ["no table"]),
        ({"t.csv": [["x", "y"], ["1", "2"]]}, ["t.csv"]),
        ({"t.csv": [["image", "age"], ["a.png", "44"]]}, ["t.csv", "image, age"]),
        ({name: [["image", "Mass"], ["a.png", "1"]] for name in ("t.csv", "u.csv")}, ["t.csv and u.csv"]),
        (
            {"t.csv": [["bild", "Mass"], ["x\u00a01.png", 1], ["y.png", 0]]},
            [r"'x\xa01.png'", r"'e\u0301 1.png'"],
        ),
    ],
)
def test_what_cannot_be_made_out_is_one_error(
    tmp_path: Path, tables: dict[str, list[list[object]]], named: list[str]
) -> None:
    for name in ("a.png", "e\u0301 1.png"):
        image(tmp_path / "x" / name, 1)
    for name, rows in tables.items():
        write_table(tmp_path / name, rows)
    with refused(*named, by=DataError):
        discover(tmp_path)


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path) -> None:
    for name, named in (("all.zip", "unpack"), ("labels.XLS", ".xlsx")):
        (tmp_path / name).write_bytes(b"PK\3\4")
        with refused(name, named, by=DataError):
            discover(tmp_path / name)
        (tmp_path / name).unlink()
    write_table(tmp_path / "t.csv", MASS)
    with refused("no image", by=DataError):
        discover(tmp_path)
    image(tmp_path / "a.png", 1)
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "t.csv").unlink()
    with refused("deep.json", by=DataError):
        discover(tmp_path)


@pytest.mark.complete
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"]),
    newline=st.sampled_from(["\n", "\r\n"]),
    told=st.booleans(),
    blank=st.integers(0, 2),
    words=st.sampled_from(
        [("1", "0"), ("yes", "no"), ("TRUE", "FALSE"), ("pos", "neg"), ("1.0", "0.0"), ('"1,0"', '"0,0"')]
    ),
)
def test_the_form_of_a_table_does_not_change_its_labels(
    tmp_path: Path,
    delimiter: str,
    encoding: str,
    newline: str,
    told: bool,
    blank: int,
    words: tuple[str, str],
) -> None:
    for i in range(4):
        image(tmp_path / "images" / f"{i}.png", i)
    rows = [["image", "patient", "Größe", "Mass"]]
    rows += [[f"{i}.png", f"Ä{i}", '"1;8"', words[i % 2]] for i in range(4)]
    lines = [f"sep={delimiter}"] * told + [delimiter.join(row) for row in rows] + [""] * blank
    (tmp_path / "t.csv").write_bytes("".join(line + newline for line in lines).encode(encoding))
    found = discover(tmp_path)
    assert found.data["labels"] == ["Mass"]
    table = read(found).table
    assert table.y[:, 0].tolist() == [1, 0, 1, 0]
    assert table.patients == ("Ä0", "Ä1", "Ä2", "Ä3")


def test_what_programs_leave_behind_is_not_looked_at(tmp_path: Path) -> None:
    folder = plain(tmp_path / "data")
    (folder / "._labels.csv").write_bytes(b"\0\5\x16\7 of macOS")
    (folder / "~$labels.xlsx").write_bytes(b"of Excel")
    (folder / "images" / "._1.png").write_bytes(b"of macOS")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "labels.csv").write_bytes(b"x")
    found = discover(folder)
    assert found.data["root"] == str(folder / "images")
    assert not any("skipped" in warning for warning in found.warnings)


def test_a_readme_does_not_hide_the_tables_below(tmp_path: Path) -> None:
    site(tmp_path, *MASS)
    (tmp_path / "tables").mkdir()
    (tmp_path / "t.csv").rename(tmp_path / "tables" / "labels.csv")
    (tmp_path / "README.txt").write_text('Thank you, for using, our data.\n"Unfinished\n')
    (tmp_path / "codes.csv").write_text("code,word\n1,a,b\n")
    found = discover(tmp_path)
    assert found.data["table"] == str(tmp_path / "tables" / "labels.csv")
    [skipped] = [text for text in found.warnings if "codes.csv" in text]
    assert "row 2" in skipped


@pytest.mark.parametrize(
    "cell",
    [
        "C:\\img\\{}\\{}.png",
        "{}\\{}.png",
        "/mnt/pacs/img/{}/{}.png",
        "\\\\pacs\\img\\{}\\{}.png",
        "{}/{}.png",
    ],
)
def test_paths_of_other_machines_are_found_by_their_end(tmp_path: Path, cell: str) -> None:
    rows = [["image", "patient", "Mass"]]
    for i in range(8):
        image(tmp_path / "img" / "ab"[i % 2] / f"{i // 2}.png", i)  # each name twice
        rows.append([cell.format("ab"[i % 2], i // 2), f"p{i}", str(i % 2)])
    write_table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert not {"partial", "image_match"} & found.data.keys()
    assert read(found).table.images[:4] == ("a/0.png", "b/0.png", "a/1.png", "b/1.png")


def test_images_elsewhere_are_found_by_absolute_paths_or_a_link_to_their_folder(tmp_path: Path) -> None:
    rows = [["path", "patient_age", "subject", "Edema"]]
    for i in range(4):
        path = tmp_path / "pacs" / "ab"[i % 2] / f"{i}.png"
        image(path, i)
        rows.append([str(path), str(i % 2), f"s{i}", str(i % 2)])
    write_table(tmp_path / "study" / "t.csv", rows)
    found = discover(tmp_path / "study")
    assert found.data["root"] == str(tmp_path / "pacs")
    assert found.data["patient_column"] == "subject"
    assert read(found).table.images == ("a/0.png", "b/1.png", "a/2.png", "b/3.png")
    site(tmp_path / "site", *MASS)
    (tmp_path / "site" / "images").rename(tmp_path / "store")
    (tmp_path / "site" / "images").symlink_to(tmp_path / "store")
    linked = discover(tmp_path / "site")
    assert linked.data["root"] == str(tmp_path / "site" / "images")
    assert read(linked).table.images == tuple(row[0] for row in MASS[1:])


def test_a_folder_that_may_not_be_listed_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(tmp_path, *MASS)
    listed = os.scandir

    def closed(path: str) -> object:
        if Path(path).name == "images":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", closed)
    with refused("images", "Permission denied", by=DataError):
        discover(tmp_path)


def test_answers_are_followed(tmp_path: Path) -> None:
    rows = [[f"{i}.png", f"w{i // 2}", i % 2, 1] for i in range(6)]
    site(tmp_path, ["image", "who", "Mass", "ICU"], *rows)
    assert not discover(tmp_path).has_patients
    found = discover(tmp_path, Answers(patient="who", no_labels=("ICU",)))
    assert (found.data["patient_column"], found.data["labels"]) == ("who", ["Mass"])
    assert (found.left_out.keys(), found.warnings) == ({"ICU"}, ())


def test_a_row_without_its_patient_is_refused(tmp_path: Path) -> None:
    rows = [*MASS[:3], ["2.png", "", 1], *MASS[4:]]
    with refused("row 4", "'patient'", by=DataError):
        discover(site(tmp_path, *rows))


def test_rows_of_one_image_that_disagree_are_counted_or_refused(tmp_path: Path) -> None:
    found = discover(site(tmp_path, *MASS, ["0.png", "p0", 1], ["1.png", "p1", ""]))
    (note,) = read(found).notes
    assert "1 image" in note
    twice = [[f"{i}", f"p{i}", i % 2] for i in range(8)]
    for i in range(8):
        image(tmp_path / "b" / f"{i:04}.png", i)
    write_table(tmp_path / "b" / "t.csv", [["image", "patient", "Mass"], *twice, ["0003", "p3", "1"]])
    assert any(
        "repeated image" in fault for fault in read(discover(tmp_path / "b"), repeated="refuse").faults
    )


def test_missing_images_keep_their_patients_in_the_splits(tmp_path: Path) -> None:
    found = discover(german(tmp_path))
    (tmp_path / "Bilder" / "000.png").unlink()
    (tmp_path / "Bilder" / "001.png").unlink()
    assert splits(discover(tmp_path)) == splits(found)


def test_a_site_that_cannot_be_made_out_does_not_stop_the_others(tmp_path: Path) -> None:
    rows = [[*row, "F", "AGFA"] for row in MASS[1:]]
    sites = {"a": site(tmp_path / "a", [*MASS[0], "Sex", "Maker"], *rows), "b": tmp_path / "b"}
    (tmp_path / "b").mkdir()
    failed: dict[str, str] = {}
    found = look(sites, refused=failed)
    assert list(found) == ["a"]
    assert failed["b"].startswith("b: ")
    with refused("b: ", by=DataError):
        look(sites)
    write_study(tmp_path / "s", found)
    text = (tmp_path / "s" / "a" / "suture.toml").read_text()
    assert "'Sex', 'Maker'\n" in text, "columns with one value in every row are one line"
    assert "AGFA" not in text


NOTE = ("The heart is enlarged and the lungs are clear.", "A small nodule is seen in the left upper lobe.")
HAN = ("心影增大，双肺清晰，未见胸腔积液。", "左上肺见小结节影，建议随访复查。")


@pytest.mark.parametrize(
    ("notes", "column"), [(NOTE, "diagnosis"), (HAN, "Medical_Speciality"), (NOTE, "Fachgebiet")]
)
def test_a_table_of_documents_has_a_class_a_row(tmp_path: Path, notes: tuple[str, str], column: str) -> None:
    rows = [[f"n{i}", f"{notes[i % 2]} {i}", ("Cardiology", "Urology", "Oncology")[i % 3]] for i in range(12)]
    rows[3][1] = " "
    write_table(tmp_path / "t.csv", [["key", "note", column], *rows])
    found = discover(tmp_path)
    columns = {"text_column": "note", "image_column": "key", "finding_column": column}
    assert found.data == found.data | columns | {"label_type": "multiclass", "partial": True}
    said = "\n".join(found.warnings)
    assert all(named in said for named in ("1 of 12", "'n3'", "row 5"))
    assert "image" not in said


@pytest.mark.parametrize("patients", [False, True])
def test_equal_documents_without_patients_are_in_one_split(tmp_path: Path, patients: bool) -> None:
    rows = [
        [f"{'zyxw'[i % 4]}{i // 4}", f"P{i}", f"{NOTE[0]} Case {i // 2} {' ' * (i % 2)}end.", str(i % 2)]
        for i in range(60)
    ]
    if not patients:
        rows = [[name, *rest] for name, _, *rest in rows]
    write_table(tmp_path / "t.csv", [["key", *(["patient_id"] if patients else []), "note", "Mass"], *rows])
    split = dict(line.split(",") for line in splits(discover(tmp_path)).splitlines()[1:])
    pairs = [(split[a[patients]], split[b[patients]]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    assert all(a == b for a, b in pairs) is not patients
    assert {*split.values()} == {"train", "validation", "test"}
