"""examples/suture-fedprox-l1: a method in a package of its own, as short as the documentation says."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import suture
import suture.testing
from packages import installed
from suture.cli.app import app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "suture-fedprox-l1"
SMALL = ("--set", "simulation.images=60", "--set", "simulation.held_out=60", "--set", "method.local.epochs=1")


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    """The example is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    [(name, entry)] = project["entry-points"]["suture.methods"].items()
    code = EXAMPLE / "suture_fedprox_l1.py"
    with installed(tmp_path / "site", project["name"], project["version"], name, entry, code):
        yield


def test_it_has_at_most_25_lines_and_keeps_the_contract(example: None) -> None:
    assert len((EXAMPLE / "suture_fedprox_l1.py").read_text().splitlines()) <= 25
    kind = suture.known_methods()["fedprox_l1"]
    suture.testing.check_method(kind())


@pytest.mark.complete
def test_it_runs_from_the_command_line(example: None, tmp_path: Path) -> None:
    words = ["run", "demo", "--env", "local", "--rounds", "1", "--out", str(tmp_path / "r")]
    done = CliRunner().invoke(app, [*words, "--set", "method=fedprox_l1", "--set", "method.mu=10", *SMALL])
    assert done.exit_code == 0, done.output
    method = json.loads((tmp_path / "r" / "run.json").read_text())["method"]
    assert (method["name"], method["hyperparameters"]["mu"]) == ("fedprox_l1", 10)
    assert "fedprox_l1" in CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"}).output
