"""suture.data.readers.linked and .answers: which answer belongs to which image."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hypothesis_profiles import examples
from suture.core.errors import ConfigError, DataError
from suture.data.config import parse_data
from suture.data.readers import read_table
from suture.data.readers.answers import Answer, Place, Remarks, day_of
from suture.data.readers.linked import read_linked
from suture.data.readers.omop import OmopConfig
from suture.data.reading import Reading
from world import refused, write_table

NAN = np.nan
DAYS = ("2024-03-01", "2024-03-02", "")
Image = tuple[str, str, str]
"""Its person, visit and day."""

IMAGES: tuple[Image, ...] = tuple(product(("7", "8"), ("70", "71", ""), DAYS))


def reading(root: Path, images: tuple[Image, ...], answers: list[Answer], **more: Any) -> Reading:
    """What is read of these images."""
    rows = [[f"{i}.png", *image, "train"] for i, image in enumerate(images)]
    header = ["image", "person_id", "visit_occurrence_id", "date", "split"]
    table = write_table(root / "list.csv", [header, *rows])
    config = OmopConfig(root=root, table=table, measurements=root, classes={"Mass": 1, "Edema": 2}, **more)
    return read_linked(config, config.classes, answers, Remarks(), str)


def answer(row: int, label: int, value: float, person: str, visit: str, day: str) -> Answer:
    return Answer(Place(Path("m.csv"), row), label, value, person, visit, day)


def by_hand(image: Image, one: Answer) -> bool:
    """The rule as docs/data.md states it."""
    person, visit, day = image
    if person != one.person:
        return False
    return visit == one.visit if visit and one.visit else day != "" and day == one.day


found = st.builds(
    answer,
    st.integers(2, 99),
    st.integers(0, 1),
    st.sampled_from([0.0, 1.0, float("nan")]),
    st.sampled_from(["7", "8", "9", ""]),
    st.sampled_from(["70", "71", "72", ""]),
    st.sampled_from([*DAYS, "2024-03-03"]),
)


@pytest.mark.complete
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(found, max_size=12), random=st.randoms(use_true_random=False))
def test_labels_are_those_of_the_answers_that_belong_to_an_image(
    answers: list[Answer], random: Any, tmp_path: Path
) -> None:
    """No answer leaves a label unknown, contradictions too, and the order of the answers does not matter."""
    y = np.full((len(IMAGES), 2), np.nan, dtype=np.float32)
    clashes = set()
    for row, label in product(range(len(IMAGES)), (0, 1)):
        mine = (one for one in answers if one.label == label and by_hand(IMAGES[row], one))
        values = {one.value for one in mine if one.value == one.value}
        if len(values) == 1:
            y[row, label] = values.pop()
        elif values:
            clashes.add(("Mass", "Edema")[label])
    read = reading(tmp_path, IMAGES, answers)
    np.testing.assert_array_equal(read.table.y, y)
    faults = "\n".join(read.faults)
    assert {name for name in ("Mass", "Edema") if f"class '{name}' is both" in faults} == clashes
    random.shuffle(answers)
    np.testing.assert_array_equal(reading(tmp_path, IMAGES, answers).table.y, y)


DAY = "2024-03-01"


FOUR = (("7", "70", DAY), ("7", "71", DAY), ("7", "", DAY), ("8", "70", ""))
NOBODY = (("", "70", DAY),)


@pytest.mark.parametrize(
    ("images", "one", "link", "y"),
    [
        # The visit decides where both have one, and else the day; a person is linked only when asked.
        (FOUR, ("7", "70", DAY), "visit", [1, NAN, 1, NAN]),
        (FOUR, ("7", "", DAY), "visit", [1, 1, 1, NAN]),
        (FOUR, ("7", "99", "2020-01-01"), "visit", [NAN] * 4),
        (FOUR, ("7", "99", "2020-01-01"), "person", [1, 1, 1, NAN]),
        (FOUR, ("8", "70", ""), "visit", [NAN, NAN, NAN, 1]),
        (NOBODY, ("", "70", DAY), "visit", [NAN]),
        (NOBODY, ("", "70", DAY), "person", [NAN]),
    ],
)
def test_what_belongs_to_an_image_by_hand(
    images: tuple[Image, ...], one: Image, link: str, y: list[float], tmp_path: Path
) -> None:
    read = reading(tmp_path, images, [answer(2, 0, 1, *one)], link=link)
    np.testing.assert_array_equal(read.table.y, [[label, NAN] for label in y])


def test_faults_name_rows_and_classes_and_no_person(tmp_path: Path) -> None:
    images = (("person77", "70", ""), ("person77", "70", ""), ("8", "", DAY))
    answers = [
        answer(5, 0, 1, "person77", "70", ""),
        answer(9, 0, 0, "person77", "70", ""),
        answer(11, 0, 0, "person77", "70", ""),
        answer(12, 1, 0, "8", "", DAY),
    ]
    read = reading(tmp_path, images, answers)
    (clash,) = read.faults
    for named in (f"{tmp_path}/list.csv rows 2, 3", "'Mass'", "m.csv row 5 and m.csv row 9; m.csv row 5 and"):
        assert named in clash
    assert "person77" not in clash
    np.testing.assert_array_equal(read.table.y, [[NAN, NAN], [NAN, NAN], [NAN, 0]])
    (absent,) = reading(tmp_path, images[2:], [answer(2, 0, 1, "8", "", DAY)]).faults
    assert "the code 2 of 'Edema'" in absent
    nobody = [answer(2, 0, 1, "8", "71", ""), answer(3, 1, 1, "9", "70", "")]
    (none,) = reading(tmp_path, images[2:], nobody).faults
    assert "0 of 2" in none
    counted = reading(tmp_path, images[2:], [*nobody, answer(4, 0, 1, "8", "70", DAY)])
    assert (counted.faults, len(counted.notes)) == ((), 1)
    assert "1 of 3" in counted.notes[0]


@pytest.fixture
def omop(tmp_path: Path) -> dict[str, Any]:
    """One answer, of person 7 on a day."""
    header = ["person_id", "measurement_concept_id", "measurement_date", "value_as_concept_id"]
    measurements = [[*header, "visit_occurrence_id"], ["7", "1", DAY, "4188539", ""]]
    return {
        "dataset": "omop",
        "root": tmp_path,
        "table": tmp_path / "list.csv",
        "measurements": write_table(tmp_path / "m.csv", measurements),
        "classes": {"Mass": 1},
    }


def test_the_list_needs_visits_or_days(omop: dict[str, Any]) -> None:
    def read(text: str, **more: Any) -> Reading:
        omop["table"].write_text(text)
        return read_table(parse_data(omop | {"split": "patients"} | more, "suture.toml"))

    with refused("list.csv", "'visit_occurrence_id'", "'date'", by=DataError):
        read("image,person_id\na.png,7\n")
    assert read("image,person_id\na.png,7\n", link="person").table.y[0] == 1
    assert read("image,person_id,date\na.png,7,2024-03-01 08:15:00\n").table.y[0] == 1
    (fault,) = read("image,person_id,date\na.png,7,1.3.2024\nb.png,7,2024-03-01\n").faults
    assert f"{omop['table']} row 2" in fault
    assert "1.3.2024" not in fault
    with refused("'day'", "[data] date_column", by=DataError):
        read("image,person_id,visit_occurrence_id\na.png,7,1\n", date_column="day")
    with refused("date_column", "link", by=ConfigError):
        read("image,person_id\na.png,7\n", date_column="day", link="person")


def test_splits_are_by_person_and_one_in_two_splits_is_a_fault(omop: dict[str, Any], tmp_path: Path) -> None:
    images = tuple((str(i // 4), str(i), "") for i in range(80))
    answers = [answer(i, 0, i % 2, str(i // 4), str(i), "") for i in range(80)]
    table = reading(tmp_path, images, answers, split="patients").table
    part = dict(zip(table.patients, table.split, strict=True))
    assert table.split == tuple(part[person] for person in table.patients)
    assert sorted(part.values()).count("train") == 14
    omop["table"].write_text(
        "image,person_id,date,split\na.png,7,2024-03-01,train\nb.png,7.0,2024-03-02,test\n"
    )
    (fault,) = read_table(parse_data(omop, "x")).faults
    assert f"{omop['table']} rows 2, 3: 1 patient in two splits" in fault
    splits = write_table(tmp_path / "splits.csv", [["patient", "split"], ["7.0", "train"]])
    read = read_table(parse_data(omop | {"split": "file", "split_file": splits}, "x"))
    assert (read.table.split, read.faults) == (("train", "train"), ())


@pytest.mark.parametrize("word", ["omop", "fhir"])
def test_the_example_of_the_page_is_read(word: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (text,) = (
        block.partition("```")[0] for block in page.split("```toml\n") if f'dataset = "{word}"' in block[:40]
    )
    assert parse_data(tomllib.loads(text)["data"], "docs/data.md").dataset == word


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("2024-03-01", DAY),
        ("20240301", DAY),
        ("2024-03-01 00:00:00", DAY),
        ("2024-03-01T23:30:00-05:00", DAY),
        ("", ""),
        ("2024-03", None),
        ("1.3.2024", None),
        ("2024-02-30", None),
    ],
)
def test_a_day_is_as_it_is_written(cell: str, day: str | None) -> None:
    assert day_of(cell) == day
