"""A round of four sites that train nothing, beside flwr's and beside the tensors alone; its bytes and memory.

A sample is the median of a federation's rounds without the first two, from a round's payloads to its merged
model (`seconds` of history.jsonl); with its saving, from its start to the next one's. The four
federations of a size take turns. Memory is the largest resident set that a process of the role has had. The
tensors alone are copied to each site and back, and averaged in float64.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
from figures import Figure, Options, Target
from harness import ROOT, every, program
from torch import Tensor

from parts.sites import LABELS, travelled, write_site
from parts.untrained import Untrained, installed
from suture.core.files import read_records, write_json
from suture.core.labels import LabelSet
from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.execution.simulator import simulate
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.record import Record, describe
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.models import ModelSpec, build
from suture.models.classifier import NormPolicy
from suture.protocol.packing import Transport

SITES = ("a", "b", "c", "d")
MODELS = {
    "0.25 MB": ModelSpec("cnn", size=16),
    "28 MB": ModelSpec("cnn", size=16, hidden=2_300, projection=600),
}
TARGETS = {
    ("loop", "0.25 MB"): 0.02,
    ("loop", "28 MB"): 0.20,
    ("FLARE", "0.25 MB"): 0.10,
    ("FLARE", "28 MB"): 0.45,
}
"""Seconds of a round."""
FLWR = ROOT / ".venv-flwr" / "bin" / "python"
_FLWR = "flwr's simulation"
_TENSORS = "tensors alone"
_TICK = 0.01  # seconds between two looks at the events
_WEIGHED = 0.2  # and at the memory, which hold the processes up


@dataclass(frozen=True)
class Idle:
    """Surgical Aggregation without local work."""

    model: ModelSpec
    rounds: int
    batch_norm: NormPolicy = "average"
    transport: Transport = "float32"

    def plan(self, experiment: str) -> Plan:
        method = Untrained(batch_norm=self.batch_norm)
        return Plan(
            method, self.model, Augmentation(), 1, experiment, code_hash(type(method)), self.transport
        )

    def schedule(self) -> Schedule:
        return Schedule(name="cost", title="cost of a round", rounds=self.rounds)


def keep(largest: dict[str, float], measure: Callable[[psutil.Process], float]) -> None:
    """Keep the largest figure of this process's children in each role."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            words, value = " ".join(process.cmdline()), measure(process)
            role = "site" if "simulator_worker" in words or "ray::ClientApp" in words else "server"
            largest[role] = max(largest.get(role, 0.0), value)


def weigh(peak: dict[str, float]) -> None:
    """Keep the largest resident set, in MB, by role."""
    keep(peak, lambda process: float(process.memory_info().rss) / 1e6)


@dataclass(frozen=True)
class Cost:
    """What one federation took: seconds of its rounds, with their saving, bytes of the last, peaks in MB.

    And CPU seconds of a process of each role until round 1.
    """

    rounds: list[float]
    saved: list[float] = field(default_factory=list)
    size: int = 0
    peak: dict[str, float] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)


def loop(chosen: Idle, out: Path) -> None:
    """The federation in this process."""
    plan = chosen.plan(out.name)
    sites = {}
    for name in SITES:
        folder = out / "sites" / name
        config = load_site_config(folder / "suture.toml")
        state = experiment_folder(folder / "state", plan.experiment)
        sites[name] = Site(name, config, plan, chosen.rounds, state)
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
            write_site(out / "sites" / name)
        write_site(out / "sites" / "server", state=out.parent)
        events, peak, began = out / "events.jsonl", dict[str, float](), list[float]()
        start: dict[str, float] = {}

        def look() -> None:
            rounds = events.read_text().count('"event": "round"') if events.exists() else 0
            if rounds and not began:
                keep(start, lambda process: float(sum(process.cpu_times()[:2])))
            began.extend([time.monotonic()] * (rounds - len(began)))

        with installed(Path(folder)), every(_WEIGHED, partial(weigh, peak)), every(_TICK, look):
            federation(chosen, out)
        lines = read_records(out / "history.jsonl")
    saved = [after - before for before, after in pairwise(began)]
    size = lines[-1]["bytes_down"] + lines[-1]["bytes_up"]
    return Cost([line["seconds"] for line in lines], saved, size, peak, start)


def flwr(size: str, rounds: int) -> Cost:
    """The rounds of flwr's simulation: as many clients return as many bytes without work."""
    script, peak = ROOT / "benchmarks" / "anchors" / "flwr_round.py", dict[str, float]()
    with every(_WEIGHED, partial(weigh, peak)):
        said = program(str(FLWR), str(script), size.split()[0], str(rounds), str(len(SITES)))
    return Cost(json.loads(next(text for text in said.splitlines() if text.startswith("["))), peak=peak)


