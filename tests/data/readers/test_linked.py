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

DAYS = ("2024-03-01", "2024-03-02", "")
IMAGES = tuple(product(("7", "8"), ("70", "71", ""), DAYS))


def reading(
    root: Path, images: tuple[tuple[str, str, str], ...], answers: list[Answer], **more: Any
) -> Reading:
    """What is read of these images (person, visit, day)."""
    rows = (f"{i}.png,{','.join(image)},train" for i, image in enumerate(images))
    (root / "list.csv").write_text(
        "\n".join(["image,person_id,visit_occurrence_id,date,split", *rows]) + "\n"
    )
    config = OmopConfig(
        root=root, table=root / "list.csv", measurements=root, classes={"Mass": 1, "Edema": 2}, **more
    )
    return read_linked(config, config.classes, answers, Remarks(), str)


def answer(row: int, label: int, value: float, person: str, visit: str, day: str) -> Answer:
    return Answer(Place(Path("m.csv"), row), label, value, person, visit, day)


def by_hand(image: tuple[str, str, str], one: Answer) -> bool:
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


def test_the_visit_decides_where_both_have_one_and_else_the_day(tmp_path: Path) -> None:
    images = (("7", "70", "2024-03-01"), ("7", "71", "2024-03-01"), ("7", "", "2024-03-01"), ("8", "70", ""))
    nan = np.nan
    of_visit = reading(tmp_path, images, [answer(2, 0, 1, "7", "70", "2024-03-01")]).table.y[:, 0]
    np.testing.assert_array_equal(of_visit, [1, nan, 1, nan])
    of_day = reading(tmp_path, images, [answer(2, 0, 0, "7", "", "2024-03-01")]).table.y[:, 0]
    np.testing.assert_array_equal(of_day, [0, 0, 0, nan])


def test_a_person_is_linked_only_when_asked(tmp_path: Path) -> None:
    images = (("7", "70", "2024-03-01"), ("7", "", ""), ("8", "70", "2024-03-01"))
    answers = [answer(2, 0, 1, "7", "99", "2020-01-01"), answer(3, 1, 0, "8", "70", "")]
    nan = np.nan
    np.testing.assert_array_equal(
        reading(tmp_path, images, answers).table.y, [[nan, nan], [nan, nan], [nan, 0]]
    )
    read = reading(tmp_path, images, answers, link="person")
    np.testing.assert_array_equal(read.table.y, [[1, nan], [1, nan], [nan, 0]])
    assert read.notes == (f"2 of 2 answers belong to an image of {tmp_path}/list.csv",)
    assert not read.faults


def test_contradictions_name_their_rows_and_no_person(tmp_path: Path) -> None:
    images = (("person77", "70", ""), ("person77", "70", ""), ("8", "", "2024-03-01"))
    answers = [
        answer(5, 0, 1, "person77", "70", ""),
        answer(9, 0, 0, "person77", "70", ""),
        answer(11, 0, 0, "person77", "70", ""),
        answer(12, 1, 0, "8", "", "2024-03-01"),
    ]
    read = reading(tmp_path, images, answers)
    assert read.faults == (
        (
            f"{tmp_path}/list.csv rows 2, 3: class 'Mass' is both present and absent in m.csv row 5 and "
            "m.csv row 9; m.csv row 5 and m.csv row 9; correct one of each pair"
        ),
    )
    np.testing.assert_array_equal(read.table.y[:, 0], [np.nan] * 3)
    assert read.table.y[2, 1] == 0


def test_a_class_without_answers_is_not_annotated(tmp_path: Path) -> None:
    read = reading(tmp_path, (("7", "70", ""),), [answer(2, 0, 1, "7", "70", "")])
    assert read.faults == (
        "[data] classes: no answer has the code 2 of 'Edema'; correct the code, or remove the class if this "
        "site does not annotate it",
    )


def test_answers_of_nobody_here_are_a_fault(tmp_path: Path) -> None:
    answers = [answer(2, 0, 1, "7", "71", ""), answer(3, 1, 1, "9", "70", "")]
    (none,) = reading(tmp_path, (("7", "70", ""),), answers).faults
    assert none.startswith("0 of 2 answers belong to an image of ")
    assert not reading(tmp_path, (("7", "70", ""),), [*answers, answer(4, 0, 1, "7", "70", "")]).faults


