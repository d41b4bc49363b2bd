"""What `suture recommend` is worth: `python benchmarks/recommendations.py`.

Fits the gains of methods on the phantom maps and the real studies of docs/results/runs, and writes the fit
(custom/suture_papers/tables/recommendations.json) and docs/results/recommendations.md: what was recommended
in federations whose parameters lie in no fitted range, and with each real study left out, beside what was
best. What of a real study's data decides is stored in docs/results/runs/recommendations.jsonl; a study that
is not there needs `--data-root`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from phantom_maps import RESULTS, STUDY, federations_done
from phantom_maps import plan as plan_of
from scipy import stats

from suture.core.files import atomic_write
from suture.learning.metrics import Floats
from suture.simulation.job import load_job, with_settings
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.recommend import configs_of, facts_of
from suture_papers.tables.recommendation import (
    ENOUGH,
    FEATURES,
    FITTED,
    Fit,
    SiteFacts,
    Situation,
    fit,
    situation,
)
from suture_papers.tables.results import ResultStore
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Row, Value

CANDIDATES = ("surgical", "partial", "combined_distil", "fedavg_owners", "fedprox", "individual", "vanilla")
CONTROL = "vanilla"


@dataclass(frozen=True)
class Federation:
    """A federation in which methods were measured.

    Attributes:
        name, study: of it, and of the study that it is one of.
        situation: what decides.
        means: mean AUROC by row.
    """

    name: str
    study: str
    situation: Situation
    means: Mapping[str, float]

    def gain(self, row: str) -> float:
        """Return the difference from the control; NaN where the row was not run."""
        return self.means[row] - self.means[CONTROL] if row in self.means else math.nan


def phantoms(design: str) -> list[Federation]:
    """Return the federations of a design of the phantom maps that are done."""
    found = []
    for name, record in federations_done(design).items():
        sites = {
            site: SiteFacts(of["images"], of["positives"], tuple(of["gray"]))
            for site, of in record["sites"].items()
        }
        means = {row: of["mean"] for row, of in record["rows"].items()}
        found.append(Federation(name, STUDY, situation(sites), means))
    return found


def row_of(row: Row) -> str | None:
    """Return the row of the maps that a table's row is; None where it is another method."""
    rows = plan_of()["rows"]
    same = (name for name, of in rows.items() if of["set"] == row.set)
    return next(same, None)


def real(data_root: Path | None) -> list[Federation]:
    """Return the federations of all tables in which the control and Surgical Aggregation were measured.

    Of a table counts the first preset with results, as the others have the same sites; of a study every one.
    """
    found: list[Federation] = []
    for name in known_tables():
        spec = load_spec(name)
        done = len(found)
        for size in spec.presets:
            if len(found) > done and spec.plan is None:
                break
            outcome = collect(spec.preset(size), ResultStore(RESULTS / "runs", name))
            for x in outcome.table.values:
                means = dict(_means(outcome, x))
                if not {CONTROL, "surgical"} <= means.keys():
                    continue
                key = "-".join([name, size, *([] if x is None else [str(x)])])
                sites = _facts(key, outcome, x, data_root)
                if sites is not None:
                    found.append(Federation(key, name, situation(sites), means))
    unlike = {(one.situation, one.means["surgical"]): one for one in reversed(found)}  # tables share runs
    return sorted(unlike.values(), key=lambda one: one.name)


def _means(outcome: Outcome, x: Value) -> Iterator[tuple[str, float]]:
    """Yield the mean over those seeds that the control has, too, by row of the maps."""
    rows = {row_of(row): key for key, row in outcome.table.rows.items()}
    seeds = outcome.results[rows[CONTROL], str(x)].keys() if CONTROL in rows else ()
    for name, key in rows.items():
        results = outcome.results[key, str(x)]
        areas = [results[seed].metrics["mean_auroc"] for seed in seeds if seed in results]
        if name is not None and areas and len(areas) == len(seeds) and None not in areas:
            yield name, float(np.mean(areas))


def _facts(key: str, outcome: Outcome, x: Value, data_root: Path | None) -> dict[str, SiteFacts] | None:
    """Return what of a table's data decides, stored or read now; None where each image has one label."""
    store = ResultStore(RESULTS / "runs", "recommendations")
    record = store.find(key)
    if record is None:
        tuned = {(row, str(at)): outcome.tuned.get((row, str(at))) for row, at in outcome.table.cells}
        run = next(
            run for run in final_runs(outcome.table, tuned) if run.x == x and _is_control(outcome, run.row)
        )
        job = with_settings(load_job(run.job), run.arguments(data_root)[1::2])
        with tempfile.TemporaryDirectory() as folder:
            sites, label_type = facts_of(configs_of(job, Path(folder)))
        record = {"label_type": label_type, "sites": {name: asdict(site) for name, site in sites.items()}}
        store.put(key, record)
        print(f"read: {key}", flush=True)
    if record["label_type"] != "multilabel":
        return None
    return {
        name: SiteFacts(one["images"], one["positives"], tuple(one["gray"]) if one["gray"] else None)
        for name, one in record["sites"].items()
    }


