"""suture_prepare.discovery: what a hospital's folder seems to be."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hospitals import german, image, listed, plain, table
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet, canonical
from suture.data.config import parse_data
from suture.data.images import ImageSource, stem
from suture.data.readers import read_table
from suture_prepare.description import Answers, Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import labelled_table, splits


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
    assert found.warnings == ()
    assert found.left_out == {
        "Größe": "it has one value in every row",
        "Age": "30 values other than 1, 0, yes, no or blank",
        "Sex": "its name does not sound like a finding; if it is one, add it to labels",
        "No Finding": "it says that nothing was found; that is not a class",
    }
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
    assert any(
        "1 image with No Finding and a finding, which counts as present" in note for note in read.notes
    )
    assert y["s2.png"] == [0, 1]
    assert np.isnan(y["s3.png"]).all()


def test_strange_words_are_asked_about_and_missing_images_counted(tmp_path: Path) -> None:
    found = discover(plain(tmp_path))
    assert found.data["split_column"] == "split"
    assert found.data["labels"] == ["Mass"]
    assert found.data["partial"] is True
    assert any("'Hernia' is left out: its values are kaum, sicher." in warning for warning in found.warnings)
    assert any(
        "labels.csv: 1 of 30 rows without an image, such as '0.png' in row 2" in w for w in found.warnings
    )
    given_ = found.data | {"labels": ["Mass", "Hernia"], "values": {"sicher": 1, "kaum": 0}}
    reading = read_table(parse_data(given_, "test"))
    assert reading.faults == ()
    assert reading.absent == 1
    assert set(reading.table.y[:, 1]) == {0.0, 1.0}


def test_an_unknown_word_names_file_row_and_the_line_to_add(tmp_path: Path) -> None:
    plain(tmp_path)
    data = {"dataset": "hospital", "root": str(tmp_path / "images"), "table": str(tmp_path / "labels.csv")}
    fault = read_table(parse_data(data, "test")).faults[0]
    assert "labels.csv rows 2, 3" in fault
    line = fault.splitlines()[-1]
    assert line == 'values = { "kaum" = "?", "sicher" = "?" }'
    pasted = read_table(
        parse_data(
            data
            | tomllib.loads(line.replace('"kaum" = "?", "sicher" = "?"', '"kaum" = "unknown", "sicher" = 1')),
            "test",
        )
    )
    assert pasted.faults == ()
    assert np.nansum(pasted.table.y[:, 1]) == 24


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


def test_the_last_number_of_a_uid_names_the_image_and_not_the_series(tmp_path: Path) -> None:
    rows = [["SOPInstanceUID", "patient", "Mass"]]
    for i in range(8):
        image(tmp_path / "x" / f"1.2.826.{i // 2}.{i % 2}.png", i)
        rows.append([f"1.2.826.{i // 2}.{i % 2}", f"p{i}", str(i % 2)])
    image(tmp_path / "x" / "1.2.826.0.png", 9)  # named like a series
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert found.data["image_match"] == "stem"
    assert "partial" not in found.data
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert read.faults == ()
    assert read.table.images == tuple(f"{row[0]}.png" for row in rows[1:])


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
    ("make", "message"),
    [
        (lambda folder: folder.joinpath("t.csv").write_text("image,Mass\na.png,1\n"), "contains no image"),
        (lambda folder: image(folder / "a.png", 1), "contains no table"),
        (
            lambda folder: (image(folder / "a.png", 1), table(folder / "t.csv", [["x", "y"], ["1", "2"]])),
            "no column of t.csv names the images",
        ),
        (
            lambda folder: (
                image(folder / "a.png", 1),
                table(folder / "t.csv", [["image", "age"], ["a.png", "44"]]),
            ),
            "no label columns",
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
    data = discover(tmp_path).data
    assert data["labels"] == ["Mass"]
    read = read_table(parse_data(data | {"split": "patients"}, "t"))
    assert read.table.y[:, 0].tolist() == [1, 0, 1, 0]
    assert read.table.patients == ("Ä0", "Ä1", "Ä2", "Ä3")


@pytest.mark.complete
@pytest.mark.parametrize("name", ["t.xlsx", "t.parquet", "t.csv"])
def test_a_workbook_is_discovered_and_read_like_a_csv(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame(
        {
            "image": [f"{i}.png" for i in range(8)],
            "PatientID": range(8),
            "Age": range(40, 48),
            "Mass": [1, 0, None, 1] * 2,
            "Edema": [True, False] * 4,
        }
    )
    write = {"t.xlsx": frame.to_excel, "t.parquet": frame.to_parquet, "t.csv": frame.to_csv}[name]
    for i in range(8):
        image(tmp_path / "images" / f"{i}.png", i)
    write(tmp_path / name, index=False)
    found = discover(tmp_path)
    assert found.data["labels"] == ["Mass", "Edema"]
    assert not {"delimiter", "encoding"} & found.data.keys()
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert read.faults == ()
    assert read.table.y[:4, 1].tolist() == [1, 0, 1, 0]
    assert np.isnan(read.table.y[2, 0])
    assert read.table.patients[3] == "3"


def test_a_decimal_comma_is_a_number_and_said(tmp_path: Path) -> None:
    rows = [["image", "patient", "Mass"]]
    rows += [[f"{i}.png", f"p{i}", ("1,0", "0,0", "-1,0")[i % 3]] for i in range(6)]
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
    table(tmp_path / "t.csv", rows, ";")
    read = read_table(parse_data(discover(tmp_path).data | {"split": "patients"}, "t"))
    assert read.table.y[:2, 0].tolist() == [1, 0]
    assert np.isnan(read.table.y[2, 0])
    assert any("'1,0' is read as present (2 cells)" in note for note in read.notes)


def labelled(folder: Path, header: list[str], cells: list[list[str]]) -> Discovery:
    """Discover a table of 12 images whose label columns repeat some rows."""
    rows = [["image", "patient", *header]]
    for i in range(12):
        image(folder / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", *cells[i % len(cells)]])
    table(folder / "t.csv", rows)
    return discover(folder)


def test_a_table_that_leaves_its_labels_open_is_not_evaluated(tmp_path: Path) -> None:
    labelled(tmp_path, ["Schwere"], [["0"], ["1"], ["2"]])
    with (
        pytest.raises(DataError, match=r"(?s)'Schwere'.*suture init"),
        labelled_table(tmp_path, None, "test"),
    ):
        pass


@pytest.mark.parametrize(
    ("column", "words", "classes"),
    [
        ("histology", "adenoma serrated lipoma", True),
        ("Befund", "Karzinom Adenom Normalgewebe", True),
        ("subtype", "HP TVA NCM", True),
        ("tumor_type", "IDC ILC DCIS", True),
        ("Diagnose", "Ekzem Psoriasis", True),
        ("Polypenform", "gestielt flach sessil", True),
        ("tissue", "stroma tumor fat", True),
        ("T stage", "T1 T2 T3", True),
        ("Dignität", "gutartig bösartig", True),
        ("growth pattern", "lepidic acinar solid", True),
        ("sex", "weibl. männl. divers", False),
        ("view position", "standing lying", False),
        ("ManufacturerModelName", "Axiom Ysio", False),
        ("Ward", "north south", False),
        ("cohort", "pilot main", False),
        ("Seite", "re li", False),
        ("referring physician", "Meier Schmidt", False),
        ("location", "caecum rectum", False),
        ("X", "PA LATERAL", False),
        ("who", "w1 w2 w3", False),
    ],
)
def test_a_column_of_words_is_offered_as_classes_or_is_not(
    column: str, words: str, classes: bool, tmp_path: Path
) -> None:
    found = labelled(
        tmp_path, ["Mass", column], [["1", words.split()[i % len(words.split())]] for i in range(6)]
    )
    assert [*found.offered] == [column] * classes
    assert f"finding_column = {json.dumps(column)}" in "".join(found.warnings) or not classes
    assert found.data["labels"] == ["Mass"]


@pytest.mark.parametrize(
    ("meaning", "cells"),
    [
        (
            "unknown",
            ["k.A.", "k. A.", "keine Angabe", "n.b.", "fehlt", "nicht beurteilbar", "s. Text", "-", "--"],
        ),
        (
            "none",
            ["o.B.", "oB", "Unauffällig", "regelrecht", "healthy", "NAD", "RAS", "within normal limits"],
        ),
        ("both", ["Mass + Edema", "Mass & Edema", "Mass und Edema", "Mass; edema"]),
        ("asked", ["9", "-99", "0", "x", "None", "keine", "negativ", "Edema?", "Mass/Edema", "Mass / Edema"]),
        ("asked", ["no mass", "no_mass", "V.a. Mass", "V. a. Mass", "R/O mass", "Mass ausgeschlossen"]),
        (
            "asked",
            [
                "possible mass",
                "fraglich Nodule",
                "kein Mass; kein Edema",
                "Mass mit V.a. Edema",
                "Mass (possible)",
                "/",
            ],
        ),
        ("class", ["Her2+", "Wound", "No DR", "Grade 2"]),
    ],
)
def test_a_value_that_says_nothing_by_itself_is_not_a_class(
    meaning: str, cells: list[str], tmp_path: Path
) -> None:
    for cell in cells:
        found = labelled(tmp_path, ["Befund"], [["Mass"], ["Edema"], [cell]])
        own = [canonical(cell)] if meaning == "class" else []
        assert found.data["labels"] == sorted(["Edema", "Mass", *own]), cell
        assert found.data.get("values", {}) == ({cell: "?"} if meaning == "asked" else {}), cell
        assert found.is_draft == (meaning == "asked"), cell
        data = found.data | {"split": "patients"}
        if found.is_draft:
            with pytest.raises(ConfigError, match="values"):
                parse_data(data, "t")
            assert any(repr(cell) in text for text in found.warnings), cell
            data |= {"values": {cell: "unknown"}}
        expected = {"none": [0, 0], "both": [1, 1], "class": [0, 0]}.get(meaning, [np.nan, np.nan])
        table_ = read_table(parse_data(data, "t")).table.restrict(LabelSet(("Edema", "Mass")))
        np.testing.assert_array_equal(table_.y[2], np.float32(expected), cell)


def test_classes_that_exclude_one_another_are_multiclass(tmp_path: Path) -> None:
    one_hot = labelled(
        tmp_path / "a", ["MEL", "NV", "BCC"], [["1", "0", "0"], ["0", "1", "0"], ["0", "0", "1"]]
    )
    assert one_hot.data["label_type"] == "multiclass"
    assert '"multilabel" if one may have several' in one_hot.reasons["label_type"]
    assert read_table(parse_data(one_hot.data | {"split": "patients"}, "t")).faults == ()
    for name, last in (("two", ["1", "0", "1"]), ("none", ["0", "0", "0"]), ("unknown", ["1", "", "0"])):
        other = labelled(tmp_path / name, ["MEL", "NV", "BCC"], [["1", "0", "0"], ["0", "1", "0"], last])
        assert "label_type" not in other.data


def test_a_column_of_one_class_a_row_is_multiclass(tmp_path: Path) -> None:
    asked = labelled(tmp_path, ["diagnosis", "smoker"], [["rust", "1"], ["blight", "0"], ["mildew", "0"]])
    assert asked.warnings[0].endswith('value_column = "smoker"')
    assert "label_type" not in asked.data
    found = discover(tmp_path, Answers(no_labels=("smoker",)))
    assert found.data["finding_column"] == "diagnosis"
    assert found.data["labels"] == ["Blight", "Mildew", "Rust"]
    assert found.data["label_type"] == "multiclass"
    assert found.left_out == {"smoker": "you answered that it is not a finding"}
    assert found.warnings == ()
    table_ = read_table(parse_data(found.data | {"split": "patients"}, "t")).table
    assert table_.labels.label_type == "multiclass"
    assert table_.y[:3].tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_grades_are_never_a_class(tmp_path: Path) -> None:
    found = labelled(tmp_path, ["Mass", "DR grade"], [["1", "0"], ["0", "1"], ["1", "2"], ["0", "3"]])
    assert found.data["labels"] == ["Mass"]
    assert found.left_out == {"DR grade": "its values are 0, 1, 2, 3"}
    line = found.warnings[0].splitlines()[-1]
    assert line == 'values = { "2" = 1, "3" = 1 }  # present from 1 on'
    data = found.data | {"split": "patients", "labels": ["Mass", "DR grade"]}
    read = read_table(parse_data(data | tomllib.loads(line), "t"))
    assert read.faults == ()


def test_every_column_has_a_meaning_or_a_reason(tmp_path: Path) -> None:
    found = labelled(
        tmp_path,
        ["Mass", "implant", "Age", "note", "Sex"],
        [["1", "0", "44", "", "1"], ["0", "1", "45", "", "0"]],
    )
    assert found.data["labels"] == ["Mass", "implant"]
    assert found.doubtful == ("implant",)
    assert any("is 'implant' a finding?" in warning for warning in found.warnings)
    named = {found.data["image_column"], found.data["patient_column"], *found.data["labels"], *found.left_out}
    assert named == set(found.columns)


@pytest.mark.parametrize(
    ("column", "name", "asked"),
    [
        ("Pleural effusion?", "Pleural effusion", False),
        ("Mass*", "Mass", False),
        ("$Edema", "Edema", False),
        ("Mass [0/1]", "Mass", False),
        ("Erguß 😀 links", "Erguß links", True),
        ("smoker?", "smoker", True),
    ],
)
def test_a_column_with_other_signs_is_a_label_by_a_synonym(
    column: str, name: str, asked: bool, tmp_path: Path
) -> None:
    found = labelled(tmp_path, ["Hernia", column], [["1", "0"], ["0", "1"], ["1", "1"]])
    assert found.data["labels"] == ["Hernia", column]
    assert found.data["synonyms"] == {column: name}
    assert found.doubtful == ((column,) if asked else ())
    labels = read_table(parse_data(found.data | {"split": "patients"}, "tests")).table.labels
    assert labels.names == ("Hernia", canonical(name))


@pytest.mark.parametrize(
    ("column", "other"), [("Mass?", "mass"), ("Mass?", "Mass!"), ("😀", "Mass"), ("?", "Mass")]
)
def test_a_column_whose_name_without_signs_is_taken_is_asked_about(
    column: str, other: str, tmp_path: Path
) -> None:
    found = labelled(tmp_path, ["Hernia", column, other], [["1", "0", "1"], ["0", "1", "0"], ["1", "1", "0"]])
    assert column in found.left_out
    assert any(f"column {column!r} is left out" in warning for warning in found.warnings)
    assert column not in found.data.get("synonyms", {})


def test_blank_findings_are_counted(tmp_path: Path) -> None:
    found = labelled(tmp_path, ["Findings"], [["Mass|Edema"], [""], ["No Finding"]])
    said = "column 'Findings': 4 blank cells, read as unknown; where nothing was found, write No Finding"
    assert any(said in warning for warning in found.warnings)
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert any(said in note for note in read.notes)
    assert np.isnan(read.table.y[1]).all()
    assert read.table.y[2].tolist() == [0, 0]


def test_no_finding_beside_a_finding_in_one_cell_is_noted(tmp_path: Path) -> None:
    found = labelled(tmp_path, ["Findings"], [["Mass|normal"], ["Edema"], ["No Finding"]])
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert any("4 images with No Finding and a finding" in note for note in read.notes)
    found = labelled(tmp_path, ["Findings"], [["Mass|Edema"], ["Edema"], ["No Finding"]])
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert not any("No Finding and" in note for note in read.notes)


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
    for i in range(4):
        image(tmp_path / "images" / f"{i}.png", i)
    (tmp_path / "README.txt").write_text('Thank you, for using, our data.\n"Unfinished\n')
    (tmp_path / "codes.csv").write_text("code,word\n1,a,b\n")
    rows = [["image", "patient", "Mass"], *([f"{i}.png", f"p{i}", str(i % 2)] for i in range(4))]
    table(tmp_path / "tables" / "labels.csv", rows)
    found = discover(tmp_path)
    assert found.data["table"] == str(tmp_path / "tables" / "labels.csv")
    assert [w for w in found.warnings if "skipped" in w] == [
        f"skipped: {tmp_path / 'codes.csv'} row 2 has 3 cells where the header has 2; "
        "remove lines above the header, and quote cells that hold the delimiter"
    ]


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
        ward = "ab"[i % 2]
        image(tmp_path / "img" / ward / f"{i // 2}.png", i)  # each name twice
        rows.append([cell.format(ward, i // 2), f"p{i}", str(i % 2)])
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert "partial" not in found.data
    assert "image_match" not in found.data
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert read.table.images[:4] == ("a/0.png", "b/0.png", "a/1.png", "b/1.png")


def test_images_elsewhere_are_found_by_absolute_paths(tmp_path: Path) -> None:
    rows = [["image", "patient", "Mass"]]
    for i in range(4):
        image(tmp_path / "pacs" / "ab"[i % 2] / f"{i}.png", i)
        rows.append([str(tmp_path / "pacs" / "ab"[i % 2] / f"{i}.png"), f"p{i}", str(i % 2)])
    table(tmp_path / "study" / "t.csv", rows)
    found = discover(tmp_path / "study")
    assert found.data["root"] == str(tmp_path / "pacs")
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert read.table.images == ("a/0.png", "b/1.png", "a/2.png", "b/3.png")


def test_rows_of_one_image_that_disagree_are_counted(tmp_path: Path) -> None:
    rows = [["image", "patient", "Mass", "Nodule"]]
    for i in range(6):
        image(tmp_path / "img" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", str(i % 2), "1"])
    table(tmp_path / "t.csv", [*rows, ["0.png", "p0", "1", "1"], ["1.png", "p1", "", "1"]])
    read = read_table(parse_data(discover(tmp_path).data | {"split": "patients"}, "t"))
    (note,) = read.notes
    assert "1 image with rows that contradict each other" in note


def test_the_only_linked_folder_holds_the_images(tmp_path: Path) -> None:
    """Tables are often kept beside a link to the store of images; a root may be a link."""
    rows = [["image", "patient", "Mass"]]
    for i in range(4):
        image(tmp_path / "store" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", str(i % 2)])
    table(tmp_path / "site" / "t.csv", rows)
    (tmp_path / "site" / "images").symlink_to(tmp_path / "store")
    found = discover(tmp_path / "site")
    assert found.data["root"] == str(tmp_path / "site" / "images")
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    assert read.table.images == ("0.png", "1.png", "2.png", "3.png")


def test_a_folder_that_may_not_be_listed_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "t.csv", [["image", "Mass"], ["0.png", "1"]])
    listed = os.scandir

    def closed(path: str) -> object:
        if Path(path).name == "images":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    image(tmp_path / "images" / "0.png", 0)
    monkeypatch.setattr("os.scandir", closed)
    with pytest.raises(DataError, match=r"images cannot be read: Permission denied$"):
        discover(tmp_path)


def test_a_dicom_without_a_suffix_is_an_image(tmp_path: Path) -> None:
    names = [f"1.2.840.{i}" for i in range(4)]
    for name in names:
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / name).write_bytes(bytes(128) + b"DICM")
    (tmp_path / "x" / "LICENCE").write_bytes(bytes(200))
    table(
        tmp_path / "t.csv",
        [["uid", "patient", "Mass"], *([n, f"p{n}", "01"[i % 2]] for i, n in enumerate(names))],
    )
    found = discover(tmp_path)
    assert found.data["image_column"] == "uid"
    assert "image_match" not in found.data
    assert "partial" not in found.data
    read = read_table(parse_data(found.data | {"split": "patients"}, "t"))
    with ImageSource(Path(found.data["root"])) as source:
        assert all(name in source for name in read.table.images)


def test_answers_are_followed(tmp_path: Path) -> None:
    rows = [["image", "who", "Mass", "ICU"]]
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"w{i // 2}", str(i % 2), "1"])
    table(tmp_path / "t.csv", rows)
    assert not discover(tmp_path).has_patients
    found = discover(tmp_path, Answers(patient="who", no_labels=("ICU",)))
    assert found.data["patient_column"] == "who"
    assert found.data["labels"] == ["Mass"]
    assert found.left_out == {"ICU": "you answered that it is not a finding"}
    assert found.warnings == ()


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
    with pytest.raises(DataError, match="'exclude', 'holdout' is not a split"):
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
    with pytest.raises(DataError, match=r"row 4: .*'PatientID'"):
        discover(tmp_path)


def test_a_findings_list_is_preferred_to_flags(tmp_path: Path) -> None:
    rows = [["image", "patient", "Findings", "Ventilated", "Deleted"]]
    for i in range(6):
        image(tmp_path / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", "Mass|Edema", "1", "0"])
    table(tmp_path / "t.csv", rows)
    found = discover(tmp_path)
    assert found.data["labels"] == ["Edema", "Mass"]
    assert found.left_out == {
        "Ventilated": "'Findings' lists the findings",
        "Deleted": "'Findings' lists the findings",
    }


def test_rows_of_one_image_agree_on_patient_and_split(tmp_path: Path) -> None:
    folder = listed(tmp_path)
    tsv = folder / "findings.tsv"
    tsv.write_text(tsv.read_text() + "s2\tp9\tMass\r\n")
    data = discover(folder).data | {"split": "patients"}
    assert "patient or split" in read_table(parse_data(data, "t")).faults[0]


def test_missing_images_keep_their_patients_in_the_splits(tmp_path: Path) -> None:
    found = discover(german(tmp_path))
    (tmp_path / "Bilder" / "000.png").unlink()
    (tmp_path / "Bilder" / "001.png").unlink()
    assert splits(discover(tmp_path)) == splits(found)


NOTE = ("The heart is enlarged and the lungs are clear.", "A small nodule is seen in the left upper lobe.")
HAN = ("心影增大，双肺清晰，未见胸腔积液。", "左上肺见小结节影，建议随访复查。")


@pytest.mark.parametrize("notes", [NOTE, HAN])
@pytest.mark.parametrize("column", ["diagnosis", "specialty", "Medical_Speciality", "Fachgebiet"])
def test_a_table_of_documents_has_a_class_a_row(tmp_path: Path, notes: tuple[str, str], column: str) -> None:
    rows = [[f"n{i}", f"{notes[i % 2]} {i}", ("Cardiology", "Urology", "Oncology")[i % 3]] for i in range(12)]
    rows[3][1] = " "
    table(tmp_path / "t.csv", [["key", "note", column], *rows])
    found = discover(tmp_path)
    assert [
        found.data.get(key) for key in ("text_column", "image_column", "finding_column", "label_type")
    ] == [
        "note",
        "key",
        column,
        "multiclass",
    ]
    assert found.data["partial"] is True
    assert any("1 of 12 rows without a document, such as 'n3' in row 5" in text for text in found.warnings)
    assert all("image" not in text for text in found.warnings)


@pytest.mark.parametrize("patients", [False, True])
def test_equal_documents_without_patients_are_in_one_split(tmp_path: Path, patients: bool) -> None:
    rows = [
        [f"{'zyxw'[i % 4]}{i // 4}", f"P{i}", f"{NOTE[0]} Case {i // 2} {' ' * (i % 2)}end.", str(i % 2)]
        for i in range(60)
    ]
    table(tmp_path / "t.csv", [["key", "patient_id", "note", "Mass"], *rows])
    if not patients:
        table(tmp_path / "t.csv", [["key", "note", "Mass"], *([a, *rest] for a, _, *rest in rows)])
    split = {}
    for line in splits(discover(tmp_path)).splitlines()[1:]:
        split.update([line.split(",")])
    pairs = [(split[a[patients]], split[b[patients]]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    assert all(a == b for a, b in pairs) is not patients
    assert {*split.values()} == {"train", "validation", "test"}