def test_an_image_without_a_person_belongs_to_nobody(tmp_path: Path) -> None:
    for more in ({}, {"link": "person"}):
        read = reading(
            tmp_path, (("", "70", "2024-03-01"),), [answer(2, 0, 1, "", "70", "2024-03-01")], **more
        )
        assert np.isnan(read.table.y).all()
        assert "row 2: the patient" in read.faults[0]


def test_the_list_needs_visits_or_days(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    given = {"dataset": "omop", "root": tmp_path, "table": table, "measurements": tmp_path / "m.csv"}
    given |= {"classes": {"Mass": 1}, "split": "patients"}
    (tmp_path / "m.csv").write_text(
        "person_id,measurement_concept_id,measurement_date,value_as_concept_id,visit_occurrence_id\n"
        "7,1,2024-03-01,4188539,\n"
    )

    def read(text: str, **more: Any) -> Reading:
        table.write_text(text)
        return read_table(parse_data(given | more, "suture.toml"))

    with pytest.raises(
        DataError, match=r"list\.csv has neither .*'visit_occurrence_id' nor 'date'.*\"person\""
    ):
        read("image,person_id\na.png,7\n")
    assert read("image,person_id\na.png,7\n", link="person").table.y[0] == 1
    assert read("image,person_id,date\na.png,7,2024-03-01 08:15:00\n").table.y[0] == 1
    faults = read("image,person_id,date\na.png,7,1.3.2024\nb.png,7,2024-03-01\n").faults
    assert faults == (f"{table} row 2: column 'date': not a date such as 2024-03-01",)
    with pytest.raises(DataError, match=r"no column 'day'; .*\[data\] date_column"):
        read("image,person_id,visit_occurrence_id\na.png,7,1\n", date_column="day")
    with pytest.raises(ConfigError, match='date_column has no effect with link = "person"'):
        read("image,person_id\na.png,7\n", date_column="day", link="person")


def test_splits_are_by_person(tmp_path: Path) -> None:
    images = tuple((str(i // 4), str(i), "") for i in range(80))
    answers = [answer(i, 0, i % 2, str(i // 4), str(i), "") for i in range(80)]
    table = reading(tmp_path, images, answers, split="patients").table
    part = dict(zip(table.patients, table.split, strict=True))
    assert table.split == tuple(part[person] for person in table.patients)
    assert sorted(part.values()).count("train") == 14


def test_a_person_in_two_splits_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(
        "image,person_id,date,split\na.png,7,2024-03-01,train\nb.png,7.0,2024-03-02,test\n"
    )
    (tmp_path / "m.csv").write_text(
        "person_id,measurement_concept_id,measurement_date,value_as_concept_id,visit_occurrence_id\n"
        "7,1,2024-03-01,4188539,\n"
    )
    own = {"table": tmp_path / "list.csv", "measurements": tmp_path / "m.csv", "classes": {"Mass": 1}}
    (fault,) = read_table(OmopConfig(root=tmp_path, **own)).faults
    assert fault.startswith(f"{own['table']} rows 2, 3: 1 patient in two splits")
    (tmp_path / "splits.csv").write_text("patient,split\n7.0,train\n")
    read = read_table(OmopConfig(root=tmp_path, **own, split="file", split_file=tmp_path / "splits.csv"))
    assert read.table.split == ("train", "train")
    assert not read.faults


@pytest.mark.parametrize("word", ["omop", "fhir"])
def test_the_example_of_the_page_is_read(word: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (text,) = (
        block.partition("```")[0] for block in page.split("```toml\n") if f'dataset = "{word}"' in block[:40]
    )
    data = parse_data(tomllib.loads(text)["data"], "docs/data.md")
    assert data.dataset == word


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("2024-03-01", "2024-03-01"),
        ("20240301", "2024-03-01"),
        ("2024-03-01 00:00:00", "2024-03-01"),
        ("2024-03-01T23:30:00-05:00", "2024-03-01"),
        ("", ""),
        ("2024-03", None),
        ("1.3.2024", None),
        ("2024-02-30", None),
    ],
)
def test_a_day_is_as_it_is_written(cell: str, day: str | None) -> None:
    assert day_of(cell) == day
