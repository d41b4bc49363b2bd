"""What transport in 16 or 8 bits costs in AUROC: `python benchmarks/transport.py`.

A job in the plain loop with one thread: for each seed once with each type of transport, and once in float32
with a learning rate that is larger by one part in a million. The last is the control: how far two runs of one
seed lie apart that differ by rounding alone. AUROC is the mean over classes on the server's test set;
intervals are of the mean of the paired differences to float32 (t distribution, 95 %). `surgical_nih` needs
SUTURE_DATA; the demo runs with fewer images.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from harness import machine
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from suture.core.files import read_json, read_records
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.precision import Transport
from suture.simulation.job import Job, load_job, with_settings
from suture.simulation.run import run_job
from suture_synthetic.phantom_hospitals import PhantomSites

CONTROL = "control"
OTHERS = (*get_args(Transport)[1:], CONTROL)
JOBS = Path(__file__).parents[1] / "jobs"


def measured(job: Job, transport: str) -> tuple[float, int]:
    """Mean AUROC of the selected model, and bytes of the last round.

    Args:
        transport: its type, or `CONTROL`.
    """
    assert isinstance(job.method, SurgicalAggregation)
    if transport == CONTROL:
        local = replace(job.method.local, lr=job.method.local.lr * (1 + 1e-6))
        job = replace(job, method=replace(job.method, local=local))
    else:
        job = with_settings(job, [f"transport={transport}"])
    with tempfile.TemporaryDirectory() as folder:
        out = run_job(job, out=Path(folder) / "run")
        last = read_records(out / "history.jsonl")[-1]
        return read_json(out / "metrics.json")["mean_auroc"], last["bytes_down"] + last["bytes_up"]


def interval(differences: list[float]) -> str:
    """Return the mean of paired differences with its 95 % interval."""
    mean = statistics.mean(differences)
    n = len(differences)
    half = student.ppf(0.975, n - 1) * statistics.stdev(differences) / n**0.5 if n > 1 else float("nan")
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def chosen(args: argparse.Namespace) -> Job:
    """Return the job with the arguments' settings."""
    job = load_job("surgical_nih" if args.job == "surgical_nih" else JOBS / "demo" / "job.py")
    model: dict[str, Any] = {"train": args.train}
    model |= {"name": args.model} if args.model else {}
    model |= {"weights": "random"} if args.train == "head" and args.model != "efficientnet_lite0" else {}
    job = replace(job, model=replace(job.model, **model), rounds=args.rounds)
    return replace(job, simulation=PhantomSites(images=500, held_out=1000)) if args.job == "demo" else job


def main() -> None:
    """Prints a row for each seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=("demo", "surgical_nih"), default="demo")
    parser.add_argument("--model", help="another encoder than the job's")
    parser.add_argument("--train", choices=("all", "head"), default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    job = chosen(args)
    table = Table("seed", "float32", *(cell for name in OTHERS for cell in (name, "difference")), box=None)
    found: dict[str, list[float]] = {name: [] for name in OTHERS}
    carried: dict[str, float] = {}
    for seed in range(1, args.seeds + 1):
        full, whole = measured(replace(job, seed=seed), "float32")
        cells = []
        for name in OTHERS:
            value, size = measured(replace(job, seed=seed), name)
            found[name].append(value - full)
            carried[name] = size / whole
            cells += [f"{value:.4f}", f"{value - full:+.4f}"]
        table.add_row(str(seed), f"{full:.4f}", *cells)
    console = Console(width=110)
    console.print(machine(), table)
    for name in OTHERS:
        console.print(f"{name}: mean difference {interval(found[name])}, bytes {carried[name]:.4f}")


if __name__ == "__main__":
    main()
