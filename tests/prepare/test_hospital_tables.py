"""Forms of tables of hospitals and archives, each read with the values that it means, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hospital_tables import CASES, Meant, Refused, every, misread, other_case
from suture.core.errors import DataError
from suture_prepare.discovery import discover


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_read_as_it_is_meant_or_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    assert misread(CASES[name], tmp_path) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": {"Mass": every(1, 0)}}, "Mass: "),
        ({"labels": {"Mass": every(0, 1), "Edema": every(0, 1)}}, "labels Mass for Mass, Edema"),
        ({"patients": None}, "patients "),
        ({"split": ["train"] * 24}, "splits "),
        ({"images": ["a.png"]}, "images "),
        ({"asks": ("a question",)}, "'a question'"),
    ],
)
def test_what_is_read_otherwise_is_told(change: dict[str, object], said: str, tmp_path: Path) -> None:
    def changed(folder: Path) -> Meant:
        meant = other_case(folder)
        assert isinstance(meant, Meant)
        return replace(meant, **change)  # type: ignore[arg-type]

    assert said in misread(changed, tmp_path)


def test_what_should_have_been_refused_is_told(tmp_path: Path) -> None:
    def read(folder: Path) -> Refused:
        other_case(folder)
        return Refused(("nothing",))

    assert misread(read, tmp_path) == "read, not refused"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("all.zip", "unpack it and give its folder"), ("labels.XLS", r"save it as \.xlsx or \.csv")],
)
def test_a_site_that_is_a_file_of_another_kind_is_refused(name: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match=rf"{name} cannot be read; {remedy}"):
        discover(tmp_path / name)
