"""suture.data.readers.omop: labels from MEASUREMENT and OBSERVATION."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from suture.core.errors import ConfigError, DataError, LabelError
from suture.data import workbooks
from suture.data.config import parse_data
from suture.data.readers import load_table, read_table
from suture.data.reading import Reading
from world import refused

NAN = np.nan

IMAGES = """image,person_id,visit_occurrence_id,date,split
a.png,101,301,2024-03-01,train
b.png,101,302,2024-03-08,train
c.png,102,,2024-03-05,validation
d.png,103,304,,test
"""

MEASUREMENT = """measurement_id,person_id,measurement_concept_id,measurement_date,value_as_number,\
value_as_concept_id,visit_occurrence_id,measurement_source_value
1,101,11,2024-03-01,,4188539,301,of a visit
2,101,11,2024-03-08,,4188540,302,absent at the next
3,102,11,2024-03-05,,4188540,399,of a day as the image has no visit
4,103,99,2024-03-05,7.5,,304,of no class
5,999,11,2024-03-05,,4188539,301,of a person without images
"""

OBSERVATION = """observation_id,person_id,observation_concept_id,observation_date,value_as_string,\
value_as_concept_id,visit_occurrence_id
1,103,22,2023-12-31,,4188539.0,304.0
2,101,22,2024-03-01,,4188540.0,
"""

BY_HAND = [[1, 0], [0, NAN], [0, NAN], [NAN, 1]]


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A site whose labels are known by hand."""
    for name, text in (("list", IMAGES), ("measurement", MEASUREMENT), ("observation", OBSERVATION)):
        (tmp_path / f"{name}.csv").write_text(text)
    return {
        "dataset": "omop",
        "root": tmp_path,
        "table": tmp_path / "list.csv",
        "measurements": tmp_path / "measurement.csv",
        "observations": tmp_path / "observation.csv",
        "classes": {"Mass": 11, "Effusion": 22},
    }


def read(given: dict[str, Any], **more: Any) -> Reading:
    return read_table(parse_data(given | more, "suture.toml"))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_yes_is_1_no_is_0_and_no_row_is_unknown(given: dict[str, Any]) -> None:
    reading = read(given)
    table = reading.table
    assert table.labels.names == ("Mass", "Pleural Effusion")
    assert table.images == ("a.png", "b.png", "c.png", "d.png")
    assert table.patients == ("101", "101", "102", "103")
    assert table.split == ("train", "train", "validation", "test")
    np.testing.assert_array_equal(table.y, BY_HAND)
    assert not reading.faults
    assert len(reading.notes) == 1
    assert "5 of 6" in reading.notes[0]


def test_one_table_is_enough_and_labels_choose(given: dict[str, Any]) -> None:
    del given["observations"]
    np.testing.assert_array_equal(read(given, classes={"Mass": 11}).table.y[:, 0], [1, 0, 0, NAN])
    chosen = {"classes": {"lump": 11, "Edema": 99}, "labels": ["lump"], "values": {"": "unknown"}}
    assert load_table(parse_data(given | chosen, "x")).labels.names == ("Lump",)
    del given["measurements"]
    with refused("suture.toml", "[data] measurements", "observations", by=ConfigError):
        read(given)


def test_other_values_need_a_meaning(given: dict[str, Any]) -> None:
    change(given["measurements"], "4188540,302", "45878583,302")
    change(given["measurements"], "4188540,399", ",399")
    reading = read(given)
    for fault, row, line in zip(
        reading.faults, (3, 4), ('{ "45878583" = "?" }', '{ "" = "unknown" }'), strict=True
    ):
        assert f"{given['measurements']} row {row}: class 'Mass'" in fault
        assert fault.endswith(f"values = {line}")
    np.testing.assert_array_equal(reading.table.y[:, 0], [1, NAN, NAN, NAN])
    reading = read(given, values={"45878583": 0, "": "unknown"})
    assert not reading.faults
    np.testing.assert_array_equal(reading.table.y[:, 0], [1, 0, NAN, NAN])


