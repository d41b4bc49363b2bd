"""What half-precision transport costs in AUROC: `python benchmarks/half_precision.py`.

The demo of `suture demo`, smaller, in the plain loop with one thread: for each seed once with each type of
transport, and once in float32 with a learning rate that is larger by one part in a million. The last is the
control: how far two runs of one seed lie apart that differ by rounding alone. AUROC is the mean over classes
on the server's labelled test set.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.files import read_json, read_records
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.half import Transport
from suture.simulation import PhantomSites
from suture.simulation.job import load_job
from suture.simulation.run import run_job


def measured(
    seed: int, transport: Transport, rounds: int, images: int, rate: float = 1.0
) -> tuple[float, int]:
    """Mean AUROC of the selected model, and bytes of the last round.

    Args:
        rate: factor of the learning rate.
    """
    job = load_job(Path(__file__).parents[1] / "jobs" / "demo" / "job.py")
    assert isinstance(job.method, SurgicalAggregation)
    local = replace(job.method.local, lr=job.method.local.lr * rate)
    sites = PhantomSites(images=images, held_out=1000)
    job = replace(job, method=replace(job.method, local=local), rounds=rounds, seed=seed)
    job = replace(job, simulation=sites, transport=transport)
    with tempfile.TemporaryDirectory() as folder:
        out = run_job(job, out=Path(folder) / "run")
        last = read_records(out / "history.jsonl")[-1]
        return read_json(out / "metrics.json")["mean_auroc"], last["bytes_down"] + last["bytes_up"]


def main() -> None:
    """Prints a row for each seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=500, help="of each of the three sites")
    args = parser.parse_args()
    how = (args.rounds, args.images)
    table = Table("seed", "float32", "float16", "difference", "control", "difference", "bytes", box=None)
    found: dict[str, list[float]] = {"float16": [], "control": []}
    for seed in range(1, args.seeds + 1):
        full, whole = measured(seed, "float32", *how)
        half, less = measured(seed, "float16", *how)
        control, _ = measured(seed, "float32", *how, rate=1 + 1e-6)
        found["float16"].append(half - full)
        found["control"].append(control - full)
        pairs = [cell for value in (half, control) for cell in (f"{value:.4f}", f"{value - full:+.4f}")]
        table.add_row(str(seed), f"{full:.4f}", *pairs, f"{less / whole:.4f}")
    means = [f"{name} {statistics.mean(d):+.4f}" for name, d in found.items()]
    largest = [f"{name} {max(map(abs, d)):.4f}" for name, d in found.items()]
    Console(width=110).print(machine(), table, f"mean difference: {', '.join(means)}")
    Console(width=110).print(f"largest difference: {', '.join(largest)}")


if __name__ == "__main__":
    main()
