"""Columns of an experiment that are about fine-tuned models: their figures, and a table of each task's."""

from __future__ import annotations

from collections.abc import Mapping

from suture.errors import unknown
from suture.evaluation.fine_tuned import TITLES, TunedTask, spread
from suture.evaluation.records import parse
from suture.experiment.conduct import Outcome
from suture.experiment.runs import Result
from suture.experiment.spec import Column, Experiment, Preset

Division = tuple[int, int]
"""A seed, and the number of a fine-tuning run: rows divide a task's data alike where both are equal."""


def runs_of(results: Mapping[int, Result], task: str) -> dict[Division, TunedTask]:
    """Every fine-tuning run on a task, as a task of that one run.

    Args:
        results: of a row, by seed.

    Raises:
        ConfigError: a run was not fine-tuned on the task; names the nearest.
        DataError: a result is damaged.
    """
    found: dict[Division, TunedTask] = {}
    for seed, result in results.items():
        if task not in result.tuned:
            raise unknown("task of a column", task, result.tuned)
        whole = parse(TunedTask, result.tuned[task], f"the result of seed {seed}, {task}")
        found |= {(seed, i): TunedTask((run,)) for i, run in enumerate(whole.runs)}
    return found


def values_of_task(results: Mapping[int, Result], column: Column) -> dict[Division, float]:
    """A column's figure of every fine-tuning run."""
    assert column.task is not None
    return {at: one.figures(column.metric)[0] for at, one in runs_of(results, column.task).items()}


def curves(results: Mapping[int, Result], task: str) -> list[tuple[float, ...]]:
    """The AUROC after each epoch, of every fine-tuning run."""
    return [run.auroc for one in runs_of(results, task).values() for run in one.runs]


def tasks_of(experiment: Experiment) -> tuple[str, ...]:
    """The tasks of the columns, each once."""
    return tuple(dict.fromkeys(column.task for column in experiment.columns if column.task is not None))


def task_cells(experiment: Experiment, preset: Preset, outcome: Outcome) -> list[list[str]]:
    """A line for each task and row: mean ± SD of every figure, and how many examples trained and tested."""
    cells = []
    for task in tasks_of(experiment):
        for row in experiment.rows:
            if row in preset.skip:
                continue
            runs = [run for one in runs_of(outcome.results[row, "None"], task).values() for run in one.runs]
            texts = ["–"] * (len(TITLES) + 1)
            if runs:
                whole = TunedTask(tuple(runs))
                texts = [spread(whole.figures(m), digits=1 if m == "epochs" else 3) for m in TITLES]
                texts.append(f"{runs[0].train} / {runs[0].test}")
            cells.append([task, experiment.rows[row].name, *texts])
    return cells