def test_every_fault_names_its_row_and_no_person_visit_or_date(given: dict[str, Any]) -> None:
    measurements = given["measurements"]
    change(measurements, "4188540,302", "Doe John,302")  # no concept
    change(measurements, "2024-03-05,,4188540", "99.88.7777,,4188540")
    change(given["table"], "b.png,101,302,2024-03-08,train", "b.png,101,302,88.77.6666,test")
    given["observations"].write_text(OBSERVATION + "3,101,22,2024-03-01,,4188539,301\n")
    reading = read(given, classes=given["classes"] | {"Hernia": 33})
    for named in (
        f"{measurements} row 3: class 'Mass'",
        f"{measurements} row 4: column 'measurement_date'",
        f"{given['table']} row 3: column 'date'",
        f"{given['table']} rows 2, 3: 1 patient in two splits",
        f"{given['table']} row 2: class 'Pleural Effusion' is both present and absent in",
        f"{given['observations']} row 3 and {given['observations']} row 4",
        "the code 33 of 'Hernia'",
    ):
        assert any(named in fault for fault in reading.faults), named
    assert len(reading.faults) == 6
    said = " ".join((*reading.faults, *reading.notes)).replace(str(given["root"]), "")
    for secret in ("101", "102", "103", "301", "302", "304", "2024-03-08", "99.88", "88.77", "Doe"):
        assert secret not in said
    assert np.isnan(reading.table.y[2, 0])
    with refused("row 3", "4 more", by=DataError):
        load_table(parse_data(given, "suture.toml"))


def test_a_parquet_may_have_more_rows_than_are_held(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbooks, "MOST_CELLS", 20)
    monkeypatch.setattr(
        "suture.data.reading.workbook_rows", lambda path, only: workbooks.decode(path, only, path)
    )
    for key in ("measurements", "observations"):
        pd.read_csv(given[key]).to_parquet(given[key].with_suffix(".parquet"))
        given[key] = given[key].with_suffix(".parquet")
    assert read(given).table.y[0, 0] == 1
    monkeypatch.setattr(workbooks, "MOST_TEXT", 20)
    with refused("measurement.parquet", "5 rows", by=DataError):
        read(given)


@pytest.mark.parametrize(
    ("more", "error", "named"),
    [
        ({"classes": {}}, ConfigError, ["[data] classes"]),
        ({"classes": {"Mass": "eleven"}}, ConfigError, ["[data] classes.Mass = 'eleven'"]),
        ({"classes": {"Mass": 0}}, ConfigError, ["[data] classes.Mass = 0"]),
        ({"classes": {"Mass": 11, "Edema": 11}}, ConfigError, ["two classes"]),
        ({"classes": {"Effusion": 11, "Pleural Effusion": 22}}, LabelError, ["'Pleural Effusion'"]),
        ({"values": {"yes": 1}}, ConfigError, ["[data] values.yes"]),
        ({"values": {"5": 2}}, ConfigError, ["[data] values.5 = 2"]),
        ({"labels": ["Maas"]}, ConfigError, ["'Maas'", "'Mass'"]),
        ({"text_column": "report"}, ConfigError, ["text_column", "'hospital'", "'omop'"]),
        ({"patient_column": "patient"}, DataError, ["'patient'", "[data] patient_column"]),
        ({"split_column": "fold"}, DataError, ["'fold'", 'split = "patients"']),
        ({"observations": Path("absent.csv")}, DataError, ["absent.csv"]),
    ],
)
def test_a_wrong_key_is_refused(
    given: dict[str, Any], more: dict[str, Any], error: type[Exception], named: list[str]
) -> None:
    with refused(*named, by=error):
        read(given, **more)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            MEASUREMENT.replace("value_as_concept_id", "value"),
            ["'value_as_concept_id'", "[data] measurements"],
        ),
        (MEASUREMENT.replace("person_id", "PERSON_ID"), ["'person_id'", "'PERSON_ID'"]),
        (MEASUREMENT.replace("1,101,11", "1,1,101,11", 1), ["row 2", "9 cells", "8"]),
        ("", ["'person_id', 'visit_occurrence_id', "]),
        ("\n\r\n", ["empty"]),
        ("person_id,\udce4\n", ["UTF-8"]),
    ],
)
def test_a_table_of_another_form_is_refused(given: dict[str, Any], content: str, named: list[str]) -> None:
    given["measurements"].write_bytes(content.encode(errors="surrogateescape"))
    with refused("measurement.csv", *named, by=DataError):
        read(given)


def test_a_number_with_leading_zeros_is_the_same_person(given: dict[str, Any]) -> None:
    change(given["table"], "b.png,101,302,2024-03-08,train", "b.png,00101,0302,2024-03-08,test")
    change(given["measurements"], "2,101,11", "2,0101,11")
    reading = read(given)
    assert reading.table.patients == ("101", "101", "102", "103")
    np.testing.assert_array_equal(reading.table.y[:, 0], [1, 0, 0, NAN])
    (fault,) = reading.faults
    assert "1 patient" in fault
