"""The cells of a table: means, and how each row compares with the reference row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from suture.learning.metrics import mean_defined, mean_sd
from suture_papers.tables.outcome import Outcome
from suture_papers.tables.results import Result
from suture_papers.tables.spec import Column, Table, TableSpec, Value
from suture_papers.tables.tuned_columns import epochs_text, goal_of, values_of_task
from suture_results.comparison import Comparison, compare_pairs

DASH = "–"


@dataclass(frozen=True)
class Estimate:
    """The mean in one cell, its spread, and its comparison with the reference row.

    Attributes:
        mean, spread: mean and SD over runs, or over classes; NaN where undefined.
        values: the values of these runs or classes; None where undefined.
        against: the comparison of the reference row with this one; None for the reference itself.
        epochs: whether the values are epochs until a goal; None then stands for a run that does not reach it.
        why: the reason that the mean is undefined; empty where it is defined.
        bounds: the 95 % interval of the mean over patients, shown in place of the spread.
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
        """The text of the cell: mean, spread or interval, and mark."""
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
    """A line of the main table.

    Attributes:
        row, name: the row's key, and its name for people.
        x: the value of the series, None without a series.
        runs: the number of runs, of the job or of fine-tuning, that the means are over.
        tuned: the chosen value of the tuned setting.
        estimates: by column.
        published: what the paper printed, by column.
    """

    row: str
    name: str
    x: Value
    runs: int
    tuned: Value
    estimates: Mapping[str, Estimate]
    published: Mapping[str, str]


def lines(outcome: Outcome) -> list[Line]:
    """Return the lines of the main table: every row of the preset, for every value of the series."""
    return [_line(outcome, row, x) for row, x in outcome.table.cells]


def over_series(outcome: Outcome, column: Column) -> dict[str, Estimate]:
    """Compare each row with the reference over all values of the series, run by run.

    Source: Kulkarni et al. 2024, Figs. 6 and 7.
    """
    table = outcome.table
    spec = table.spec

    def values(row: str) -> list[float | None]:
        return [
            mean_of(spec, row, outcome.results[row, str(x)].get(seed), column)
            for x in table.values
            for seed in table.preset.seeds
        ]

    reference = values(spec.reference)
    found = {}
    for row in table.rows:
        own = values(row)
        against = None if row == spec.reference else compare_pairs(reference, own)
        done = [result for x in table.values for result in outcome.results[row, str(x)].values()]
        why = why_undefined(spec, row, done, column)
        found[row] = Estimate(*mean_sd(own, sample=True), tuple(own), against, why=why)
    return found


def _line(outcome: Outcome, row: str, x: Value) -> Line:
    table, own = outcome.table, outcome.results[row, str(x)]
    estimate = _tuned_estimate if table.pairs == "tuned" else _estimate
    estimates = {column.name: estimate(outcome, row, x, column) for column in table.columns}
    for column in table.columns:
        if shows_interval(table, column):  # of a row of one run, in place of its SD, if one is stored
            bounds = [_interval_of(table.spec, row, result, column) for result in own.values()]
            estimates[column.name] = replace(
                estimates[column.name], spread=math.nan, bounds=bounds[0] if len(bounds) == 1 else None
            )
    described = table.spec.rows[row]
    published = {head: text for head, text in described.published.items() if head in estimates}
    runs = len(own) if table.pairs != "tuned" else max(len(one.values) for one in estimates.values())
    return Line(row, described.name, x, runs, outcome.tuned.get((row, str(x))), estimates, published)


def _estimate(outcome: Outcome, row: str, x: Value, column: Column) -> Estimate:
    spec, pairs = outcome.table.spec, outcome.table.pairs
    own, reference = (outcome.results[name, str(x)] for name in (row, spec.reference))
    a: list[float | None]
    b: list[float | None]
    if pairs == "classes":
        mine = class_means(spec, row, own, column)
        theirs = class_means(spec, spec.reference, reference, column)
        names = sorted(mine.keys() | theirs.keys())
        a, b = [theirs.get(n) for n in names], [mine.get(n) for n in names]
    else:
        seeds = sorted(own.keys() | reference.keys())
        a = [mean_of(spec, spec.reference, reference.get(s), column) for s in seeds]
        b = [mean_of(spec, row, own.get(s), column) for s in seeds]
    against = None if row == spec.reference else compare_pairs(a, b)
    why = why_undefined(spec, row, list(own.values()), column)
    sample = pairs != "classes" or not column.by_class  # a single figure of a run has no spread over classes
    return Estimate(*mean_sd(b, sample=sample), tuple(b), against, why=why)


def shows_interval(table: Table, column: Column) -> bool:
    """Return whether a column shows the interval of each mean in place of the SD: in presets of one seed."""
    return column.spread == "interval" and len(table.preset.seeds) == 1


def _tuned_estimate(outcome: Outcome, row: str, _: Value, column: Column) -> Estimate:
    """Estimate a figure of fine-tuned models, compared on equal random splits.

    Epochs are compared only where every run reaches the goal.
    """
    assert column.task is not None
    reference_row = outcome.table.spec.reference
    goal = goal_of(outcome, column.task) if column.metric == "epochs" else None
    own, reference = (
        values_of_task(outcome.results[name, "None"], column, goal) for name in (row, reference_row)
    )
    both, values = sorted(own.keys() & reference.keys()), tuple(own[split] for split in sorted(own))
    late = None in values or None in reference.values()
    against = None
    if row != reference_row:
        undefined = Comparison(len(both), math.nan, math.nan, math.nan, "not every run reaches the goal")
        against = undefined if late else compare_pairs([reference[d] for d in both], [own[d] for d in both])
    why = "" if values else "not run yet"
    return Estimate(*mean_sd(values, sample=True), values, against, column.metric == "epochs", why)


