"""The results of fine-tuning, read from tuned.json: tables and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.table import Table

from suture.core.escaping import rich
from suture.core.files import read_json
from suture.learning.metrics import mean_sd
from suture.protocol.records import Metrics, parse
from suture_results.charts import Chart, Series, line_chart
from suture_results.formatting import count

_WITHIN = 0.01
"""An AUROC counts as the best of its run if it is at most this far below it."""

TITLES = {"auroc": "AUROC", "precision": "Precision", "recall": "Recall", "f1": "F1", "epochs": "Epochs"}
"""The figures of a run, in the order in which they are shown, and their names."""

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class TunedRun:
    """One run, on one random split of the data: the AUROC after each epoch, other figures after the last."""

    auroc: Annotated[tuple[Share, ...], Field(min_length=1)]
    precision: Share
    recall: Share
    f1: Share
    train: int
    test: int
    positives: int | None = None
    cases: tuple[str, ...] = ()

    @property
    def epochs(self) -> int:
        """The first epoch, from 1, whose AUROC is within `_WITHIN` of the best."""
        found = self.reaches(max(self.auroc) - _WITHIN)
        assert found is not None
        return found

    def reaches(self, goal: float) -> int | None:
        """Return the first epoch, from 1, whose AUROC is at least `goal`; None where none is."""
        # 1e-9: 0.91 - 0.90 is a little more than 0.01 in binary.
        return next((epoch for epoch, area in enumerate(self.auroc, 1) if area >= goal - 1e-9), None)

    def figure(self, metric: str) -> float:
        """Return a figure of `TITLES`; the AUROC is that of the last epoch."""
        return self.auroc[-1] if metric == "auroc" else float(getattr(self, metric))


@dataclass(frozen=True)
class TunedTask:
    """All runs on one learning task."""

    runs: Annotated[tuple[TunedRun, ...], Field(min_length=1)]

    def figures(self, metric: str) -> list[float]:
        """Return a figure of `TITLES` for each run."""
        return [run.figure(metric) for run in self.runs]


@dataclass(frozen=True)
class How:
    """The settings of fine-tuning that the report shows; see `suture.execution.job.FineTuning`."""

    runs: int
    epochs: int
    test: Share
    start: Literal["model", "fresh"]
    examples: int | None = None
    few: int | None = None


@dataclass(frozen=True)
class FinetuningResults:
    """The content of tuned.json, as `suture_results.finetuning` writes it.

    Attributes:
        begun, data: the folder of the model before, and the suture.toml; empty for the targets of a run.
    """

    how: How
    targets: Annotated[dict[str, TunedTask], Field(min_length=1)]
    begun: str = ""
    data: str = ""


@dataclass(frozen=True)
class TaskRow:
    """A row of the table; `figures` are texts in the order of `TITLES`."""

    name: str
    figures: tuple[str, ...]
    train: str
    test: str


def read_finetuning_results(folder: Path) -> FinetuningResults | None:
    """Read tuned.json of a folder; return None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    path = folder / "tuned.json"
    return parse(FinetuningResults, read_json(path), str(path)) if path.is_file() else None


def nothing_measured(metrics: Metrics | None) -> bool:
    """Return whether all figures of a run are undefined, as they are where every row of every site trains."""
    return metrics is not None and all(area is None for area in metrics.auroc.values())


def task_rows(targets: dict[str, TunedTask]) -> list[TaskRow]:
    """Return a row for each task."""
    return [
        TaskRow(
            name,
            tuple(spread(task.figures(metric), digits=1 if metric == "epochs" else 3) for metric in TITLES),
            _span([run.train for run in task.runs]),
            _span([run.test for run in task.runs]) + _of_them([run.positives for run in task.runs]),
        )
        for name, task in targets.items()
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean ± SD of values, or the value if it is the only one."""
    mean, sd = mean_sd(values, sample=True)
    return f"{mean:.{digits}f}" + ("" if len(values) == 1 else f" ± {sd:.{digits}f}")


def learning_charts(targets: dict[str, TunedTask]) -> list[Chart]:
    """Return a chart for each task: the AUROC after each epoch, as the mean and the range over runs."""
    charts = []
    for name, task in targets.items():
        epochs = list(zip(*(run.auroc for run in task.runs), strict=True))
        means = [sum(areas) / len(areas) for areas in epochs]
        bands = [(min(areas), max(areas)) for areas in epochs]
        if chart := line_chart(name, range(1, len(epochs) + 1), [Series("AUROC", means, bands)]):
            charts.append(chart)
    return charts


def section(tuned: FinetuningResults) -> dict[str, Any]:
    """Return the template's values for the section on fine-tuning."""
    rows = task_rows(tuned.targets)
    few = f", {tuned.how.few} examples"
    return {
        "how": tuned.how,
        "heads": list(TITLES.values()),
        "rows": rows,
        "tasks": [row for row in rows if not row.name.endswith(few)],
        "charts": learning_charts(tuned.targets),
    }


def finetuning_table(tuned: FinetuningResults) -> Table:
    """Return the terminal's table: the figures of each task."""
    how = tuned.how
    begun = "the trained model" if how.start == "model" else "a random model"
    table = Table(
        title=f"Fine-tuned from {begun}",
        caption=f"runs: {how.runs}, of {how.epochs} epochs each; AUROC: mean ± SD; Epochs: until "
        f"within {_WITHIN:g} of the best AUROC; Examples: trained on / tested on (positives)",
        title_justify="left",
        show_edge=False,
    )
    table.add_column("Task")
    for head in (*TITLES.values(), "Examples"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in task_rows(tuned.targets):
        area, *others = row.figures
        means = (text.partition(" ")[0] for text in others)
        table.add_row(rich(row.name), area, *means, f"{row.train} / {row.test}")
    return table


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return count(low) if low == high else f"{count(low)}–{count(high)}"


def _of_them(positives: Sequence[int | None]) -> str:
    known = [n for n in positives if n is not None]  # tuned.json of a paper's stored run has none
    return f" ({_span(known)})" if known else ""
