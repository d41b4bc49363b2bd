"""The notebook runs from its first cell to its last, in an empty folder, and shows what is stored in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.complete


def words(notebook: dict[str, Any]) -> list[list[str]]:
    """The words of the outputs of each cell, in their order, without figures and the widths of columns."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = [
        "".join("".join(line) for one in outputs for line in (one.get("text") or one["data"]["text/plain"]))
        for outputs in cells
    ]
    return [re.sub(r"-?\d+(\.\d+)?", "#", text).split() for text in texts]


def test_every_cell_shows_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from notebook_outputs import NOTEBOOK, executed

    monkeypatch.chdir(tmp_path)
    stored, names = json.loads(NOTEBOOK.read_text()), dict[str, Any]()
    assert words(executed(stored, names)) == words(stored), "run it again: benchmarks/notebook_outputs.py"
    assert all(cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code")
    assert "Cardiomegaly" in json.dumps(stored)
    assert names["together"].problems == ()
    assert not any(found.problems for found in names["findings"].values())
    assert set(names["results"].classes.index) == set(names["predictions"].columns)
    assert len(names["predictions"]) == 400
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
