"""The notebook runs from its first cell to its last, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "own_hospitals.ipynb"


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_every_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells()):
        exec(compile("".join(cell["source"]), f"cell {number} of {NOTEBOOK.name}", "exec"), names)
    assert "Cardiomegaly" in capsys.readouterr().out
    assert names["together"].problems == ()
    assert not any(found.problems for found in names["findings"].values())
    assert set(names["results"].classes.index) == set(names["predictions"].columns)
    assert len(names["predictions"]) == 400
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


def test_no_output_is_kept_that_could_grow_old() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells())
