"""suture_prepare.label_discovery: which columns and cells are findings, and what is asked about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hospitals import site
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet, canonical
from suture.data.config import load_site_config, parse_data
from suture.data.readers import load_reading, read_table
from suture.data.reading import Reading
from suture_prepare.description import Answers, Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import labelled_table, write_study
from world import refused

NAN = np.nan
LONG = (
    ("a.png", "Mass", "1"),
    ("a.png", "Edema", "0"),
    ("b.png", "Mass", "0"),
    ("b.png", "Nodule", "1"),
    ("c.png", "Edema", "0"),
    ("c.png", "Nodule", "0"),
    ("d.png", "No Finding", "1"),
    ("e.png", "No Finding", "0"),
)
"""A row for each image and finding, and whether it is present."""

SINGLE = [(f"{i}.png", ("Mass", "Edema", "Nodule")[i % 3], str(i // 3 % 2)) for i in range(12)]
"""The same with one finding for each image."""


def labelled(folder: Path, header: Sequence[str], *cells: Sequence[str], **answers: Any) -> Discovery:
    """Discover a table of 12 images whose label columns repeat some rows."""
    rows = [[f"{i}.png", f"p{i}", *cells[i % len(cells)]] for i in range(12)]
    return discover(
        site(folder, ["image", "patient", *header], *rows), Answers(**answers) if answers else None
    )


def long(folder: Path, value: str, rows: Sequence[Sequence[str]] = LONG) -> Discovery:
    return discover(site(folder, ["image", "LabelName", value], *rows))


def read(found: Discovery, **more: Any) -> Reading:
    return read_table(parse_data(found.data | {"split": "patients"} | more, "t"))


def by_image(reading: Reading) -> dict[str, list[float]]:
    return dict(zip(reading.table.images, reading.table.y.tolist(), strict=True))


def worded(one: str, zero: str, rows: Sequence[Sequence[str]] = SINGLE) -> list[tuple[str, str, str]]:
    return [(i, c, one if v == "1" else zero) for i, c, v in rows]


OFFERED = [
    *("histology: adenoma serrated lipoma", "Befund: Karzinom Adenom Normalgewebe", "subtype: HP TVA NCM"),
    *("tumor_type: IDC ILC DCIS", "Diagnose: Ekzem Psoriasis", "Polypenform: gestielt flach sessil"),
    *("tissue: stroma tumor fat", "T stage: T1 T2 T3", "Dignität: gutartig bösartig"),
    "growth pattern: lepidic acinar solid",
]
NOT_OFFERED = [
    *("sex: weibl. männl. divers", "view position: standing lying", "ManufacturerModelName: Axiom Ysio"),
    *("Ward: north south", "cohort: pilot main", "Seite: re li", "referring physician: Meier Schmidt"),
    *("location: caecum rectum", "X: PA LATERAL", "who: w1 w2 w3"),
]


def test_a_column_of_words_is_offered_as_classes_or_is_not(tmp_path: Path) -> None:
    for text in (*OFFERED, *NOT_OFFERED):
        column, _, words = text.partition(": ")
        found = labelled(tmp_path, ["Mass", column], *(["1", word] for word in words.split()))
        assert [*found.offered] == [column] * (text in OFFERED), text
        assert text not in OFFERED or f"finding_column = {json.dumps(column)}" in "".join(found.warnings)
        assert found.data["labels"] == ["Mass"], text
    for words, few in ((6, True), (7, False)):  # of 12 images: each twice, on average
        found = labelled(tmp_path, ["Mass", "growth"], *(["1", f"w{chr(97 + i)}"] for i in range(words)))
        assert bool(found.offered) == few, words


@pytest.mark.parametrize(
    ("meaning", "cells"),
    [
        ("unknown", "k.A.|k. A.|keine Angabe|n.b.|fehlt|nicht beurteilbar|s. Text|-|--"),
        ("none", "o.B.|oB|Unauffällig|regelrecht|healthy|NAD|RAS|within normal limits"),
        ("both", "Mass + Edema|Mass & Edema|Mass und Edema|Mass; edema"),
        (
            "asked",
            "9|-99|0|x|None|keine|negativ|Edema?|Mass/Edema|Mass / Edema|/|Mass (possible)|possible mass",
        ),
        ("asked", "no mass|no_mass|V.a. Mass|V. a. Mass|R/O mass|Mass ausgeschlossen|fraglich Nodule"),
        ("asked", "kein Mass; kein Edema|Mass mit V.a. Edema"),
        ("class", "Her2+|Wound|No DR|Grade 2"),
    ],
)
def test_a_value_that_says_nothing_by_itself_is_not_a_class(meaning: str, cells: str, tmp_path: Path) -> None:
    labels = {"none": [0, 0], "both": [1, 1], "class": [0, 0]}.get(meaning, [NAN, NAN])
    for cell in cells.split("|"):
        found = labelled(tmp_path, ["Befund"], ["Mass"], ["Edema"], [cell])
        own = [canonical(cell)] if meaning == "class" else []
        assert found.data["labels"] == sorted(["Edema", "Mass", *own]), cell
        assert found.data.get("values", {}) == ({cell: "?"} if meaning == "asked" else {}), cell
        assert found.is_draft == (meaning == "asked"), cell
        if found.is_draft:
            with refused("values", by=ConfigError):
                read(found)
            assert any(repr(cell) in text for text in found.warnings), cell
        reading = read(found, **({"values": {cell: "unknown"}} if found.is_draft else {}))
        y = reading.table.restrict(LabelSet(("Edema", "Mass"))).y
        np.testing.assert_array_equal(y[2], np.float32(labels), cell)


def test_classes_that_exclude_one_another_are_multiclass(tmp_path: Path) -> None:
    header = ["MEL", "NV", "BCC"]
    one_hot = labelled(tmp_path, header, ["1", "0", "0"], ["0", "1", "0"], ["0", "0", "1"])
    assert one_hot.data["label_type"] == "multiclass"
    assert '"multilabel"' in one_hot.reasons["label_type"]
    assert read(one_hot).faults == ()
    for last in (["1", "0", "1"], ["0", "0", "0"], ["1", "", "0"]):
        assert "label_type" not in labelled(tmp_path, header, ["1", "0", "0"], ["0", "1", "0"], last).data


def test_a_column_of_one_class_a_row_is_multiclass(tmp_path: Path) -> None:
    header, cells = ["diagnosis", "smoker"], (["rust", "1"], ["blight", "0"], ["mildew", "0"])
    asked = labelled(tmp_path, header, *cells)
    assert asked.warnings[0].endswith('value_column = "smoker"')
    assert "label_type" not in asked.data
    found = labelled(tmp_path, header, *cells, no_labels=("smoker",))
    assert (found.data["finding_column"], found.data["label_type"]) == ("diagnosis", "multiclass")
    assert found.data["labels"] == ["Blight", "Mildew", "Rust"]
    assert (found.left_out.keys(), found.warnings) == ({"smoker"}, ())
    table = read(found).table
    assert table.labels.label_type == "multiclass"
    assert table.y[:3].tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_every_column_has_a_meaning_or_a_reason(tmp_path: Path) -> None:
    header = ["Mass", "implant", "Age", "note", "Sex", "patient_age", "age_related_md"]
    found = labelled(
        tmp_path, header, ["1", "0", "44", "", "1", "0", "0"], ["0", "1", "45", "", "0", "1", "1"]
    )
    assert found.data["labels"] == ["Mass", "implant", "age_related_md"]
    assert found.doubtful == ("implant", "age_related_md")
    assert any("'implant'" in warning for warning in found.warnings)
    named = {found.data["image_column"], found.data["patient_column"], *found.data["labels"], *found.left_out}
    assert named == set(found.columns)


def test_a_findings_list_is_preferred_to_flags(tmp_path: Path) -> None:
    found = labelled(tmp_path, ["Findings", "Ventilated", "Deleted"], ["Mass|Edema", "1", "0"])
    assert found.data["labels"] == ["Edema", "Mass"]
    assert found.left_out.keys() == {"Ventilated", "Deleted"}


def test_a_column_with_other_signs_is_a_label_by_a_synonym_unless_the_name_is_taken(tmp_path: Path) -> None:
    for column, name, asked in (
        ("Pleural effusion?", "Pleural effusion", False),
        ("Mass*", "Mass", False),
        ("$Edema", "Edema", False),
        ("Mass [0/1]", "Mass", False),
        ("Erguß 😀 links", "Erguß links", True),
        ("smoker?", "smoker", True),
    ):
        found = labelled(tmp_path, ["Hernia", column], ["1", "0"], ["0", "1"], ["1", "1"])
        assert found.data["labels"] == ["Hernia", column]
        assert found.data["synonyms"] == {column: name}
        assert found.doubtful == ((column,) if asked else ())
        assert read(found).table.labels.names == ("Hernia", canonical(name))
    for column, other in (("Mass?", "mass"), ("Mass?", "Mass!"), ("😀", "Mass"), ("?", "Mass")):
        found = labelled(
            tmp_path, ["Hernia", column, other], ["1", "0", "1"], ["0", "1", "0"], ["1", "1", "0"]
        )
        assert column in found.left_out
        assert any(repr(column) in warning for warning in found.warnings)
        assert column not in found.data.get("synonyms", {})


def test_blank_findings_and_no_finding_beside_a_finding_are_counted(tmp_path: Path) -> None:
    found = labelled(tmp_path, ["Findings"], ["Mass|Edema"], [""], ["No Finding"])
    reading = read(found)
    for said in (found.warnings, reading.notes):
        assert any("'Findings': 4 blank" in text for text in said)
    assert np.isnan(reading.table.y[1]).all()
    assert reading.table.y[2].tolist() == [0, 0]
    assert not any("and a finding" in note for note in reading.notes)
    both = labelled(tmp_path, ["Findings"], ["Mass|normal"], ["Edema"], ["No Finding"])
    assert any("4 images" in note for note in read(both).notes)


def test_a_draft_is_not_evaluated_and_is_read_once_its_words_have_a_meaning(tmp_path: Path) -> None:
    found = labelled(tmp_path / "a", ["Mass"], ["wohl"], ["kaum"])
    assert found.is_draft
    with refused("'Mass'", by=DataError), labelled_table(tmp_path / "a", None, "test"):
        pass
    write_study(tmp_path / "s", {"s": found})
    config = tmp_path / "s" / "s" / "suture.toml"
    written = config.read_text()
    for labels, line, wrong in (("[]", "", "labels"), ('["Mass"]', '"kaum" = "?", "wohl" = "?"', "values")):
        assert line in written
        config.write_text(written.replace("labels = []", f"labels = {labels}\nvalues = {{ {line} }}"))
        with refused(wrong, by=ConfigError):
            load_site_config(config)
    config.write_text(
        written.replace("labels = []", 'labels = ["Mass"]\nvalues = { "wohl" = 1, "kaum" = 0 }')
    )
    assert load_reading(load_site_config(config).data).table.y[:, 0].tolist() == [1, 0] * 6


# A row for each image and finding


@pytest.mark.parametrize("value", ["Confidence", "present", "is_positive", "Result"])
def test_a_verified_negative_is_absent_and_an_unnamed_class_unknown(value: str, tmp_path: Path) -> None:
    reading = read(long(tmp_path, value))
    assert reading.faults == ()
    assert reading.table.labels.names == ("Edema", "Mass", "Nodule")
    np.testing.assert_equal(
        by_image(reading),
        {
            "a.png": [0, 1, NAN],
            "b.png": [NAN, 0, 1],
            "c.png": [0, NAN, 0],
            "d.png": [0, 0, 0],
            "e.png": [NAN, NAN, NAN],
        },
    )


def test_words_are_read_and_doubtful_ones_are_unknown_and_asked_about(tmp_path: Path) -> None:
    found = long(tmp_path, "present", [*worded("yes", "no", LONG), ("c.png", "Mass", "perhaps")])
    assert found.data["values"] == {"perhaps": "unknown"}
    assert any("'perhaps'" in warning for warning in found.warnings)
    reading = read(found)
    assert reading.faults == ()
    np.testing.assert_equal(by_image(reading)["c.png"], [0, NAN, 0])
    del found.data["values"]
    assert any("row 10, column 'present': 'perhaps'" in fault for fault in read(found).faults)


def test_a_column_without_a_plain_name_does_not_say_whether_a_finding_is_present(tmp_path: Path) -> None:
    with refused("t.csv", "'Confidence'", "threshold", by=DataError):
        long(tmp_path, "Confidence", [(i, c, f"0.{k + 1}") for k, (i, c, _) in enumerate(LONG)])
    asked = long(tmp_path, "IsInside")
    assert "value_column" not in asked.data
    assert any('value_column = "IsInside"' in warning for warning in asked.warnings)
    remarks = long(tmp_path, "remark", [(i, c, f"note {k}") for k, (i, c, _) in enumerate(LONG)])
    assert by_image(read(remarks))["a.png"] == [1, 1, 0]
    assert "value_column" not in long(tmp_path, "value", worded("", "")).data


@pytest.mark.parametrize("name", ["status", "negated", "smoker"])
@pytest.mark.parametrize("words", [("1", "0"), ("yes", "no")])
def test_a_flag_beside_one_finding_for_each_image_is_asked_about(
    name: str, words: tuple[str, str], tmp_path: Path
) -> None:
    found = long(tmp_path, name, worded(*words))
    assert found.data["finding_column"] == "LabelName"
    assert "label_type" not in found.data
    (warning,) = [warning for warning in found.warnings if "patients" not in warning]
    assert warning.splitlines()[-1] == f'value_column = "{name}"'


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("vorhanden", ("sicher", "kaum")),
        ("valeur", ("certain", "douteux")),
        ("Confidence", ("2", "3")),
        ("present", ("seguro", "no")),
    ],
)
@pytest.mark.parametrize("rows", [SINGLE, LONG])
def test_a_value_in_other_words_is_not_read_until_they_have_a_meaning(
    value: str, words: tuple[str, str], rows: Sequence[Sequence[str]], tmp_path: Path
) -> None:
    found = long(tmp_path, value, worded(*words, rows))
    assert found.data["value_column"] == value
    assert "label_type" not in found.data
    assert any(repr(value) in warning for warning in found.warnings)
    assert found.is_draft
    with refused("values", by=ConfigError):
        read(found)
    found.data["values"] = dict(zip(words, (1, 0), strict=True))
    np.testing.assert_equal(read(found).table.y, read(long(tmp_path, value, rows)).table.y)


def test_other_words_beside_a_column_of_findings_are_no_label_of_their_own(tmp_path: Path) -> None:
    found = long(tmp_path, "Beurteilung", worded("sicher", "kaum"))
    (warning,) = [warning for warning in found.warnings if "patients" not in warning]
    lines = ['value_column = "Beurteilung"', 'values = { "kaum" = "?", "sicher" = "?" }']
    assert warning.splitlines()[-2:] == lines
    assert "'LabelName'" in warning


@pytest.mark.parametrize("names", [("finding1", "finding2"), ("diagnosis", "secondary")])
def test_a_second_column_of_findings_is_named(names: tuple[str, str], tmp_path: Path) -> None:
    second = [(i, c, ("Nodule", "", "Hernia")[k % 3]) for k, (i, c, _) in enumerate(SINGLE)]
    found = discover(site(tmp_path, ["image", *names], *second))
    assert "label_type" not in found.data
    assert [warning for warning in found.warnings if all(repr(name) in warning for name in names)]


VOTES = [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("chosen", "values"),
    [("majority", [1, 1, 0, 0]), ("merge", [1, 1, 1, 0]), (0.3, [1, 1, 1, 0]), (1.0, [1, 0, 0, 0])],
)
@pytest.mark.parametrize("rater", ["Reader", "annotator_id", "radiologist"])
def test_readers_of_an_image_vote(chosen: str | float, values: list[int], rater: str, tmp_path: Path) -> None:
    rows = [[f"{i}.png", f"R{j}", vote] for i in range(8) for j, vote in enumerate(VOTES[i % 4])]
    found = discover(site(tmp_path, ["name", rater, "Mass"], *rows))
    assert found.data["repeated"] == "majority"
    reading = read(found, repeated=chosen)
    assert reading.table.y[:, 0].tolist() == values * 2
    assert any("4 images" in note for note in reading.notes)
