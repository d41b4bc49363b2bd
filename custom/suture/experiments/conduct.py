"""Conducting an experiment: tune on validation data, do the runs, collect what the table needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from suture.core.errors import ConfigError
from suture.experiments.by_class import Kept, compared_rows
from suture.experiments.pool import do_runs
from suture.experiments.runs import Result, Run, cells, final_runs, read_result, tuning_runs
from suture.experiments.spec import DATA, Experiment, Preset, Value
from suture.experiments.tuning import Cell, chosen


@dataclass(frozen=True)
class Outcome:
    """What a table or figure is drawn from.

    Attributes:
        results: of each cell, one for each seed that has been run.
        tuned: the chosen value of the tuned setting of each cell.
        by_class: what `compare_rows` kept; None where it has not been done.
    """

    results: Mapping[Cell, Mapping[int, Result]]
    tuned: Mapping[Cell, Value]
    by_class: Kept | None = None


def conduct(
    experiment: Experiment,
    preset: Preset,
    results: Path,
    work: Path,
    data_root: Path | None,
    at_once: int,
    say: Callable[[str], None],
) -> Outcome:
    """Does what is missing; the arguments are those of `do_runs`.

    Raises:
        ConfigError: the data root, or a folder or file of the runs under it, is not there.
        ConfigError: a run that tunes a setting has no validation figure to tune it by.
        FederationError: a run failed.
    """
    check_data(experiment, preset, results, data_root)
    if preset.tune:
        do_runs(tuning_runs(experiment, preset), results, work, data_root, at_once, say)
        _refuse_unmeasured(experiment, preset, results)
    tuned = chosen(experiment, preset, results)
    do_runs(final_runs(experiment, preset, tuned), results, work, data_root, at_once, say)
    return collect(experiment, preset, results)


def _refuse_unmeasured(experiment: Experiment, preset: Preset, results: Path) -> None:
    for run in tuning_runs(experiment, preset):
        result = read_result(results, run)
        if preset.tune and (result is None or result.validation is None):
            raise ConfigError(
                f"row {run.row!r}: its run {run.name} has no validation figure to tune {preset.tune.key} by; "
                "give the validation data positives and negatives of a class that the row trains, or let the "
                "preset skip the row"
            )


def check_data(experiment: Experiment, preset: Preset, results: Path, data_root: Path | None) -> None:
    """Looks for all that the settings of missing runs name under the data root, before the first of them.

    Raises:
        ConfigError: the data root is not given, or something under it is not there; names it, with the rows
            that read it.
    """
    tuned, tried = chosen(experiment, preset, results), preset.tune.values[:1] if preset.tune else ()
    values = {(row, str(x)): value for row, x in cells(experiment, preset) for value in tried} | tuned
    runs = [*tuning_runs(experiment, preset), *final_runs(experiment, preset, values)]
    used = [path for run in runs for path in run.paths()]
    if used and data_root is None:
        raise ConfigError(f"this preset reads {used[0]}; give --data-root DIR, or set SUTURE_DATA")
    if used and data_root is not None and not data_root.is_dir():
        raise ConfigError(f"the data root {data_root} is no folder; correct --data-root or SUTURE_DATA")
    lacking: dict[Path, dict[str, None]] = {}
    for run in runs:
        places = [Path(path.replace(DATA, str(data_root))) for path in run.paths()]
        absent = [place for place in places if not place.exists()]
        if absent and read_result(results, run) is None:
            for place in absent:
                lacking.setdefault(place, {})[run.row] = None
    if lacking:
        told = "\n".join(f"{place}: {', '.join(rows)}" for place, rows in lacking.items())
        raise ConfigError(
            f"no run was started: the data root {data_root} lacks what these rows read; put it there, or let "
            f"the preset skip them\n{told}"
        )


def collect(experiment: Experiment, preset: Preset, results: Path) -> Outcome:
    """The results that are there, complete or not; a cell whose tuning is not done has none."""
    found: dict[Cell, dict[int, Result]] = {(row, str(x)): {} for row, x in cells(experiment, preset)}
    tuned = chosen(experiment, preset, results)
    open_ = {cell for cell in found if preset.tune and cell not in tuned}
    for run in final_runs(experiment, preset, {cell: tuned.get(cell) for cell in found}):
        cell = (run.row, str(run.x))
        result = None if cell in open_ else read_result(results, run)
        if result is not None:
            found[cell][_seed(run)] = result
    return Outcome(found, tuned, compared_rows(experiment, preset, results))


def _seed(run: Run) -> int:
    seed = run.settings["seed"]
    assert isinstance(seed, int)
    return seed
