"""What half-precision transport costs and saves: `python benchmarks/half_precision.py`.

The demo of `suture demo`, smaller, once with each type of transport and seed, in the plain loop with one
thread: the mean AUROC on the server's labelled test set, and the bytes of a round, both directions together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.files import read_json, read_records
from suture.protocol.half import Transport
from suture.simulation import PhantomSites
from suture.simulation.job import load_job
from suture.simulation.run import run_job


def measured(seed: int, transport: Transport, rounds: int, images: int) -> tuple[float, int]:
    """Mean AUROC of the selected model, and bytes of the last round."""
    job = load_job(Path(__file__).parents[1] / "jobs" / "demo" / "job.py")
    sites = PhantomSites(images=images, held_out=1000)
    job = replace(job, rounds=rounds, seed=seed, simulation=sites, transport=transport)
    with tempfile.TemporaryDirectory() as folder:
        out = run_job(job, out=Path(folder) / "run")
        last = read_records(out / "history.jsonl")[-1]
        return read_json(out / "metrics.json")["mean_auroc"], last["bytes_down"] + last["bytes_up"]


def main() -> None:
    """Prints a row for each seed, and the mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=500, help="of each of the three sites")
    args = parser.parse_args()
    kinds: tuple[Transport, ...] = get_args(Transport)
    table = Table("seed", *(f"AUROC, {kind}" for kind in kinds), "difference", "bytes", box=None)
    differences = []
    for seed in range(1, args.seeds + 1):
        (full, whole), (half, less) = (measured(seed, kind, args.rounds, args.images) for kind in kinds)
        differences.append(half - full)
        table.add_row(str(seed), f"{full:.4f}", f"{half:.4f}", f"{half - full:+.4f}", f"{less / whole:.4f}")
    Console(width=110).print(machine(), table, f"mean difference {statistics.mean(differences):+.4f}")


if __name__ == "__main__":
    main()
