"""The recordings of the notebook and the tutorial: their cells and commands run again, and show the same."""

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


def test_every_cell_of_the_notebook_shows_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notebook_outputs import NOTEBOOK, executed

    monkeypatch.chdir(tmp_path)
    stored, names = json.loads(NOTEBOOK.read_text()), dict[str, Any]()
    assert words(executed(stored, names)) == words(stored), "run it again: benchmarks/notebook_outputs.py"
    assert not names["checked"].problems
    assert set(names["results"].classes.index) == set(names["predictions"].columns)
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


def sketch(text: str) -> list[str]:
    """The words as they are on every machine: in no order of lines, and without figures of training."""
    text = re.sub(r"~?\d\.\d(–\d\.\d)?", "#", text)
    text = re.sub(r"model of round \d+", "model of round #", text)
    text = re.sub(r"(?m)^Round \d+ of 10 was kept: .*$", "Round # was kept", text)
    return sorted(re.sub("[─━]+", "─", text).split())


def test_the_recording_of_the_tutorial_is_what_a_newcomer_sees() -> None:
    import first_ten_minutes as page

    recorded = page.PAGE.read_text().split(page.START)[1].split(page.END)[0]
    assert sketch(page.record()) == sketch(recorded), "record it again: benchmarks/first_ten_minutes.py"
    [auroc] = re.findall(r"round 10: validation loss ~0\.\d, AUROC ~(0\.\d)", recorded)
    assert float(auroc) >= 0.7, "the first figure that a newcomer sees is no better than chance"
