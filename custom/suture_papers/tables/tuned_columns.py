"""The columns of a table that are about fine-tuned models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from suture.core.errors import check_known
from suture.protocol.records import parse
from suture_papers.tables.outcome import Outcome
from suture_papers.tables.results import Result
from suture_papers.tables.spec import Column, TableSpec
from suture_results.finetuning_results import TITLES, TunedTask, spread

_RandomSplit = tuple[int, int]
"""A seed and the number of a fine-tuning run: where both are equal, rows have the same random split."""


def _runs_of(results: Mapping[int, Result], task: str) -> dict[_RandomSplit, TunedTask]:
    """Return every fine-tuning run on a task, each as a `TunedTask` of that one run.

    Args:
        results: those of a row, by seed.

    Raises:
        ConfigError: a run was not fine-tuned on the task; names the nearest.
        DataError: a result is damaged.
    """
    found: dict[_RandomSplit, TunedTask] = {}
    for seed, result in results.items():
        check_known("task of a column", task, result.tuned)
        whole = parse(TunedTask, result.tuned[task], f"the result of seed {seed}, {task}")
        found |= {(seed, i): TunedTask((run,)) for i, run in enumerate(whole.runs)}
    return found


def goal_of(outcome: Outcome, task: str) -> float | None:
    """Return the AUROC of a task that epochs are counted to: the mean of the goal row after its last epoch.

    All rows have the same goal: a run that is never good would soon reach its own best AUROC.
    """
    if (row := outcome.table.spec.goal) is None:
        return None
    runs = _runs_of(outcome.results[row, "None"], task)
    ends = [end for one in runs.values() for end in one.figures("auroc")]
    return fmean(ends) if ends else None


def values_of_task(
    results: Mapping[int, Result], column: Column, goal: float | None
) -> dict[_RandomSplit, float | None]:
    """Return a column's figure of every fine-tuning run; None for epochs where the run misses the goal."""
    assert column.task is not None
    runs = _runs_of(results, column.task)
    if column.metric != "epochs":
        return {at: one.figures(column.metric)[0] for at, one in runs.items()}
    return {at: one.runs[0].reaches(goal) for at, one in runs.items()} if goal is not None else {}


def epochs_text(epochs: Sequence[float | None]) -> str:
    """Return mean ± SD over the runs that reach the goal, and their number where not all do."""
    reached = [epoch for epoch in epochs if epoch is not None]
    if not reached:
        return "not reached" if epochs else "–"
    text = spread(reached, digits=1)
    return text if len(reached) == len(epochs) else f"{text} ({len(reached)} of {len(epochs)})"


def curves(results: Mapping[int, Result], task: str) -> list[tuple[float, ...]]:
    """Return the AUROC after each epoch, of every fine-tuning run."""
    return [run.auroc for one in _runs_of(results, task).values() for run in one.runs]


def tasks_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the tasks of columns, each once."""
    return tuple(dict.fromkeys(column.task for column in columns if column.task is not None))


def show_settings(spec: TableSpec) -> dict[str, str]:
    """Return the figures of the table of tasks with their heads; without a goal there are no epochs."""
    return {key: head for key, head in TITLES.items() if key != "epochs" or spec.goal is not None}


def task_cells(outcome: Outcome) -> list[list[str]]:
    """Return a line for each task and row: mean ± SD of every figure, and the numbers of examples."""
    table, heads = outcome.table, show_settings(outcome.table.spec)
    cells = []
    for task in tasks_of(table.columns):
        goal = goal_of(outcome, task)
        for key, row in table.rows.items():
            runs = [run for one in _runs_of(outcome.results[key, "None"], task).values() for run in one.runs]
            texts = ["–"] * (len(heads) + 1)
            if runs:
                whole = TunedTask(tuple(runs))
                texts = [spread(whole.figures(m), digits=3) for m in heads if m != "epochs"]
                if "epochs" in heads:
                    texts.append(epochs_text([run.reaches(goal) for run in runs] if goal is not None else []))
                texts.append(f"{runs[0].train} / {runs[0].test}")
            cells.append([task, row.name, *texts])
    return cells
