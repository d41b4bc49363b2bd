"""Columns whose means have the interval over patients beside them, and losses of groups of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stored_by_hand import change, result, store, table_spec
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture_papers.tables.cells import Line, lines
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Column

GROUPS = {"shared": {"loss": 0.3, "mean_interval": [0.6, 0.9]}}
WHOLE: dict[str, Any] = {
    "auroc": {"A": 0.8, "B": 0.6},
    "unlearned": [],
    "loss": 0.2,
    "mean_interval": [0.65, 0.75],
    "groups": GROUPS,
}
OLD = {"auroc": {"A": 0.8, "B": 0.6}, "unlearned": [], "loss": 0.2}
COLUMNS = [
    {"name": "all", "test": "nih", "spread": "interval"},
    {"name": "shared", "test": "nih", "group": "shared", "spread": "interval"},
    {"name": "loss", "test": "nih", "metric": "loss"},
    {"name": "shared loss", "test": "nih", "group": "shared", "metric": "loss"},
    {"name": "own", "spread": "interval"},
]


def rendered(folder: Path, seeds: list[int], ours: Any, theirs: Any) -> tuple[dict[str, Line], str]:
    spec = table_spec(
        columns=COLUMNS,
        tests={"nih": {"data": {"dataset": "nih"}}},
        rows={
            "theirs": {"name": "a", "set": {"method": "vanilla"}},
            "ours": {"name": "b", "set": {"method": "surgical"}},
        },
        presets={"p": {"note": "", "seeds": seeds, "pairs": "classes"}},
    )
    table = spec.preset(None)
    for run in final_runs(table, {}):
        result(run, folder, {"A": 0.7, "B": 0.5})
        record = store(folder).find(run.name)
        assert record is not None
        metrics = {**record["metrics"], "mean_interval": [0.55, 0.66] if run.row == "ours" else None}
        change(folder, run, tests={"nih": {"ours": ours, "theirs": theirs}[run.row]}, metrics=metrics)
    outcome = collect(table, store(folder))
    page = write_tables(outcome, folder, "x")[0].read_text()
    return {line.row: line for line in lines(outcome)}, page


def test_one_run_shows_the_interval_of_its_mean(tmp_path: Path) -> None:
    """A result without one shows the mean alone, and a figure of a run has no spread over classes."""
    found, page = rendered(tmp_path, [1], {"global": WHOLE}, {"global": OLD})
    ours, theirs = ({name: f.text for name, f in found[row].estimates.items()} for row in ("ours", "theirs"))
    assert ours == {
        "all": "0.700 (0.650, 0.750)",
        "shared": "0.800 (0.600, 0.900)",
        "loss": "0.200",
        "shared loss": "0.300",
        "own": "0.600 (0.550, 0.660)",
    }
    assert theirs["all"].startswith("0.700")
    assert "(" not in theirs["all"] + theirs["own"]
    assert "±" not in theirs["all"] + theirs["own"]
    assert theirs["shared loss"] == "–"
    assert "in all, shared, own: 95 % interval of the mean from a bootstrap over the patients" in page


def test_several_seeds_show_the_sd(tmp_path: Path) -> None:
    found, page = rendered(tmp_path, [1, 2], {"global": WHOLE}, {"global": WHOLE})
    assert found["ours"].estimates["all"].text == "0.700 ± 0.100"
    assert "95 %" not in page


def test_intervals_of_several_models_do_not_average(tmp_path: Path) -> None:
    narrow = {"auroc": {"A": 0.9}, "unlearned": ["B"], "groups": GROUPS}
    found, _ = rendered(tmp_path, [1], {"x": WHOLE, "y": narrow}, {"global": WHOLE})
    assert found["ours"].estimates["all"].text == "0.700 (0.650, 0.750)"  # x alone has learned both
    assert found["ours"].estimates["shared"].text == "0.850"


@pytest.mark.parametrize(
    "column",
    [
        {"metric": "loss", "test": "nih"},
        {"group": "shared"},
        {"test": "nih", "classes": ["A"]},
        {"task": "Edema"},
        {"models": "local"},
    ],
)
def test_what_has_no_interval_is_refused_one(column: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='spread = "interval" is for the mean AUROC'):
        parse(Column, {"name": "x", "spread": "interval", **column}, "column")
