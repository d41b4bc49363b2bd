"""What a study has found: each row against the control, with the interval first and a verdict in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from suture.core.errors import DataError
from suture_papers.tables.cells import DASH, Grid, p_value
from suture_papers.tables.outcome import Outcome
from suture_papers.tables.plan import changes, digest, plan_table
from suture_papers.tables.spec import Metric, Plan, Table, Value
from suture_papers.tables.statistics import (
    SHIFT,
    Difference,
    corrected_resampled,
    runs_needed,
    two_level,
    with_holm,
)
from suture_papers.tables.verdict import number

METRICS: dict[Metric, str] = {
    "auroc": "AUROC",
    "ap": "average precision",
    "balanced_accuracy": "balanced accuracy",
}
"""Names of the means over all classes."""

CLEARLY, BETTER, WORSE, EQUIVALENT, OPEN, MISSING = (
    "better by more than δ",
    "better",
    "worse",
    "equivalent within ±δ",
    "nothing can be told",
    "no result",
)
VERDICTS = (CLEARLY, BETTER, WORSE, EQUIVALENT, OPEN, MISSING)

_LISTED = 4
"""Rows of a verdict with intervals in the first sentence; of more their means, or the range where open."""


@dataclass(frozen=True)
class Compared:
    """A row of a study in one metric.

    Attributes:
        mean: over its runs; NaN without any.
        seeds: number of runs.
        difference: from the control, over seeds that both have; None for the control itself.
        bootstrap: 95 % interval of the difference over seeds and test patients.
        tuned: the chosen value of the tuned setting.
        seconds: mean cost of a run.
        same_as: the row whose runs these equal in every figure; they are one model, and tested once.
    """

    mean: float
    seeds: int
    difference: Difference | None
    bootstrap: tuple[float, float]
    tuned: Value
    seconds: float
    same_as: str | None = None


def compared(outcome: Outcome, metric: Metric) -> dict[str, Compared]:
    """Return every row of a study in one metric, the control included.

    Raises:
        DataError: a row and the control were tested on other images with the same seed.
    """
    table, twins = outcome.table, same_rows(outcome)
    control = outcome.results[table.spec.reference, "None"]
    differences, found = {}, {}
    for row in table.rows:
        if row in twins:
            continue
        own = outcome.results[row, "None"]
        values = [v for one in own.values() if (v := _value(one.resampled, metric)) is not None]
        bounds = (math.nan, math.nan)
        if row != table.spec.reference:
            paired = {
                seed: (own[seed].resampled, control[seed].resampled)
                for seed in own
                if seed in control
                and _value(own[seed].resampled, metric) is not None
                and _value(control[seed].resampled, metric) is not None
            }
            differences[row], bounds = _difference(row, paired, metric)
        seconds = fmean([one.seconds for one in own.values()]) if own else math.nan
        mean = fmean(values) if values else math.nan
        found[row] = (mean, len(values), bounds, outcome.tuned.get((row, "None")), seconds)
    tested = with_holm(differences)
    distinct = {
        row: Compared(mean, n, tested.get(row), bounds, tuned, seconds)
        for row, (mean, n, bounds, tuned, seconds) in found.items()
    }
    return {
        row: replace(distinct[twins[row]], same_as=twins[row]) if row in twins else distinct[row]
        for row in table.rows
    }


def same_rows(outcome: Outcome) -> dict[str, str]:
    """Return the rows whose runs equal those of another row in every figure, each with that row.

    Two settings can amount to one model, which Holm's correction is not to count twice. The control stands
    for its equals, else the first row does.
    """
    reference = outcome.table.spec.reference
    first: dict[str, str] = {}
    found = {}
    for row in sorted(outcome.table.rows, key=lambda row: row != reference):
        runs = outcome.results[row, "None"]
        content = [[seed, runs[seed].metrics, runs[seed].resampled] for seed in sorted(runs)]
        same = first.setdefault(json.dumps(content, sort_keys=True), row) if content else row
        if same != row:
            found[row] = same
    return found


def _value(of: Mapping[str, Any], metric: Metric) -> float | None:
    value: float | None = of.get(metric, {}).get("value")
    return value


def _difference(
    row: str, paired: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]], metric: Metric
) -> tuple[Difference, tuple[float, float]]:
    for seed, (own, control) in paired.items():
        if own["test"] != control["test"]:
            raise DataError(
                f"seed {seed}: row {row!r} and the control were tested on other images; delete the lines of "
                "both runs, and they are done again"
            )
    sizes = [own for own, _ in paired.values()]
    d = [own[metric]["value"] - control[metric]["value"] for own, control in paired.values()]
    test, train = (fmean([one[key] for one in sizes]) if sizes else 1.0 for key in ("n", "train"))
    test = test if any(one["overlap"] for one in sizes) else 0.0
    draws = [
        [math.nan if None in pair else pair[0] - pair[1] for pair in zip(*both, strict=True)]
        for both in ((own[metric]["draws"], control[metric]["draws"]) for own, control in paired.values())
    ]
    return corrected_resampled(d, test, train), two_level(draws)


def verdict_of(difference: Difference, effect: float) -> str:
    """Return one of `VERDICTS`. Above or below 0 counts only if it stays so after Holm's correction.

    Args:
        effect: δ, the smallest difference of interest.
    """
    if math.isnan(difference.low):
        return MISSING
    if difference.low > 0 and difference.holm < 0.05:
        return CLEARLY if difference.low > effect else BETTER
    if difference.high < 0 and difference.holm < 0.05:
        return WORSE
    return EQUIVALENT if -effect < difference.low and difference.high < effect else OPEN


def sentences(outcome: Outcome) -> str:
    """Return what a study says in its primary metric: wins, losses, equivalences, and what stays open."""
    plan, table = _plan(outcome.table), outcome.table
    rows, effect = compared(outcome, plan.primary), plan.effects[plan.primary]
    found: dict[str, dict[str, Difference]] = {}
    for row, one in rows.items():
        if one.same_as is None and (d := one.difference):
            found.setdefault(verdict_of(d, effect), {})[table.spec.rows[row].name] = d
    said = {
        verdict: "; ".join(
            f"{name} ({_facts(d) if len(own) <= _LISTED else number(d.mean)})" for name, d in own.items()
        )
        for verdict, own in found.items()
    }
    if len(unclear := [d.mean for d in found.get(OPEN, {}).values()]) > _LISTED:
        said[OPEN] = (
            f"{len(unclear)} rows, whose differences are {number(min(unclear))} to {number(max(unclear))}"
        )
    control, own = table.spec.rows[table.spec.reference].name, rows[table.spec.reference]
    head = f"{METRICS[plan.primary]} of {control}: {number(own.mean)} over {own.seeds} seeds, δ {effect:g}."
    parts = [f"{verdict.capitalize()}: {said[verdict]}." for verdict in VERDICTS if verdict in said]
    widest = [one.difference.detectable for one in rows.values() if one.difference]
    widest = [value for value in widest if not math.isnan(value)]
    if widest:
        sizes = " to ".join(dict.fromkeys([number(min(widest)), number(max(widest))]))
        by_row = ", depending on the row," if " to " in sizes else ""
        parts.append(
            f"A difference of {sizes}{by_row} would be found four times in five if its row alone were tested."
        )
    tested = [one.difference for one in rows.values() if one.difference and one.same_as is None]
    return " ".join([head, *parts, *_list_needed(tested, effect)])


def _list_needed(found: Sequence[Difference], effect: float) -> Iterator[str]:
    """Say what would find δ four times in five for the median row, where these runs would not."""
    found = [one for one in found if not math.isnan(one.spread)]
    if not found or (now := median(one.detectable for one in found)) <= effect:
        return
    spread, share = median(one.spread for one in found), median(one.share for one in found)
    if seeds := runs_needed(spread, share, effect):
        yield f"To find δ for the median row takes {seeds} seeds."
        return
    floor, patients = SHIFT * spread * math.sqrt(share), (now / effect) ** 2
    # On patients of its own, a run also has the variance that the runs on these patients share.
    apart = runs_needed(spread * math.sqrt(1 + share), 0.0, effect)
    sets = f", or {apart} such sets of patients with one seed each" if apart else ""
    yield (
        f"More seeds on these patients cannot find less than {number(floor)} for the median row: δ would "
        f"take about {patients:.0f} times as many patients with as many seeds{sets}."
    )


def _facts(d: Difference) -> str:
    if math.isnan(d.low):
        return f"{d.n} seeds"
    return f"{number(d.mean)}, 95 % {number(d.low)} to {number(d.high)}"


def study_tables(outcome: Outcome) -> list[Grid]:
    """Return a table for each metric of the plan, the primary one first."""
    plan = _plan(outcome.table)
    metrics = sorted(plan.effects, key=lambda metric: metric != plan.primary)
    return [_metric_table(outcome, metric, plan.effects[metric]) for metric in metrics]


def _metric_table(outcome: Outcome, metric: Metric, effect: float) -> Grid:
    table = outcome.table
    heads = [
        "method", METRICS[metric], "difference (95 %)", "over seeds and patients", "p", "p (Holm)",
        "detectable", "verdict", "tuned", "seeds",
    ]  # fmt: skip
    cells = []
    alike = []
    for row, one in compared(outcome, metric).items():
        if one.same_as is not None:
            alike.append(
                f"{table.spec.rows[row].name} is {table.spec.rows[one.same_as].name} in every figure"
            )
            continue
        d = one.difference
        tuned = f"{one.tuned:g}" if isinstance(one.tuned, float) else str(one.tuned or DASH)
        between = ["control", *[DASH] * 5]
        if d is not None:
            between = [
                DASH if math.isnan(d.mean) else f"{number(d.mean)} {_bounds(d.low, d.high)}".strip(),
                _bounds(*one.bootstrap) or DASH,
                p_value(d.p),
                p_value(d.holm),
                DASH if math.isnan(d.detectable) else number(d.detectable),
                verdict_of(d, effect),
            ]
        cells.append([table.spec.rows[row].name, number(one.mean), *between, tuned, str(one.seeds)])
    control = table.spec.rows[table.spec.reference].name
    caption = (
        f"{METRICS[metric]}, mean over classes and seeds, and the difference from {control}. Intervals "
        "and p: corrected resampled t-test (splits of different seeds overlap); beside them a bootstrap over "
        "seeds and test patients. Better and worse need p (Holm) < .05; intervals, and with them “by more "
        "than δ” and “equivalent”, are of one row alone. Detectable: with power .8, one row alone. "
        f"δ = {effect:g}."
    )
    return Grid(caption, heads, cells, [f"{'; '.join(alike)}: tested once."] if alike else [])


def plan_facts(table: Table, record: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the plan of a study for its page: when it was registered, and every change since."""
    plan, content = _plan(table), plan_table(table)
    facts = [("question", plan.question), ("stops", plan.stopping)]
    if record is None:
        return [*facts, ("plan", f"not registered; SHA-256 {digest(content)}")]
    commit = f", at commit {record['commit']}" if record["commit"] else ""
    before = record["results_before"]
    facts.append(("plan", f"registered {record['date']}{commit}; SHA-256 {record['digest']}"))
    if before:
        facts.append(("results before the plan", f"{before} of its runs"))
    for one in record["amendments"]:
        facts.append(
            ("plan changed", f"{one['date']}, because: {one['why']}; {_find_change(one['changed'])}")
        )
    if now := changes(record["plan"], content):
        facts.append(("plan changed and not registered", _find_change(now)))
    return facts


def _find_change(what: Mapping[str, Any]) -> str:
    return "; ".join(f"{key}: {old} is now {new}" for key, (old, new) in what.items())


def _plan(table: Table) -> Plan:
    assert table.spec.plan is not None
    return table.spec.plan


def _bounds(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"({number(low)} to {number(high)})"
