"""What a study has found: each row's mean, and its difference from the control."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from suture_papers.studies.conduct import FIRST, Tuned, final_run, stored, tuned
from suture_papers.studies.design import Design
from suture_papers.studies.inference import Difference, Measured, difference
from suture_papers.studies.measure import measured
from suture_papers.tables.results import ResultStore
from suture_results.comparison import holm


@dataclass(frozen=True)
class Line:
    """A row of a study.

    Attributes:
        name: of the method.
        mean: of the metric over folds and seeds.
        folds: number of folds that it was tested in.
        difference: from the control over the same folds; None for the control.
        first_mean, first: both in the first fold alone, in which every row was tested.
        p: of the primary row as it is, of the others after Holm's correction; NaN where a single fold is not
            tested.
        tuned: what it was tuned to.
    """

    name: str
    mean: float
    folds: int
    difference: Difference | None
    first_mean: float
    first: Difference | None
    p: float
    tuned: Tuned

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` at p < .05, else the empty string."""
        if self.difference is None or not self.p < 0.05:
            return ""
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class Outcome:
    """The stored runs of a design.

    Attributes:
        lines: by row; those that are complete.
        hidden: the share of labels that sites do not annotate.
        images: tested, over all folds.
        hours: of all stored runs.
        plan: the stored record of the plan.
    """

    design: Design
    lines: Mapping[str, Line]
    hidden: float
    images: int
    hours: float
    plan: Mapping[str, Any]

    @property
    def primary(self) -> Line:
        """The row that the study is about."""
        return self.lines[self.design.study.primary]

    @property
    def control(self) -> Line:
        """The row that all others are compared with."""
        return self.lines[self.design.study.control]


def collect(design: Design, store: ResultStore) -> Outcome | None:
    """Return what the stored runs say; None until control and primary row are complete.

    Raises:
        DataError: the file of records is damaged.
    """
    study, plan = design.study, store.find("plan")
    found = {row: _tests(design, store, row) for row in design.rows}
    done = {row: one for row, one in found.items() if one is not None}
    if plan is None or not {study.control, study.primary} <= done.keys():
        return None
    tests = {
        row: {fold: [measured(record) for record in records] for fold, records in folds.items()}
        for row, (folds, _) in done.items()
    }
    others, control_runs = [row for row in done if row != study.control], tests[study.control]
    differences = {row: difference(tests[row], control_runs) for row in others}
    firsts = {row: difference(_first(tests[row]), control_runs) for row in others}
    secondary = [row for row in differences if row != study.primary and not design.rows[row].single]
    p = dict(zip(secondary, holm([differences[row].p for row in secondary]), strict=True))
    p[study.primary] = differences[study.primary].p
    lines = {
        row: Line(
            name=design.rows[row].name,
            mean=_mean(tests[row]),
            folds=len(tests[row]),
            difference=differences.get(row),
            first_mean=_mean(_first(tests[row])),
            first=firsts.get(row),
            p=p.get(row, math.nan),
            tuned=done[row][1],
        )
        for row in done
    }
    control = done[study.control][0]
    return Outcome(
        design=design,
        lines=lines,
        hidden=float(np.mean([records[0]["hidden"] for records in control.values()])),
        images=sum(records[0]["images"] for records in control.values()),
        hours=sum(run.get("seconds", 0.0) for run in store.every().values()) / 3600,
        plan=plan,
    )


def _tests(
    design: Design, store: ResultStore, row: str
) -> tuple[dict[int, list[Mapping[str, Any]]], Tuned] | None:
    """Return the records of a row by fold, and what it was tuned to; None until all are there."""
    one = tuned(design, row, stored(store))
    if one is None:
        return None
    found: dict[int, list[Mapping[str, Any]]] = {}
    for fold in design.folds(row):
        for seed in design.study.seeds:
            record = store.find(final_run(design, row, fold, seed, one).name)
            if record is None:
                return None
            found.setdefault(fold, []).append(record)
    return found, one


def _first(tests: Mapping[int, list[Measured]]) -> dict[int, list[Measured]]:
    return {FIRST: tests[FIRST]}


def _mean(tests: Mapping[int, list[Measured]]) -> float:
    return float(np.mean([run.auroc for runs in tests.values() for run in runs]))
