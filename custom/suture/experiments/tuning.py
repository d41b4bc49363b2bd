"""Choosing the value of a tuned setting, on validation data."""

from __future__ import annotations

from pathlib import Path

from suture.experiments.runs import read_result, tuning_runs
from suture.experiments.spec import Experiment, Preset, Value

Cell = tuple[str, str]
"""A row, and the value of the series as text."""


def chosen(experiment: Experiment, preset: Preset, results: Path) -> dict[Cell, Value]:
    """The tuned setting's value with the highest validation figure, of each cell that was tried whole."""
    done: dict[Cell, list[tuple[float, Value]]] = {}
    for run in tuning_runs(experiment, preset):
        result = read_result(results, run)
        if result is not None and result.validation is not None and preset.tune:
            value = run.settings[preset.tune.key]
            done.setdefault((run.row, str(run.x)), []).append((result.validation, value))
    wanted = len(preset.tune.values) if preset.tune else 0
    return {
        cell: max(tried, key=lambda pair: pair[0])[1] for cell, tried in done.items() if len(tried) == wanted
    }
