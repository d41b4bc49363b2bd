"""The cells of an experiment's table: figures, and how each row compares with the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from suture.experiments.conduct import Outcome
from suture.experiments.fine_tuned import epochs_text, goal_of, values_of_task
from suture.experiments.runs import Result, values_of
from suture.experiments.spec import Column, Experiment, Pairs, Preset, Value
from suture.learning.comparison import Comparison, paired
from suture.learning.metrics import mean_defined, mean_sd

DASH = "–"


@dataclass(frozen=True)
class Figure:
    """One cell.

    Attributes:
        mean, spread: over runs, or over classes; NaN where undefined.
        values: what they are over.
        against: the comparison of the reference row with this one; None for the reference itself.
        epochs: whether these are epochs to a goal, None where it is not reached.
        why: why the mean is undefined; empty where it is not.
        bounds: 95 % interval of the mean over patients; in a cell it stands in place of the spread.
    """

    mean: float
    spread: float
    values: tuple[float | None, ...]
    against: Comparison | None
    epochs: bool = False
    why: str = ""
    bounds: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """For a table: mean, spread or interval, and mark."""
        mark = "" if self.against is None or self.against.mark == DASH else f" {self.against.mark}"
        if self.epochs:
            return epochs_text(self.values) + mark
        if math.isnan(self.mean):
            return DASH
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.3f}"
        if self.bounds is not None:
            spread = " ({:.3f}, {:.3f})".format(*self.bounds)
        return f"{self.mean:.3f}{spread}{mark}"


@dataclass(frozen=True)
class Line:
    """A row: its name, its figures by column, and the runs (of the job, or of fine-tuning) behind them."""

    row: str
    name: str
    x: Value
    runs: int
    tuned: Value
    figures: Mapping[str, Figure]
    published: Mapping[str, str]


def lines(experiment: Experiment, preset: Preset, outcome: Outcome) -> list[Line]:
    """Every row that the preset has, for every value of the series."""
    return [
        _line(experiment, preset, outcome, row, x)
        for x in values_of(experiment, preset)
        for row in experiment.rows
        if row not in preset.skip
    ]


def over_series(
    experiment: Experiment, preset: Preset, outcome: Outcome, column: Column
) -> dict[str, Figure]:
    """Each row over all values of the series, compared run by run (Kulkarni et al. 2024, Figs. 6 and 7)."""

    def values(row: str) -> list[float | None]:
        return [
            mean_of(experiment, row, outcome.results[row, str(x)].get(seed), column)
            for x in values_of(experiment, preset)
            for seed in preset.seeds
        ]

    reference = values(experiment.reference)
    found = {}
    for row in experiment.rows:
        if row not in preset.skip:
            own = values(row)
            against = None if row == experiment.reference else paired(reference, own)
            done = [r for x in values_of(experiment, preset) for r in outcome.results[row, str(x)].values()]
            why = why_undefined(experiment, row, done, column)
            found[row] = Figure(*mean_sd(own, sample=True), tuple(own), against, why=why)
    return found


def _line(experiment: Experiment, preset: Preset, outcome: Outcome, row: str, x: Value) -> Line:
    own, described, pairs = outcome.results[row, str(x)], experiment.rows[row], experiment.pairs_in(preset)
    columns = experiment.columns_in(preset)
    figures = {c.name: _figure(experiment, pairs, outcome, row, x, c) for c in columns}
    for column in columns:
        if shows_interval(preset, column):
            figures[column.name] = _with_interval(experiment, figures[column.name], row, own, column)
    published = {head: text for head, text in described.published.items() if head in figures}
    tuned = outcome.tuned.get((row, str(x)))
    runs = len(own)
    if pairs == "tuned":
        runs = max(len(figure.values) for figure in figures.values())
    return Line(row, described.name, x, runs, tuned, figures, published)


def _figure(
    experiment: Experiment, pairs: Pairs, outcome: Outcome, row: str, x: Value, column: Column
) -> Figure:
    if pairs == "tuned":
        return _tuned_figure(experiment, outcome, row, column)
    own, reference = (outcome.results[name, str(x)] for name in (row, experiment.reference))
    a: list[float | None]
    b: list[float | None]
    if pairs == "classes":
        mine = class_means(experiment, row, own, column)
        theirs = class_means(experiment, experiment.reference, reference, column)
        names = sorted(mine.keys() | theirs.keys())
        a, b = [theirs.get(n) for n in names], [mine.get(n) for n in names]
    else:
        seeds = sorted(own.keys() | reference.keys())
        a = [mean_of(experiment, experiment.reference, reference.get(s), column) for s in seeds]
        b = [mean_of(experiment, row, own.get(s), column) for s in seeds]
    against = None if row == experiment.reference else paired(a, b)
    why = why_undefined(experiment, row, list(own.values()), column)
    sample = pairs != "classes" or not column.by_class  # a single figure of a run has no spread over classes
    return Figure(*mean_sd(b, sample=sample), tuple(b), against, why=why)


def shows_interval(preset: Preset, column: Column) -> bool:
    """Whether a column has the interval of each mean in place of the SD; several seeds have the SD."""
    return column.spread == "interval" and len(preset.seeds) == 1


def _with_interval(
    experiment: Experiment, figure: Figure, row: str, results: Mapping[int, Result], column: Column
) -> Figure:
    """The figure of a row's single run with the interval of its mean in place of the SD, if one was kept."""
    found = [interval_of(experiment, row, result, column) for result in results.values()]
    return replace(figure, spread=math.nan, bounds=found[0] if len(found) == 1 else None)


