"""What a round costs beside training: `python benchmarks/round_cost.py`.

Four sites that train nothing (epochs=0); the plain loop and FLARE side by side at 0.25 and 28 MB of weights.
Times are medians without the first two rounds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from suture.config import load_site_config
from suture.federation import Loop, federate
from suture.files import write_json
from suture.job import Job
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.run import _simulate
from suture.server.open import describe, open_server
from suture.server.record import Record
from suture.site import Site
from suture.training import LocalTraining

SITES = ("a", "b", "c", "d")
MODELS = {"0.25 MB": ModelSpec("cnn", size=16), "28 MB": ModelSpec("cnn", size=16, hidden=54_000)}
LABELS = ("Edema", "Mass")


def write_site(folder: Path, state: Path) -> None:
    """A hospital of four images: two to train on, one to validate, one to test."""
    (folder / "images").mkdir(parents=True)
    rows = [["image", "patient", "split", *LABELS]]
    for i, split in enumerate(("train", "train", "validation", "test")):
        Image.fromarray(np.full((16, 16), 60 * i, dtype=np.uint8)).save(folder / "images" / f"{i}.png")
        rows.append([f"{i}.png", f"p{i}", split, str(i % 2), str((i + 1) % 2)])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "suture.toml").write_text(
        '[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n'
        f'[privacy]\nmin_count = 0\n[storage]\nstate = "{state}"\n'
    )


def job(model: ModelSpec, rounds: int) -> Job:
    """Surgical Aggregation without local work."""
    method = SurgicalAggregation(local=LocalTraining(epochs=0))
    return Job(name="cost", title="cost of a round", method=method, model=model, rounds=rounds)


class Peak:
    """Peak resident memory of this process's tree, by the role in each command line."""

    def __init__(self) -> None:
        self.mib: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for process in psutil.Process(os.getpid()).children(recursive=True):
                try:
                    words, memory = " ".join(process.cmdline()), process.memory_info().rss / 2**20
                except psutil.Error:
                    continue
                role = "site" if "client_worker" in words or "simulator_worker" in words else "server"
                self.mib[role] = max(self.mib.get(role, 0.0), memory)


def run(
    env: str, model: ModelSpec, rounds: int, folder: Path
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """One federation; returns its history and peak memory."""
    out = folder / env
    for name in SITES:
        write_site(out / "sites" / name, out / "sites" / name / "state")
    write_site(out / "sites" / "server", folder)
    chosen = job(model, rounds)
    plan, schedule = chosen.plan(out.name), chosen.schedule()
    with Peak() as peak:
        if env == "loop":
            torch.set_num_threads(1)
            sites = {}
            for name in SITES:
                config = load_site_config(out / "sites" / name / "suture.toml")
                sites[name] = Site(
                    name, config, plan, rounds, out / "sites" / name / "state" / plan.experiment
                )
            federate(open_server(plan, schedule, None, folder), Loop(sites))
        else:
            describe(Record(out), plan, schedule)
            content = {
                "name": "cost",
                "plan": plan.to_dict(),
                "schedule": schedule.to_dict(),
                "sites": list(SITES),
            }
            write_json(out / "job.json", content)
            _simulate(out, None)
    lines = [json.loads(text) for text in (out / "history.jsonl").read_text().splitlines()]
    if env == "loop":
        peak.mib["one process"] = psutil.Process().memory_info().rss / 2**20
    return lines, peak.mib


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    table = Table("weights", "env", "seconds a round", "range", "MB down", "MB up", "peak MiB", box=None)
    for size, model in MODELS.items():
        for env in ("loop", "flare"):
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                lines, peak = run(env, model, rounds, Path(folder))
                whole = time.monotonic() - began
            seconds = [line["seconds"] for line in lines[2:]]
            table.add_row(
                size,
                f"{env} ({whole:.0f} s in all)",
                f"{statistics.median(seconds):.3f}",
                f"{min(seconds):.3f}-{max(seconds):.3f}",
                f"{lines[-1]['bytes_down'] / 1e6:.2f}",
                f"{lines[-1]['bytes_up'] / 1e6:.2f}",
                ", ".join(f"{role} {mib:.0f}" for role, mib in sorted(peak.items())),
            )
    Console(width=150).print(
        f"{len(SITES)} sites, {rounds} rounds, 1 torch thread each, {os.cpu_count()} cores"
    )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
