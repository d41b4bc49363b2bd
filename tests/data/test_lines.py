"""A data set in a package of its own, `tests/strangers/suture-lines`: its reader and `suture init`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import DataError
from suture.testing import check_dataset
from suture_prepare.discovery import discover
from world import refused, write_image

FOLDER = Path(__file__).parents[1] / "strangers" / "suture-lines"
sys.path.insert(0, str(FOLDER))

from suture_lines import LINES  # noqa: E402

ROWS = [
    {"file": "a.png", "person": "p1", "findings": ["Mass"], "part": "train"},
    {"file": "b.png", "person": "p1", "findings": [], "part": "train"},
    {"file": "c.png", "person": "p2", "findings": ["Mass", "effusion"], "part": "validation"},
    {"file": "d.png", "person": "p3", "findings": ["effusion"], "part": "test"},
]


def write(folder: Path, rows: list[Any]) -> dict[str, str]:
    for i, name in enumerate("abcd"):
        write_image(folder / "images" / f"{name}.png", i)
    (folder / "table.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"root": str(folder / "images"), "table": str(folder / "table.jsonl")}


def test_it_conforms(tmp_path: Path) -> None:
    values = write(tmp_path, ROWS)
    table = check_dataset(LINES, values)
    assert table.labels.names == ("Mass", "Pleural Effusion")
    assert table.y.tolist() == [[1, 0], [0, 0], [1, 1], [0, 1]]
    assert table.split == ("train", "train", "validation", "test")
    # Synonyms need no labels: the names are those of the table's cells, which no configuration states.
    table = check_dataset(LINES, values | {"synonyms": {"Mass": "Nodule"}})
    assert table.labels.names == ("Nodule", "Pleural Effusion")


@pytest.mark.parametrize(
    "row", [3, {"file": "a.png"}, {**ROWS[0], "findings": "Mass"}, {**ROWS[0], "part": "dev"}], ids=str
)
def test_a_faulty_line_is_named_and_an_empty_table_an_error(row: Any, tmp_path: Path) -> None:
    values = write(tmp_path, [*ROWS[1:], row])
    reading = LINES.read(LINES.config.model_validate(values))
    assert [fault for fault in reading.faults if "table.jsonl line 4" in fault]
    Path(values["table"]).write_text("")
    with refused("table.jsonl", by=DataError):
        LINES.read(LINES.config.model_validate(values))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as pip installs it."""
    packages = tmp_path / "packages"
    info = packages / "suture_lines-0.1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(FOLDER / "suture_lines.py", packages)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: suture-lines\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[suture.datasets]\nlines = suture_lines:LINES\n")
    (info / "RECORD").write_text("suture_lines.py,,\n")
    monkeypatch.syspath_prepend(str(packages))


@pytest.mark.usefixtures("installed")
def test_init_recognises_it(tmp_path: Path) -> None:
    write(tmp_path / "site", ROWS)
    assert discover(tmp_path / "site").data["dataset"] == "lines"
