"""The stored results of one preset: its tuned settings, and the results of each cell of its table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suture_papers.tables.plan import read_registered
from suture_papers.tables.results import Result, ResultStore, read_result
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import Table, Value

Cell = tuple[str, str]
"""A row, and the value of the series as text."""

ClassComparison = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""By row and class: ``auroc``, ``low``, ``high`` (95 % interval), and of all rows but the first ``p``."""


@dataclass(frozen=True)
class Outcome:
    """The input of figures and rendered tables.

    Attributes:
        table: whose runs these are.
        results: of each cell, one result for each seed that has been run.
        tuned: the chosen value of the tuned setting of each cell.
        by_class: the stored comparison of single classes; None where it has not been done.
        plan: the stored record of a study's plan; see `plan.registered`.
    """

    table: Table
    results: Mapping[Cell, Mapping[int, Result]]
    tuned: Mapping[Cell, Value]
    by_class: ClassComparison | None = None
    plan: Mapping[str, Any] | None = None


def collect(table: Table, store: ResultStore) -> Outcome:
    """Return the stored results, complete or not; a cell whose tuning is not done has none.

    Raises:
        ConfigError, DataError: as `read_result`.
    """
    found: dict[Cell, dict[int, Result]] = {(row, str(x)): {} for row, x in table.cells}
    tuned = choose(table, store)
    untuned = {cell for cell in found if table.preset.tune and cell not in tuned}
    for run in final_runs(table, {cell: tuned.get(cell) for cell in found}):
        cell = (run.row, str(run.x))
        result = None if cell in untuned else read_result(store, run)
        if result is not None:
            found[cell][run.seed] = result
    plan = read_registered(table, store) if table.spec.plan else None
    return Outcome(table, found, tuned, compared_classes(table, store), plan)


def choose(table: Table, store: ResultStore) -> dict[Cell, Value]:
    """Return the value of the tuned setting with the highest validation figure.

    A cell is left out until all values have been tried.
    """
    done: dict[Cell, list[tuple[float, Value]]] = {}
    for run in tuning_runs(table):
        result = read_result(store, run)
        if result is not None and result.validation is not None:
            grid = table.tried_grid(run.row)
            assert grid is not None
            done.setdefault((run.row, str(run.x)), []).append((result.validation, run.settings[grid.key]))
    grids = {row: table.tried_grid(row) for row in table.rows}
    tried_all = {
        cell: tried for cell, tried in done.items() if (g := grids[cell[0]]) and len(tried) == len(g.values)
    }
    return {cell: max(tried, key=lambda pair: pair[0])[1] for cell, tried in tried_all.items()}


def compared_classes(table: Table, store: ResultStore) -> ClassComparison | None:
    """Return the stored comparison of single classes; None where it has not been done."""
    runs = compared_runs(table, store)
    record = None if runs is None else store.find(comparison_name(runs))
    return None if record is None else record["rows"]


def compared_runs(table: Table, store: ResultStore) -> dict[str, Run] | None:
    """Return the first seed's run of each row of the comparison of single classes.

    Returns:
        None where the preset has no such comparison, or a learning rate is not tuned yet.
    """
    by_class, tuned = table.spec.by_class, choose(table, store)
    if by_class is None or not by_class.rows or set(by_class.rows) - set(table.rows):
        return None
    if table.preset.tune and any((row, "None") not in tuned for row in by_class.rows):
        return None
    values = dict.fromkeys(((row, "None") for row in table.rows), None) | tuned
    runs = {run.row: run for run in final_runs(table, values) if run.seed == table.preset.seeds[0]}
    return {row: runs[row] for row in by_class.rows}


def comparison_name(runs: Mapping[str, Run]) -> str:
    """Return the name under which the comparison of these runs is stored."""
    names = json.dumps([run.name for run in runs.values()])
    return f"by-class-{hashlib.sha256(names.encode()).hexdigest()[:10]}"