def _tuned_figure(experiment: Experiment, outcome: Outcome, row: str, column: Column) -> Figure:
    """A figure of fine-tuned models, compared on equal divisions; epochs only where every run arrives."""
    assert column.task is not None
    goal = goal_of(experiment, outcome, column.task) if column.metric == "epochs" else None
    own, reference = (
        values_of_task(outcome.results[name, "None"], column, goal) for name in (row, experiment.reference)
    )
    both, values = sorted(own.keys() & reference.keys()), tuple(own[division] for division in sorted(own))
    late = None in values or None in reference.values()
    against = None
    if row != experiment.reference:
        undefined = Comparison(len(both), math.nan, math.nan, math.nan, "not every run reaches the goal")
        against = undefined if late else paired([reference[d] for d in both], [own[d] for d in both])
    why = "" if values else "not run yet"
    return Figure(*mean_sd(values, sample=True), values, against, column.metric == "epochs", why)


def why_undefined(experiment: Experiment, row: str, results: Sequence[Result], column: Column) -> str:
    """Why no result gives a column's figure; empty where one does."""
    if not results:
        return "not run yet"
    if any(mean_of(experiment, row, result, column) is not None for result in results):
        return ""
    for result in results:
        if column.test in result.untested:
            return f"the data of the test were not there: {result.untested[column.test]}"
        if areas_of(experiment, row, result, column) is None:
            return "no model has learned every class of the column"
    return "the run has no such figure, or no class of it has both positive and negative test images"


def mean_of(experiment: Experiment, row: str, result: Result | None, column: Column) -> float | None:
    """The mean of a column; None where it has not been run, or a class has not been learned."""
    areas = areas_of(experiment, row, result, column) if result else None
    return mean_defined(areas.values()) if areas else None


def class_means(
    experiment: Experiment, row: str, results: Mapping[int, Result], column: Column
) -> dict[str, float]:
    """The AUROC (or recall) of each class of a column, the mean over the runs that define it."""
    found: dict[str, list[float]] = {}
    for result in results.values():
        for name, value in (areas_of(experiment, row, result, column) or {}).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: math.fsum(v) / len(v) for name, v in found.items()}


def areas_of(
    experiment: Experiment, row: str, result: Result, column: Column
) -> dict[str, float | None] | None:
    """The AUROC (or recall) of each class of a column, or its one figure that is not class by class.

    Returns:
        None if no model of the row has learned them all: the mean is not defined then (Kulkarni et al. 2024,
        Sec. 4.3). Of several that have, the mean.
    """
    if column.test is None and not column.by_class:
        return {column.metric: figure_of(result.metrics, column)}
    if column.test is None:
        own: dict[str, float | None] = result.metrics.get(column.metric) or {}
        return {name: value for name, value in own.items() if _belongs(result, name, column)}
    wanted, able = _able(experiment, row, result, column)
    if column.metric == "loss" and column.test in result.tests:
        return {"loss": mean_defined(_together(model, column).get("loss") for model in able)}
    return {name: mean_defined(m["auroc"][name] for m in able) for name in wanted} if able else None


def interval_of(
    experiment: Experiment, row: str, result: Result, column: Column
) -> tuple[float, float] | None:
    """The 95 % interval of a column's mean AUROC over the patients of the test set.

    None where none was kept, or where the mean is of several models: their intervals do not average.
    """
    bounds = result.metrics.get("mean_interval")
    if column.test is not None:
        able = _able(experiment, row, result, column)[1]
        bounds = _together(able[0], column).get("mean_interval") if len(able) == 1 else None
    return (bounds[0], bounds[1]) if bounds else None


def _able(
    experiment: Experiment, row: str, result: Result, column: Column
) -> tuple[list[str], list[dict[str, Any]]]:
    """The classes of a column about a test, and the row's models that have learned them all."""
    assert column.test is not None
    models = result.tests.get(column.test, {})
    home = experiment.rows[row].site or experiment.tests[column.test].home
    chosen = [models[home]] if home in models else list(models.values())
    classes = dict.fromkeys(name for model in chosen for name in [*model["auroc"], *model["unlearned"]])
    wanted = [name for name in classes if _belongs(result, name, column)]
    return wanted, [model for model in chosen if not set(wanted) & set(model["unlearned"])]


def _together(model: Mapping[str, Any], column: Column) -> Mapping[str, Any]:
    """A model's figures of a column's classes together; empty in what was kept before there were any."""
    if column.group == "mean":
        return model
    found: Mapping[str, Any] = model.get("groups", {}).get(column.group, {})
    return found


def figure_of(metrics: Mapping[str, Any], column: Column) -> float | None:
    """The one figure of a column that is not class by class; None where metrics.json has none."""
    if column.metric == "loss":
        return metrics.get("loss")  # what was kept before there was one has none
    path: tuple[str, ...] = ("overall",)
    name: str = column.metric
    if column.frequency is not None:
        path, name = ("long_tail", "accuracy"), column.frequency
    elif column.attribute == "mean":
        path = ("attributes", "mean")
    elif column.attribute is not None:
        path = ("attributes", "values", column.attribute)
    elif column.models is not None:
        path = ("local_models", "mean", column.models)
    found: Any = metrics
    for key in path:
        found = found.get(key, {})
    value: float | None = found.get(name)
    return value


def _belongs(result: Result, name: str, column: Column) -> bool:
    """Whether a class is of a column's group and list."""
    if column.classes is not None and name not in column.classes:
        return False
    owners = sum(name in labels for labels in result.run["sites"].values())
    return column.group == "mean" or (owners > 1 if column.group == "shared" else owners == 1)
