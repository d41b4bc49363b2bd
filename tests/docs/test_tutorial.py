"""The commands of the tutorial's section on own hospitals, pasted one after another into an empty folder."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from suture.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def commands() -> list[list[str]]:
    """The words of each command of the section."""
    section = PAGE.read_text().split("\n## 5. ")[1].split("\n## ")[0]
    lines = "\n".join(re.findall(r"^    (.*)$", section, flags=re.MULTILINE)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in lines.splitlines()]


def test_own_hospitals_from_the_folder_to_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [words[1] for words in commands()] == ["data", "init", "check", "run", "predict", "export"]
    for command, *words in commands():
        assert command == "suture"
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception!r}"
    run = json.loads((tmp_path / "runs" / "first" / "run.json").read_text())
    assert run["status"] == "finished"
    assert len(run["labels"]) == 10
    with (tmp_path / "predictions.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + 400
    assert (tmp_path / "exported" / "study" / "meta.json").is_file()