def why_undefined(spec: TableSpec, row: str, results: Sequence[Result], column: Column) -> str:
    """Return the reason that no result gives a column's figure; empty where one does."""
    if not results:
        return "not run yet"
    if any(mean_of(spec, row, result, column) is not None for result in results):
        return ""
    for result in results:
        if areas_of(spec, row, result, column) is None:
            return "no model was trained on every class of the column"
    return (
        "the run does not have this figure, or none of its classes has both positive and negative test images"
    )


def mean_of(spec: TableSpec, row: str, result: Result | None, column: Column) -> float | None:
    """The mean of a column; None where it has not been run, or a class has not been learned."""
    areas = areas_of(spec, row, result, column) if result else None
    return mean_defined(areas.values()) if areas else None


def class_means(spec: TableSpec, row: str, results: Mapping[int, Result], column: Column) -> dict[str, float]:
    """The AUROC (or recall) of each class of a column, the mean over the runs that define it."""
    found: dict[str, list[float]] = {}
    for result in results.values():
        for name, value in (areas_of(spec, row, result, column) or {}).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: math.fsum(v) / len(v) for name, v in found.items()}


def areas_of(spec: TableSpec, row: str, result: Result, column: Column) -> dict[str, float | None] | None:
    """Return the AUROC (or recall) of each class of a column, or its one figure that is not class by class.

    Returns:
        None if no model of the row has learned all classes: the mean is not defined then (Kulkarni et al.
        2024, Sec. 4.3). If several models have learned them, the mean over these models.
    """
    if column.test is None and not column.by_class:
        return {column.metric: figure_of(result.metrics, column)}
    if column.test is None:
        own: dict[str, float | None] = result.metrics.get(column.metric) or {}
        return {name: value for name, value in own.items() if _belongs(result, name, column)}
    wanted, able = _able(spec, row, result, column)
    if column.metric == "loss" and column.test in result.tests:
        return {"loss": mean_defined(_together(model, column).get("loss") for model in able)}
    return {name: mean_defined(m["auroc"][name] for m in able) for name in wanted} if able else None


def _interval_of(spec: TableSpec, row: str, result: Result, column: Column) -> tuple[float, float] | None:
    """Return the 95 % interval of a column's mean AUROC over the patients of the test set.

    Returns:
        None where none is stored, or where the mean is over several models, whose intervals do not average.
    """
    bounds = result.metrics.get("mean_interval")
    if column.test is not None:
        able = _able(spec, row, result, column)[1]
        bounds = _together(able[0], column).get("mean_interval") if len(able) == 1 else None
    return (bounds[0], bounds[1]) if bounds else None


def _able(
    spec: TableSpec, row: str, result: Result, column: Column
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the classes of a column about a test, and the row's models that have learned all of them."""
    assert column.test is not None
    models = result.tests.get(column.test, {})
    home = spec.rows[row].site or spec.tests[column.test].home
    chosen = [models[home]] if home in models else list(models.values())
    classes = dict.fromkeys(name for model in chosen for name in [*model["auroc"], *model["unlearned"]])
    wanted = [name for name in classes if _belongs(result, name, column)]
    return wanted, [model for model in chosen if not set(wanted) & set(model["unlearned"])]


def _together(model: Mapping[str, Any], column: Column) -> Mapping[str, Any]:
    """Return a model's figures over all classes of a column's group; empty in results that have none."""
    if column.group == "mean":
        return model
    found: Mapping[str, Any] = model.get("groups", {}).get(column.group, {})
    return found


def figure_of(metrics: Mapping[str, Any], column: Column) -> float | None:
    """Return the figure of a column that is not class by class; None where metrics.json has none."""
    if column.metric == "loss":
        return metrics.get("loss")  # old results have none
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
    """Return whether a class belongs to a column's group and list."""
    if column.classes is not None and name not in column.classes:
        return False
    owners = sum(name in labels for labels in result.run["sites"].values())
    return column.group == "mean" or (owners > 1 if column.group == "shared" else owners == 1)


@dataclass(frozen=True)
class Grid:
    """The cells of a table as text, and the footnotes that some of them refer to."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Notes:
    """The footnotes of a table: one for each reason that a mean, or its p, is undefined."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}

    def mark(self, text: str, reason: str) -> str:
        """Return the text of a cell with the number of its footnote, where there is a reason."""
        if not reason:
            return text
        return f"{text} [{self._reasons.setdefault(reason, len(self._reasons) + 1)}]"

    def cells(self, estimate: Estimate) -> tuple[str, str]:
        """Return the texts of a mean and its p; where the mean is undefined, so is p, for the same reason."""
        against = estimate.against.why if estimate.against and not estimate.why else ""
        return self.mark(estimate.text, estimate.why), self.mark(p_text(estimate), against)

    def lines(self) -> tuple[str, ...]:
        """Return the footnotes."""
        return tuple(f"[{number}] {reason}" for reason, number in self._reasons.items())


def p_text(estimate: Estimate) -> str:
    """Return the p value of a comparison as text."""
    return DASH if estimate.against is None else p_value(estimate.against.p)


def p_value(p: float | None) -> str:
    """Return a p value with three digits and no leading 0; with four where three would round up to .050."""
    if p is None or math.isnan(p):
        return DASH
    digits = 4 if p < 0.05 <= round(p, 3) else 3
    return "< .001" if p < 0.001 else f"{p:.{digits}f}".removeprefix("0")