def _is_control(outcome: Outcome, row: str) -> bool:
    return row_of(outcome.table.rows[row]) == CONTROL


def fitted_on(federations: Sequence[Federation]) -> Fit:
    """Fit the candidates that were run in enough federations."""
    gains = {row: [one.gain(row) for one in federations] for row in CANDIDATES if row != CONTROL}
    gains = {row: of for row, of in gains.items() if sum(map(math.isfinite, of)) >= ENOUGH}
    studies = sorted({one.study for one in federations} - {STUDY})
    number = sum(one.study == STUDY for one in federations)
    about = f"{number} federations of phantoms; {', '.join(studies)}"
    return fit([one.situation for one in federations], gains, about)


@dataclass(frozen=True)
class Advice:
    """What was recommended in a federation, and what was best.

    Attributes:
        name: of the federation.
        recommended, best: rows.
        regret: by strategy, how far its mean AUROC lies below that of the best row.
        told, right: whether the gain of the recommended row was told, and had that sign.
        covered: whether the interval of one federation holds the recommended row's gain.
        gain: of the recommended row over the control.
        outside: whether one of the five numbers lies outside of the fitted ranges.
    """

    name: str
    recommended: str
    best: str
    regret: Mapping[str, float]
    told: bool
    right: bool
    covered: bool
    gain: float
    outside: bool


def advise(one: Federation, by: Fit) -> Advice:
    """Return what the fit recommends in a federation, among the rows that were run in it."""
    expected = by.expected(one.situation)
    among = [row for row in CANDIDATES if row in one.means]
    fitted = [row for row in among if row in {CONTROL, *expected}]
    chosen = max(fitted, key=lambda row: expected[row].gain if row != CONTROL else 0.0)
    best = max(among, key=lambda row: one.means[row])
    top, gain = one.means[best], one.gain(chosen)
    rows = {"recommended": chosen, "always surgical": "surgical", "always combined": "combined_distil"}
    regret = {name: top - one.means[row] for name, row in rows.items() if row in one.means}
    regret["random"] = top - float(np.mean([one.means[row] for row in among]))
    told = chosen != CONTROL and expected[chosen].mean[0] > 0
    low, high = expected[chosen].single if chosen != CONTROL else (0.0, 0.0)
    return Advice(
        one.name,
        chosen,
        best,
        regret,
        told,
        gain > 0,
        low <= gain <= high,
        gain,
        bool(by.outside(one.situation)),
    )


def left_out(federations: Sequence[Federation], more: Sequence[Federation]) -> list[Advice]:
    """Return the advice in each real federation by a fit without its study."""
    found = []
    for study in sorted({one.study for one in federations}):
        by = fitted_on([*more, *(one for one in federations if one.study != study)])
        found += [advise(one, by) for one in federations if one.study == study]
    return found


def confusion(advice: Sequence[Advice]) -> str:
    """Return a Markdown table: what was recommended by what was best."""
    rows = [row for row in CANDIDATES if any(row in (one.recommended, one.best) for one in advice)]
    lines = ["| recommended \\ best | " + " | ".join(rows) + " | all |", "|---" * (len(rows) + 2) + "|"]
    for mine in rows:
        counts = [sum((one.recommended, one.best) == (mine, best) for one in advice) for best in rows]
        lines.append(f"| {mine} | " + " | ".join(map(str, counts)) + f" | {sum(counts)} |")
    return "\n".join(lines)


def regrets(advice: Sequence[Advice]) -> str:
    """Return a Markdown table of the regret of each strategy, and of the paired difference of the first two.

    Intervals are of Student's t over federations; of a regret, which has no negative values, from 0.
    """
    lines = ["| strategy | federations | mean regret (95 %) | 90th percentile |", "|---|---|---|---|"]
    for name in ("recommended", "always surgical", "always combined", "random"):
        values = np.array([one.regret[name] for one in advice if name in one.regret])
        if len(values) > 1:
            mean, reach = _mean_and_reach(values)
            figures = f"{mean:.4f} ({max(0.0, mean - reach):.4f} to {mean + reach:.4f})"
            lines.append(f"| {name} | {len(values)} | {figures} | {np.quantile(values, 0.9):.4f} |")
    pairs = [one.regret for one in advice if "always surgical" in one.regret]
    if len(pairs) > 1:
        mean, reach = _mean_and_reach(np.array([of["recommended"] - of["always surgical"] for of in pairs]))
        figures = f"{mean:+.4f} ({mean - reach:+.4f} to {mean + reach:+.4f})"
        lines.append(f"| recommended less always surgical | {len(pairs)} | {figures} | |")
    return "\n".join(lines)


