"""The figures of tables, computed again from the stored runs by formulas of their own.

Nothing of `suture_papers.tables` is imported: what is wrong there is not repeated here.

    python tests/papers/tables/recomputed.py docs/results/runs/nih_overlap.jsonl .../nih_overlap.toml
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtr

Runs = dict[str, dict[int, dict[str, Any]]]
"""By row and seed, the line of the final run."""


def final_runs(lines: Path, table: Path, preset: str | None = None) -> Runs:
    """Return the final runs of each row: those with the learning rate that is best on validation data."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    records = [one for one in records if "run" in one and "metrics" in one]
    spec = tomllib.loads(table.read_text())
    size = spec["presets"][preset or next(iter(spec["presets"]))]
    found: Runs = {}
    for row, described in spec["rows"].items():
        if row in size.get("skip", ()):
            continue
        fixed = spec.get("set", {}) | size.get("set", {}) | described.get("set", {})
        fixed |= size.get("rows", {}).get(row, {})
        grid = size.get("tune")
        free = {"seed"} | ({grid["key"]} if grid else set())
        of = [one for one in records if without(one["run"]["settings"], free) == without(fixed, free)]
        if grid:
            seed, key = grid.get("seed", 1), grid["key"]
            tried = [one for one in of if one["run"]["settings"]["seed"] == seed]
            if len({one["run"]["settings"].get(key) for one in tried}) < len(grid["values"]):
                found[row] = {}
                continue
            order = grid["values"].index  # of equal figures the first value
            best = max(tried, key=lambda one: (one["validation_auroc"], -order(one["run"]["settings"][key])))
            of = [one for one in of if one["run"]["settings"][key] == best["run"]["settings"][key]]
        found[row] = {one["run"]["settings"]["seed"]: one for one in of}
        found[row] = {seed: one for seed, one in found[row].items() if seed in size["seeds"]}
    return found


def without(settings: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def mean_area(record: dict[str, Any]) -> float:
    """The mean AUROC over the classes of a run that have one."""
    return fmean(area for area in record["metrics"]["auroc"].values() if area is not None)


def student(d: list[float]) -> float:
    """The p of a paired two-tailed t-test."""
    return 2 * float(stdtr(len(d) - 1, -abs(fmean(d)) / (stdev(d) / math.sqrt(len(d)))))


if __name__ == "__main__":
    for row, own in final_runs(Path(sys.argv[1]), Path(sys.argv[2])).items():
        print(row, len(own), f"{fmean(map(mean_area, own.values())):.3f}" if own else "-")
