"""The published tables are what the kept runs give."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.experiments.conduct import collect
from suture.experiments.loading import known_experiments, load_experiment
from suture.experiments.render import write_tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TABLES = sorted(path.stem for path in RESULTS.glob("*.md") if path.stem in known_experiments())


def test_there_are_some() -> None:
    assert TABLES


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_rendered_from_its_runs(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    preset = experiment.preset(None)
    outcome = collect(experiment, preset, RESULTS / "runs")
    page = write_tables(experiment, preset, outcome, tmp_path, name)[0]
    assert page.read_text() == (RESULTS / f"{name}.md").read_text()