def tensors_of(model: ModelSpec) -> list[Tensor]:
    """The tensors of a model that travel in a round."""
    state = build(model, LabelSet(LABELS), 1, pretrained=False).state_dict()
    return [tensor for tensor in state.values() if tensor.is_floating_point()]


def alone(model: ModelSpec, rounds: int) -> Cost:
    """The least that a round can be: copy the tensors to each site and back, and average them in float64."""
    tensors, seconds = tensors_of(model), []
    for _ in range(rounds):
        began = time.perf_counter()
        tensors = travelled(tensors, len(SITES))
        seconds.append(time.perf_counter() - began)
    return Cost(seconds)


def _ways(size: str, options: Options) -> dict[str, Callable[[], Cost]]:
    """The federations of a size; flwr's only where it is installed."""
    chosen = Idle(MODELS[size], 5 if options.quick else 20)
    ways: dict[str, Callable[[], Cost]] = {
        "loop": lambda: run(loop, chosen),
        _TENSORS: lambda: alone(chosen.model, chosen.rounds),
        "FLARE": lambda: run(flare, chosen),
    }
    if FLWR.exists():
        ways[_FLWR] = lambda: flwr(size, chosen.rounds)
    return ways


def _seconds(size: str, found: dict[str, list[Cost]], missing: str) -> list[Figure]:
    """Rows of a round's time, beside each anchor."""
    medians = {
        way: tuple(statistics.median(cost.rounds[2:]) for cost in costs) for way, costs in found.items()
    }
    figures = []
    for way in ("loop", "FLARE"):
        row = (f"a round of {size}, {way}", "s", medians[way], _TENSORS, medians[_TENSORS])
        figures.append(Figure("rounds", *row, (Target("figure", "≤", TARGETS[way, size]),)))
    row = (f"a round of {size}, FLARE", "s", medians["FLARE"], _FLWR, medians.get(_FLWR, ()))
    figures.append(Figure("rounds", *row, (Target("ratio", "<", 1),), missing=missing))
    for way in ("loop", "FLARE"):
        saved = tuple(statistics.median(cost.saved[2:]) for cost in found[way])
        name = f"with its saving, {size}, {way}"
        figures.append(Figure("rounds", name, "s", saved, "its round", medians[way]))
    return figures


def _memory(size: str, found: dict[str, list[Cost]], missing: str) -> list[Figure]:
    """Rows of the peak memory in FLARE's simulator, beside that of flwr."""
    figures = []
    for role in ("server", "site"):
        ours = tuple(cost.peak[role] for cost in found["FLARE"])
        beside = tuple(cost.peak[role] for cost in found.get(_FLWR, []))
        targets = (Target("figure", "≤", 1_500),) if (role, size) == ("server", "28 MB") else ()
        name = f"peak of the {role}, {size}, FLARE"
        figures.append(Figure("rounds", name, "MB", ours, _FLWR, beside, targets, missing=missing))
    return figures


def _bytes(size: str) -> list[Figure]:
    """Rows of a round's bytes, down and up, the third of a federation: frozen tensors are sent once."""
    model, name = MODELS[size], f"bytes of a round, {size}"
    chosen = (Idle(model, 3), Idle(model, 3, transport="float16"), Idle(model, 3, "frozen"))
    full, half, frozen = ((run(loop, one).size / 1e6,) for one in chosen)
    least = (2 * len(SITES) * sum(tensor.nbytes for tensor in tensors_of(model)) / 1e6,)
    halved = (Target("ratio", "≤", 0.505),)
    return [
        Figure("rounds", name, "MB", full, _TENSORS, least),
        Figure("rounds", f"{name}, float16", "MB", half, "float32", full, halved),
        Figure("rounds", f"{name}, batch norm frozen", "MB", frozen, "batch norm averaged", full),
    ]


def figures(options: Options) -> list[Figure]:
    """Time, memory and bytes of a round, by size."""
    rows = []
    missing = "" if FLWR.exists() else f"{FLWR} is absent; `make flwr` adds it"
    for size in MODELS:
        ways = _ways(size, options)
        found: dict[str, list[Cost]] = defaultdict(list)
        for _ in range(options.runs):
            for way, federation in ways.items():
                found[way].append(federation())
        rows += [*_seconds(size, found, missing), *_memory(size, found, missing), *_bytes(size)]
    return rows
