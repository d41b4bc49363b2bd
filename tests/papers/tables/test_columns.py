"""Columns of figures that are not class by class: Fed-MAS's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stored_by_hand import change, result, store, table_spec
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture_papers.tables.cells import figure_of, lines
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Column

FEDMAS: dict[str, Any] = {
    "loss": 0.15,
    "overall": {"balanced_accuracy": 0.0, "accuracy": 0.7},
    "long_tail": {"accuracy": {"head": 0.9, "tail": 0.1, "all": 0.5}},
    "attributes": {"values": {"dark": {"balanced_accuracy": 0.4}}, "mean": {"balanced_accuracy": 0.6}},
    "local_models": {"mean": {"local": {"auroc": 0.8, "balanced_accuracy": 0.3}}},
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ({"metric": "balanced_accuracy"}, 0.0),  # zero is a value
        ({"metric": "f1"}, None),
        ({"metric": "loss"}, 0.15),
        ({"metric": "accuracy", "frequency": "tail"}, 0.1),
        ({"metric": "accuracy", "frequency": "all"}, 0.5),
        ({"metric": "accuracy", "frequency": "medium"}, None),
        ({"metric": "balanced_accuracy", "attribute": "dark"}, 0.4),
        ({"metric": "balanced_accuracy", "attribute": "mean"}, 0.6),
        ({"metric": "balanced_accuracy", "attribute": "light"}, None),
        ({"metric": "balanced_accuracy", "models": "local"}, 0.3),
        ({"models": "local"}, 0.8),
        ({"models": "global"}, None),
    ],
)
def test_a_column_of_a_figure_that_is_not_class_by_class(column: dict[str, Any], value: float | None) -> None:
    assert figure_of(FEDMAS, parse(Column, {"name": "x", **column}, "column")) == value


def test_such_a_column_fills_its_cells(tmp_path: Path) -> None:
    """A run from before there was such a figure has none of it."""
    spec = table_spec(columns=[{"name": "tail", "metric": "accuracy", "frequency": "tail"}])
    table = spec.preset("tiny")
    for run in final_runs(table, {}):
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
        if run.row == "ours":
            change(tmp_path, run, metrics={"long_tail": {"accuracy": {"tail": run.seed / 10}}})
    found = {line.row: line.estimates["tail"] for line in lines(collect(table, store(tmp_path)))}
    assert found["ours"].text == "0.200 ± 0.100"
    assert found["theirs"].values == (None, None, None)


def test_a_column_of_recall_is_over_the_classes_it_names(tmp_path: Path) -> None:
    """B has no test image; ours has the recall of a class and theirs, of several labels an image, none."""
    spec = table_spec(
        columns=[
            {"name": "rare", "metric": "recall", "classes": ["A", "C"]},
            {"name": "all", "metric": "recall"},
        ]
    )
    table = spec.preset("tiny")
    for run in final_runs(table, {}):
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
        if run.row == "ours":
            change(tmp_path, run, metrics={"recall": {"A": 0.25, "B": None, "C": 0.5, "D": 0.75}})
    outcome = collect(table, store(tmp_path))
    found = {line.row: line.estimates for line in lines(outcome)}
    assert found["ours"]["rare"].mean == pytest.approx(0.375)
    assert found["ours"]["all"].mean == pytest.approx(0.5)
    assert found["theirs"]["rare"].values == (None, None, None)
    write_tables(outcome, tmp_path, "x")
    text = (tmp_path / "x.md").read_text()
    assert "Recall of each class" in text
    assert "| C | – | 0.500 |" in text


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"attribute": "dark", "models": "local"}, "one of test, task, frequency, attribute and models"),
        ({"test": "nih", "attribute": "dark"}, "one of test, task, frequency, attribute and models"),
        ({"frequency": "tail"}, 'needs metric = "accuracy"'),
        ({"metric": "loss", "group": "shared"}, 'metric = "loss"'),
        ({"metric": "loss", "attribute": "dark"}, 'metric = "loss"'),
        ({"metric": "f1", "classes": ["A"]}, "auroc and recall only"),
        ({"attribute": "dark", "group": "unique"}, "auroc and recall only"),
        ({"task": "Edema", "classes": ["A"]}, "auroc and recall only"),
        ({"test": "nih", "metric": "recall"}, "a further test has no recall"),
    ],
)
def test_a_column_is_of_one_part_alone(column: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(Column, {"name": "x", **column}, "column")


def test_a_loss_on_a_test_set_is_that_of_the_models_which_know_its_classes(tmp_path: Path) -> None:
    """A result from before there were losses has none, and still renders."""
    spec = table_spec(
        columns=[{"name": "loss", "test": "nih", "metric": "loss"}],
        tests={"nih": {"data": {"dataset": "nih"}}},
    )
    table = spec.preset("tiny")
    narrow = {"auroc": {}, "unlearned": ["A"], "loss": 0.9}
    whole = {"auroc": {"A": 0.5}, "unlearned": []}
    models = {"ours": {"x": narrow, "y": {**whole, "loss": 0.25}}, "theirs": {"global": whole}}
    for run in final_runs(table, {}):
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
        change(tmp_path, run, tests={"nih": models[run.row]})
    found = {line.row: line.estimates["loss"] for line in lines(collect(table, store(tmp_path)))}
    assert found["ours"].values == (0.25, 0.25, 0.25)
    assert found["theirs"].text == "–"
