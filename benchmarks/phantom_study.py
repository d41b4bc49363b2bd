"""Methods against each other on the phantoms: `python benchmarks/phantom_study.py --out FOLDER`.

Runs the demo job as a plain loop for every method, seed, contrast and shift asked for, and prints the mean
AUROC of three groups of findings on the fully labelled test set. `full` is Surgical Aggregation with every
site annotating every finding, at the same budget. A run that is done is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine

from suture.simulation.phantom_scans import HOSPITALS

OWNERS = {label: [h.name for h in HOSPITALS if label in h.labels] for h in HOSPITALS for label in h.labels}


def run(
    out: Path, method: str, seed: int, contrast: float, shift: float, extra: list[str]
) -> dict[str, float]:
    """One run; returns the group means."""
    name = f"{method}-c{contrast}-s{shift}-{seed}"
    # Further settings are part of a run's name: a run made with others is another run.
    folder = out / "-".join([name, *(s.replace("/", "_") for s in sorted(extra))])
    if not (folder / "metrics.json").exists():
        every = "true" if method == "full" else "false"
        settings = [
            f"method={'surgical' if method == 'full' else method}",
            f"simulation.contrast={contrast}",
            f"simulation.shift={shift}",
            f"simulation.every_label={every}",
            *extra,
        ]
        command = [sys.executable, "-m", "suture", "run", "demo", "--env", "local", "--seed", str(seed)]
        command += ["--out", str(folder), *(part for s in settings for part in ("--set", s))]
        if folder.exists():
            command.append("--overwrite")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    auroc = json.loads((folder / "metrics.json").read_text())["auroc"]
    groups = {"single-site": 1, "two sites": 2, "all sites": 3}
    means = {
        g: statistics.mean(auroc[c] for c, own in OWNERS.items() if len(own) == k) for g, k in groups.items()
    }
    return {**means, "all": statistics.mean(auroc[c] for c in OWNERS)}


def _sd(values: list[float]) -> str:
    """The sample's standard deviation; a dash for a single value."""
    return f"{statistics.stdev(values):.3f}" if len(values) > 1 else "–"


def main() -> None:
    """Runs what is missing and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/phantom_study"))
    parser.add_argument("--methods", nargs="+", default=["surgical", "partial", "vanilla", "full"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--contrast", nargs="+", type=float, default=[1.0])
    parser.add_argument("--shift", nargs="+", type=float, default=[1.0])
    parser.add_argument("--rounds", type=int, help="rounds of each run; the demo's by default")
    parser.add_argument("--set", dest="extra", nargs="*", default=[], help="further settings of the job")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    asked = parser.parse_args()
    if asked.rounds:
        asked.extra.append(f"rounds={asked.rounds}")
    asked.out.mkdir(parents=True, exist_ok=True)
    cells = list(itertools.product(asked.contrast, asked.shift, asked.methods, asked.seeds))
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = pool.map(lambda cell: run(asked.out, cell[2], cell[3], cell[0], cell[1], asked.extra), cells)
        results = dict(zip(cells, found, strict=True))
    print(f"mean over seeds {asked.seeds} (sample SD over seeds), settings {asked.extra or 'of the demo'}\n")
    print(f"{machine()}\n")
    print("| contrast | shift | method | single-site | two sites | all sites | all findings |")
    print("|---|---|---|---|---|---|---|")
    for contrast, shift, method in itertools.product(asked.contrast, asked.shift, asked.methods):
        runs = [results[contrast, shift, method, seed] for seed in asked.seeds]
        columns = [[r[group] for r in runs] for group in ("single-site", "two sites", "all sites", "all")]
        cells_ = [f"{statistics.mean(c):.3f} ({_sd(c)})" for c in columns]
        print(f"| {contrast} | {shift} | {method} | {' | '.join(cells_)} |")


if __name__ == "__main__":
    main()