def _mean_and_reach(values: Floats) -> tuple[float, float]:
    """Return the mean, and how far its 95 % t interval reaches."""
    reach = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(reach)


def sentence(advice: Sequence[Advice]) -> str:
    """Say how often the best row was recommended, and how often what was told was right."""
    n, told = len(advice), [one for one in advice if one.told]
    hit = sum(one.recommended == one.best for one in advice)
    right = sum(one.right for one in told)
    covered = sum(one.covered for one in advice if one.recommended != CONTROL)
    others = sum(one.recommended != CONTROL for one in advice)
    far = [one for one in told if one.outside]
    return (
        f"The best row was recommended in {hit} of {n} federations. A mean gain over the control was "
        f"predicted (its interval lay above 0) in {len(told)}; the recommended row gained in {right} of "
        f"these. The 95 % interval of one federation held its gain in {covered} of {others}. One of the five "
        f"numbers lay outside of its fitted range in {sum(one.outside for one in advice)} federations; there "
        f"{sum(one.right for one in far)} of {len(far)} predicted gains came true."
    )


def coefficients(by: Fit) -> str:
    """Return a Markdown table: by how much a gain changes with a standard deviation of each number."""
    lines = [
        "| gain of | federations | at the mean | " + " | ".join(FEATURES) + " | residual SD |",
        "|---" * (len(FEATURES) + 4) + "|",
    ]
    for name, one in by.methods.items():
        numbers = " | ".join(f"{b:+.4f}" for b in one.coefficients)
        lines.append(f"| {name} | {one.n} | {numbers} | {one.residual:.4f} |")
    ranges = (
        f"{name} {low:.2f} to {high:.2f}" for name, low, high in zip(FEATURES, by.low, by.high, strict=True)
    )
    return "\n".join(lines) + f"\n\nFitted ranges: {'; '.join(ranges)}."


def page(by: Fit, unseen: Sequence[Advice], others: Sequence[Advice], planned: int) -> str:
    """Return docs/results/recommendations.md."""
    parts = [
        "# What `suture recommend` is worth",
        "`python benchmarks/recommendations.py` writes this page and the fit. Regret: how far the mean AUROC "
        "of a row lies below that of the best row of the same federation. Which row is best is also a matter "
        "of chance, so that even perfect advice would have some regret.",
        f"The fit is on {by.about}. Positives are weighted in combined_distil, fedavg_owners and fedprox "
        "alone: their gains include that weight. Coefficients are per standard deviation of each number.",
        coefficients(by),
        f"## Phantoms drawn from other ranges of parameters: {len(unseen)} of {planned} planned",
    ]
    if unseen:
        parts += [sentence(unseen), confusion(unseen), regrets(unseen)]
    parts.append(f"## Real studies, each left out of the fit: {len(others)} federations")
    if others:
        shared = "Most are on the same chest X-rays, so that the intervals are too narrow."
        parts += [sentence(others), confusion(others), regrets(others), shared]
        lines = [
            "| federation | recommended | best | gain of the recommended | regret |",
            "|---|---|---|---|---|",
        ]
        for one in others:
            figures = f"{one.gain:+.3f} | {one.regret['recommended']:.3f}"
            lines.append(f"| {one.name} | {one.recommended} | {one.best} | {figures} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Read what is missing, fit, and write the fit and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("SUTURE_DATA"))
    given = parser.parse_args()
    logging.getLogger("suture").setLevel(logging.ERROR)
    studies, maps = real(Path(given.data_root) if given.data_root else None), phantoms("fitted")
    by = fitted_on([*maps, *studies])
    unseen = [advise(one, by) for one in phantoms("unseen")]
    far = [one.right for one in unseen if one.outside and one.told]
    by = replace(by, outside_told=len(far), outside_right=sum(far))
    atomic_write(FITTED, (json.dumps(asdict(by), indent=1) + "\n").encode())
    text = page(by, unseen, left_out(studies, maps), plan_of()["draws"]["unseen"])
    atomic_write(RESULTS / "recommendations.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
