"""The stored results of one preset: its tuned settings, and the results of each cell of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from suture_papers.tables.results import Result, ResultStore, read_result
from suture_papers.tables.runs import final_runs, tuning_runs
from suture_papers.tables.spec import Table, Value

Cell = tuple[str, str]
"""A row, and the value of the series as text."""


@dataclass(frozen=True)
class Outcome:
    """The input of figures and rendered tables.

    Attributes:
        table: whose runs these are.
        results: of each cell, one result for each seed that has been run.
        tuned: the chosen value of the tuned setting of each cell.
    """

    table: Table
    results: Mapping[Cell, Mapping[int, Result]]
    tuned: Mapping[Cell, Value]


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
    return Outcome(table, found, tuned)


def choose(table: Table, store: ResultStore) -> dict[Cell, Value]:
    """Return the value of the tuned setting with the highest validation figure.

    A cell is left out until all values have been tried.
    """
    done: dict[Cell, list[tuple[float, Value]]] = {}
    tune = table.preset.tune
    for run in tuning_runs(table):
        result = read_result(store, run)
        if tune and result is not None and result.validation is not None:
            tried = (result.validation, run.settings[tune.key])
            done.setdefault((run.row, str(run.x)), []).append(tried)
    whole = {cell: tried for cell, tried in done.items() if tune and len(tried) == len(tune.values)}
    return {cell: max(tried, key=lambda pair: pair[0])[1] for cell, tried in whole.items()}
