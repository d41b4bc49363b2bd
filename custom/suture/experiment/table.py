"""The cells of an experiment's table: figures, and how each row compares with the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suture.evaluation.statistics import Comparison, mean_sd, paired
from suture.experiment.conduct import Outcome
from suture.experiment.runs import Result, values_of
from suture.experiment.spec import Experiment, Group, Preset, Value

DASH = "–"


@dataclass(frozen=True)
class Figure:
    """One cell.

    Attributes:
        mean, spread: over runs, or over classes; NaN where undefined.
        values: what they are over.
        against: the comparison of the reference row with this one; None for the reference itself.
    """

    mean: float
    spread: float
    values: tuple[float | None, ...]
    against: Comparison | None

    @property
    def text(self) -> str:
        """For a table: mean, spread and mark."""
        if math.isnan(self.mean):
            return DASH
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.3f}"
        mark = "" if self.against is None or self.against.mark == DASH else f" {self.against.mark}"
        return f"{self.mean:.3f}{spread}{mark}"


@dataclass(frozen=True)
class Line:
    """A row: its name, its figures by group of classes, and what they rest on."""

    row: str
    name: str
    x: Value
    runs: int
    tuned: Value
    figures: Mapping[Group, Figure]
    published: Mapping[str, str]


def lines(experiment: Experiment, preset: Preset, outcome: Outcome) -> list[Line]:
    """Every row that the preset has, for every value of the series."""
    return [
        _line(experiment, outcome, row, x)
        for x in values_of(experiment, preset)
        for row in experiment.rows
        if row not in preset.skip
    ]


def over_series(experiment: Experiment, preset: Preset, outcome: Outcome, group: Group) -> dict[str, Figure]:
    """Each row over all values of the series, compared run by run (Kulkarni et al. 2024, Figs. 6 and 7)."""

    def values(row: str) -> list[float | None]:
        return [
            outcome.results[row, str(x)][seed].area(group) if seed in outcome.results[row, str(x)] else None
            for x in values_of(experiment, preset)
            for seed in preset.seeds
        ]

    reference = values(experiment.reference)
    found = {}
    for row in experiment.rows:
        if row not in preset.skip:
            own = values(row)
            against = None if row == experiment.reference else paired(reference, own)
            found[row] = Figure(*mean_sd(own, sample=True), tuple(own), against)
    return found


def _line(experiment: Experiment, outcome: Outcome, row: str, x: Value) -> Line:
    own = outcome.results[row, str(x)]
    reference = outcome.results[experiment.reference, str(x)]
    figures: dict[Group, Figure] = {}
    for group in experiment.columns:
        if experiment.pairs == "classes":
            mine, theirs = class_means(own, group), class_means(reference, group)
            names = sorted(mine.keys() | theirs.keys())
            a, b = [theirs.get(n) for n in names], [mine.get(n) for n in names]
        else:
            seeds = sorted(own.keys() | reference.keys())
            a = [reference[s].area(group) if s in reference else None for s in seeds]
            b = [own[s].area(group) if s in own else None for s in seeds]
        against = None if row == experiment.reference else paired(a, b)
        figures[group] = Figure(*mean_sd(b, sample=experiment.pairs == "runs"), tuple(b), against)
    described = experiment.rows[row]
    tuned = outcome.tuned.get((row, str(x)))
    return Line(row, described.name, x, len(own), tuned, figures, described.published)


def class_means(results: Mapping[int, Result], group: Group = "mean") -> dict[str, float]:
    """The AUROC of each class of a group, the mean over the runs that define it."""
    found: dict[str, list[float]] = {}
    for result in results.values():
        members = group_of(result, group)
        for name, value in result.metrics["auroc"].items():
            if value is not None and name in members:
                found.setdefault(name, []).append(float(value))
    return {name: math.fsum(v) / len(v) for name, v in found.items()}


def group_of(result: Result, group: Group) -> Sequence[str]:
    """The classes of a group: all, those of several sites, or those of one."""
    sites: Mapping[str, Sequence[str]] = result.run["sites"]
    names = list(result.metrics["auroc"])
    if group == "mean":
        return names
    owners = {name: sum(name in labels for labels in sites.values()) for name in names}
    return [name for name in names if (owners[name] > 1) == (group == "shared") and owners[name]]
