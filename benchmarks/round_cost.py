"""What a round costs beside training: `python benchmarks/round_cost.py [--flwr PYTHON]`.

Four sites that train nothing (epochs=0); the plain loop and FLARE side by side at 0.25 and 28 MB of weights.
Times are medians without the first two rounds. `seconds` is what history.jsonl says of a round: from its
payloads to its merged model. `pace` is from the start of one round to the start of the next, as
events.jsonl is written: saving the round is in it. With frozen batch norm, what never changes is sent once.
With the interpreter of an environment that has flwr[simulation], its rounds stand beside ours.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import machine
from PIL import Image
from rich.console import Console
from rich.table import Table

from suture.core.files import write_json
from suture.data.augmentation import Augmentation
from suture.data.config import load_site_config
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.record import Record, describe
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import NormPolicy
from suture.simulation.simulator import simulate

SITES = ("a", "b", "c", "d")
MODELS = {
    "0.25 MB": ModelSpec("cnn", size=16),
    "28 MB": ModelSpec("cnn", size=16, hidden=2_300, projection=600),
}
_TICK = 0.01  # seconds between two looks at the events
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
        f'[privacy]\nmin_count = 0\nmin_loss = 0\n[storage]\nstate = "{state}"\n'
    )


@dataclass(frozen=True)
class Idle:
    """Surgical Aggregation without local work, which no `Job` may be."""

    model: ModelSpec
    rounds: int
    batch_norm: NormPolicy = "average"

    def plan(self, experiment: str) -> Plan:
        method = SurgicalAggregation(local=LocalTraining(epochs=0), batch_norm=self.batch_norm)
        return Plan(method, self.model, Augmentation(), 1, experiment, code_hash(type(method)))

    def schedule(self) -> Schedule:
        return Schedule(self.rounds, "cost", "cost of a round")


class Watch:
    """Peak resident memory of this process's children by role, and when each round began."""

    def __init__(self, events: Path) -> None:
        self.mib: dict[str, float] = {}
        self.began: list[float] = []
        self._events = events
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        tick = 0
        while not self._stop.wait(_TICK):
            text = self._events.read_text() if self._events.exists() else ""
            new = text.count('"event": "round"') - len(self.began)
            self.began += [time.monotonic()] * new
            tick += 1
            if tick % 20 == 0:
                self._weigh()

    def _weigh(self) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                words, memory = " ".join(process.cmdline()), process.memory_info().rss / 2**20
            except psutil.Error:  # it has just ended
                continue
            role = "site" if "simulator_worker" in words else "server"
            self.mib[role] = max(self.mib.get(role, 0.0), memory)


@dataclass(frozen=True)
class Cost:
    """What one federation took: lines of history.jsonl, seconds from round to round, MiB, and in all."""

    lines: list[dict[str, float]]
    paces: list[float]
    peak: dict[str, float]
    whole: float


def loop(chosen: Idle, out: Path) -> None:
    """The federation in this process."""
    torch.set_num_threads(1)
    plan = chosen.plan(out.name)
    sites = {}
    for name in SITES:
        folder = out / "sites" / name
        config = load_site_config(folder / "suture.toml")
        sites[name] = Site(name, config, plan, chosen.rounds, folder / "state" / plan.experiment)
    federate(open_server(plan, chosen.schedule(), None, out.parent), Loop(sites))


def flare(chosen: Idle, out: Path) -> None:
    """The federation in FLARE's simulator."""
    plan, schedule = chosen.plan(out.name), chosen.schedule()
    describe(Record(out), plan, schedule)
    content = {"name": "cost", "plan": plan.to_dict(), "schedule": schedule.to_dict(), "sites": list(SITES)}
    write_json(out / "job.json", content)
    simulate(out, len(SITES))


def run(federation: Callable[[Idle, Path], None], chosen: Idle) -> Cost:
    """One federation in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / federation.__name__
        for name in SITES:
            write_site(out / "sites" / name, out / "sites" / name / "state")
        write_site(out / "sites" / "server", Path(folder))
        start = time.monotonic()
        with Watch(out / "events.jsonl") as watch:
            federation(chosen, out)
        whole = time.monotonic() - start
        lines = [json.loads(text) for text in (out / "history.jsonl").read_text().splitlines()]
    if federation is loop:
        watch.mib["one process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Cost(lines, [b - a for a, b in pairwise(watch.began)], watch.mib, whole)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def flwr(python: Path, size: str, rounds: int) -> list[float]:
    """Seconds of the rounds of flwr's simulation: as many clients return as many bytes without work."""
    script = Path(__file__).parent / "anchors" / "flwr_round.py"
    command = [str(python), str(script), size.split()[0], str(rounds), str(len(SITES))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds: list[float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return seconds


def costs(rounds: int, anchor: Path | None) -> Table:
    """Time, bytes and memory, by size and transport; with the interpreter of an anchor, its time too."""
    table = Table("weights", "env", "seconds", "pace", "MB down", "MB up", "peak MiB", "in all, s", box=None)
    for size, model in MODELS.items():
        for federation in (loop, flare):
            cost = run(federation, Idle(model, rounds))
            table.add_row(
                size,
                federation.__name__,
                spread([line["seconds"] for line in cost.lines[2:]]),
                spread(cost.paces[2:]),
                f"{cost.lines[-1]['bytes_down'] / 1e6:.2f}",
                f"{cost.lines[-1]['bytes_up'] / 1e6:.2f}",
                ", ".join(f"{role} {mib:.0f}" for role, mib in sorted(cost.peak.items())),
                f"{cost.whole:.0f}",
            )
        if anchor:
            table.add_row(size, "flwr", spread(flwr(anchor, size, rounds)[2:]))
    return table


def frozen() -> Table:
    """Bytes of three rounds under either policy of batch norm."""
    table = Table("batch norm", *(f"round {i}, bytes down / up" for i in (1, 2, 3)), box=None)
    policies: tuple[NormPolicy, ...] = ("average", "frozen")
    for policy in policies:
        lines = run(loop, Idle(MODELS["0.25 MB"], 3, policy)).lines
        table.add_row(policy, *(f"{line['bytes_down']:,} / {line['bytes_up']:,}" for line in lines))
    return table


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, choices=range(4, 1001), metavar="N")
    parser.add_argument("--flwr", type=Path, metavar="PYTHON", help="interpreter that has flwr[simulation]")
    options = parser.parse_args()
    rounds = options.rounds
    console = Console(width=150)
    console.print(f"{machine()}\n\n{len(SITES)} sites, {rounds} rounds; median (range) after the first two")
    console.print(costs(rounds, options.flwr))
    console.print(frozen())


if __name__ == "__main__":
    main()
