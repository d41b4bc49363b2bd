"""Tables with a row for each image and finding, and a column that says whether it is present."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hospitals import image, table
from suture.core.errors import ConfigError, DataError
from suture.data.config import parse_data
from suture.data.readers import read_table
from suture.data.reading import Reading
from suture_prepare.description import Discovery
from suture_prepare.discovery import discover

NAN = float("nan")
ROWS = (
    ("a.png", "Mass", "1"),
    ("a.png", "Edema", "0"),
    ("b.png", "Mass", "0"),
    ("b.png", "Nodule", "1"),
    ("c.png", "Edema", "0"),
    ("c.png", "Nodule", "0"),
    ("d.png", "No Finding", "1"),
    ("e.png", "No Finding", "0"),
)


def found(folder: Path, value: str, rows: Sequence[Sequence[str]] = ROWS) -> Discovery:
    for i, name in enumerate(sorted({row[0] for row in rows})):
        image(folder / "images" / name, i)
    table(folder / "t.csv", [["image", "LabelName", value], *map(list, rows)])
    return discover(folder)


def read(discovery: Discovery) -> Reading:
    return read_table(parse_data(discovery.data | {"split": "patients"}, "t"))


@pytest.mark.parametrize("value", ["Confidence", "present", "is_positive", "Result"])
def test_a_verified_negative_is_absent_and_an_unnamed_class_unknown(value: str, tmp_path: Path) -> None:
    reading = read(found(tmp_path, value))
    assert reading.faults == ()
    assert reading.table.labels.names == ("Edema", "Mass", "Nodule")
    y = dict(zip(reading.table.images, reading.table.y.tolist(), strict=True))
    np.testing.assert_equal(y["a.png"], [0, 1, NAN])
    np.testing.assert_equal(y["b.png"], [NAN, 0, 1])
    np.testing.assert_equal(y["c.png"], [0, NAN, 0])
    np.testing.assert_equal(y["d.png"], [0, 0, 0])
    np.testing.assert_equal(y["e.png"], [NAN, NAN, NAN])


def test_words_are_read_and_doubtful_ones_are_unknown_and_asked_about(tmp_path: Path) -> None:
    words = {"1": "yes", "0": "no"}
    rows = [(i, c, words[v]) for i, c, v in ROWS] + [("c.png", "Mass", "perhaps")]
    discovery = found(tmp_path, "present", rows)
    assert discovery.data["values"] == {"perhaps": "unknown"}
    assert any("'perhaps' mean" in warning for warning in discovery.warnings)
    reading = read(discovery)
    assert reading.faults == ()
    np.testing.assert_equal(reading.table.y[reading.table.images.index("c.png")], [0, NAN, 0])


def test_probabilities_are_refused_with_a_remedy(tmp_path: Path) -> None:
    rows = [(i, c, f"0.{k + 1}") for k, (i, c, _) in enumerate(ROWS)]
    with pytest.raises(DataError, match=r"t.csv, column 'Confidence': .*threshold"):
        found(tmp_path, "Confidence", rows)


def test_another_column_that_differs_within_an_image_is_asked_about(tmp_path: Path) -> None:
    discovery = found(tmp_path, "IsInside")
    assert "value_column" not in discovery.data
    assert any('value_column = "IsInside"' in warning for warning in discovery.warnings)


def test_a_value_without_a_meaning_is_a_fault_that_names_the_rows(tmp_path: Path) -> None:
    discovery = found(tmp_path, "Confidence", [*ROWS, ("a.png", "Nodule", "maybe")])
    data = {key: value for key, value in discovery.data.items() if key != "values"}
    faults = read_table(parse_data(data | {"split": "patients"}, "t")).faults
    assert any("row 10, column 'Confidence': 'maybe'" in fault for fault in faults)


def test_a_row_without_a_value_column_still_says_that_its_finding_is_present(tmp_path: Path) -> None:
    reading = read(found(tmp_path, "remark", [(i, c, f"note {k}") for k, (i, c, _) in enumerate(ROWS)]))
    y = dict(zip(reading.table.images, reading.table.y.tolist(), strict=True))
    assert y["a.png"] == [1, 1, 0]


SINGLE = [(f"{i}.png", ("Mass", "Edema", "Nodule")[i % 3], str(i // 3 % 2)) for i in range(12)]


def worded(one: str, zero: str, rows: Sequence[Sequence[str]] = SINGLE) -> list[tuple[str, str, str]]:
    return [(i, c, one if v == "1" else zero) for i, c, v in rows]


@pytest.mark.parametrize("name", ["status", "label", "negated", "IsInside", "smoker"])
@pytest.mark.parametrize("words", [("1", "0"), ("yes", "no"), ("True", "False")])
def test_a_flag_beside_one_finding_for_each_image_is_asked_about(
    name: str, words: tuple[str, str], tmp_path: Path
) -> None:
    discovery = found(tmp_path, name, worded(*words))
    assert discovery.data["finding_column"] == "LabelName"
    assert "label_type" not in discovery.data
    (warning,) = [warning for warning in discovery.warnings if "patients" not in warning]
    assert warning.splitlines()[-1] == f'value_column = "{name}"'
    assert "counts as present" in warning


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("vorhanden", ("sicher", "kaum")),
        ("valeur", ("certain", "douteux")),
        ("value", ("confirmed", "excluded")),
        ("Confidence", ("2", "3")),
        ("Confidence", ("high", "low")),
        ("present", ("seguro", "no")),
    ],
)
@pytest.mark.parametrize("rows", [SINGLE, ROWS])
def test_a_value_in_other_words_is_not_read_until_they_have_a_meaning(
    value: str, words: tuple[str, str], rows: Sequence[Sequence[str]], tmp_path: Path
) -> None:
    discovery = found(tmp_path, value, worded(*words, rows))
    assert discovery.data["value_column"] == value
    assert "label_type" not in discovery.data
    assert any(f"column {value!r}: what do" in warning for warning in discovery.warnings)
    assert discovery.is_draft
    with pytest.raises(ConfigError, match="values"):
        read(discovery)
    known = read(found(tmp_path, value, rows))
    discovery.data["values"] = dict(zip(words, (1, 0), strict=True))
    np.testing.assert_equal(read(discovery).table.y, known.table.y)


def test_other_words_beside_a_column_of_findings_are_no_label_of_their_own(tmp_path: Path) -> None:
    discovery = found(tmp_path, "Beurteilung", worded("sicher", "kaum"))
    (warning,) = [warning for warning in discovery.warnings if "patients" not in warning]
    assert "add it to labels" not in warning
    assert warning.splitlines()[-2:] == [
        'value_column = "Beurteilung"',
        'values = { "kaum" = "?", "sicher" = "?" }',
    ]
    assert "'LabelName'" in warning


def test_a_blank_value_column_is_none(tmp_path: Path) -> None:
    assert "value_column" not in found(tmp_path, "value", worded("", "")).data


@pytest.mark.parametrize("names", [("finding1", "finding2"), ("diagnosis", "secondary"), ("dx_1", "dx_2")])
def test_a_second_column_of_findings_is_named_with_the_remedy(names: tuple[str, str], tmp_path: Path) -> None:
    second = [(i, c, ("Nodule", "", "Hernia")[k % 3]) for k, (i, c, _) in enumerate(SINGLE)]
    for i, name in enumerate(sorted({row[0] for row in second})):
        image(tmp_path / "images" / name, i)
    table(tmp_path / "t.csv", [["image", *names], *map(list, second)])
    discovery = discover(tmp_path)
    assert "label_type" not in discovery.data
    (warning,) = [warning for warning in discovery.warnings if "Join these columns" in warning]
    assert all(repr(name) in warning for name in names)
