"""What a round costs the server by sites, classes and size; the peak of packing; merges.

The sites answer with what they have received, and measure nothing: all CPU seconds are the server's, and
those of packing and unpacking. Each federation is a process of its own, and those of a small model take
turns. A round is from its payloads to its committed state; a sample is the median of three, and so is one of
the tensors alone, which are copied to each site and back. Memory is what the process has at its peak beyond
its imports. `packing` is the peak of a process that packs a model, stores it, reads it back and unpacks it,
the model included. A model of 1 GB takes 5 GB of memory and of the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from figures import Figure, Options, Target
from harness import apart, in_turns
from torch import Tensor, nn

from parts.sites import travelled
from suture.data.batch import Augmentation
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.methods.averaging import WeightedMean
from suture.methods.surgical import SurgicalAggregation
from suture.models import MODELS, Backbone, ModelSpec
from suture.protocol.messages import SiteInfo, TaskData, Update, ones
from suture.protocol.packing import Packed, load, pack, save, unpack

Case = tuple[int, int, float]
BASE: Case = (10, 14, 0.25)
"""Sites, classes and MB of weights of the federation that others are compared with."""

ROWS = ((100, 14, 0.25), (300, 14, 0.25), (1000, 14, 0.25), (10, 1000, 0.25), (10, 10_000, 0.25))
LARGE = ((10, 14, 28), (3, 14, 1000))
_MOST = (ROWS[2], ROWS[4])
_SITES_TARGET = Target("ratio", "≤", 1.2)
_PACKING_TARGET = Target("ratio", "≤", 2)
_ROUNDS, _WIDE = 3, 4096


def _stack(*_: object) -> tuple[nn.Module, int]:
    """Sixteen Dense blocks of 64 MiB each."""
    blocks = [nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(16)]
    return nn.Sequential(nn.AdaptiveAvgPool2d(64), nn.Flatten(), *blocks), _WIDE


MODELS["stack"] = Backbone("Dense blocks of 1 GiB, for this benchmark alone", _stack)
_SPECS = {
    0.25: ModelSpec("cnn", size=16),
    28: ModelSpec("cnn", size=16, hidden=2_300, projection=600),
    1000: ModelSpec("stack", size=64),
}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of handshake, round and tensors alone; MB at the peak, of a model, of packing."""

    start: float
    round_: float
    tensors: float
    memory: float
    model: float
    packing: float


def _answer(packed: Packed, labels: tuple[str, ...], plan: Plan) -> Packed:
    task = unpack(packed)
    assert isinstance(task, TaskData)
    if task.task == "handshake":
        return pack(SiteInfo(labels, {"train": 8, "validation": 2}, 1, plan.code))
    return pack(Update(task.round, task.labels, task.shared, task.head, ones(task.labels)))


class Memory:
    """How much the resident memory of this process has grown at its peak since this was made, in MB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = self._now("VmRSS")

    def peak(self) -> float:
        """Since then."""
        return self._now("VmHWM") - self._before

    def _now(self, line: str) -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(text.split()[1]) for text in status if text.startswith(line)) * 1024 / 1e6


def packing(message: TaskData) -> float:
    """Peak in MB of packing, storing, reading and unpacking a message, with the message itself."""
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory()
        save(Path(folder) / "model", pack(message))
        found = unpack(load(Path(folder) / "model"))
        assert isinstance(found, TaskData)
        if not all(torch.equal(tensor, found.shared[name]) for name, tensor in message.shared.items()):
            raise RuntimeError("what was read is something else than what was stored")
        return (
            memory.peak() + sum(tensor.nbytes for tensor in {**message.shared, **message.head}.values()) / 1e6
        )


def measured(sites: int, classes: int, mb: float) -> Cost:
    """What a federation of so many sites costs."""
    torch.set_num_threads(1)
    method = SurgicalAggregation()
    plan = Plan(method, _SPECS[mb], Augmentation(), 1, "scale", code_hash(type(method)))
    labels = tuple(f"class {i * 7919 % 1000003:06d}" for i in range(classes))
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(name="scale", title="scale", rounds=_ROUNDS, selection="last", accept_labels=True)
        server = open_server(plan, schedule, None, Path(folder))
        memory, started = Memory(), time.process_time()

        def exchange(payloads: Mapping[str, Packed]) -> dict[str, str]:
            receive = server.receiver()
            for site, packed in payloads.items():
                receive(site, _answer(packed, labels, plan))
            return {}

        server.begin(exchange(server.handshake([f"site-{i:04d}" for i in range(sites)])))
        start, seconds = time.process_time() - started, []
        for _ in range(_ROUNDS):
            began = time.process_time()
            server.close_round(exchange(server.assign()))
            seconds.append(time.process_time() - began)
        peak = memory.peak()
    shared, head = dict(server.model.shared), dict(server.model.head)
    message = TaskData("train", labels=labels, shared=shared, head=head)
    tensors = [*shared.values(), *head.values()]
    size = sum(tensor.nbytes for tensor in tensors) / 1e6
    packed = packing(message)
    alone = []
    for _ in range(_ROUNDS + 1):
        began = time.process_time()
        travelled(tensors, sites)
        alone.append(time.process_time() - began)
    alone = alone[1:]  # the first one warms up
    return Cost(start, statistics.median(seconds), statistics.median(alone), peak, size, packed)


CLASSES, FEATURES, OWNED = 1000, 1024, 300
"""Of the mean by class: all classes, width of their rows, and how many of them each site knows."""


def update(seed: int) -> Update:
    """A site that knows 300 of the 1,000 classes."""
    g = torch.Generator().manual_seed(seed)
    labels = tuple(f"Class {i:04d}" for i in torch.randperm(CLASSES, generator=g)[:OWNED].tolist())
    head = {"w": torch.randn(OWNED, FEATURES, generator=g), "b": torch.randn(OWNED, generator=g)}
    return Update(1, labels, {}, head, ones(labels))


def by_rows(updates: list[Update], names: tuple[str, ...]) -> dict[str, Tensor]:
    """The product's mean."""
    head = {"w": torch.zeros(CLASSES, FEATURES), "b": torch.zeros(CLASSES)}
    mean = WeightedMean(names, {}, head)
    for one in updates:
        mean.add(one)
    return dict(mean.head())


def by_class(updates: list[Update], names: tuple[str, ...]) -> dict[str, Tensor]:
    """The algorithm as the paper prints it: for each class, the mean over the clients that have it."""
    rows = [{name: i for i, name in enumerate(one.labels)} for one in updates]
    merged = {"w": torch.zeros(CLASSES, FEATURES), "b": torch.zeros(CLASSES)}
    for c, name in enumerate(names):
        owners = [(one, where[name]) for one, where in zip(updates, rows, strict=True) if name in where]
        for key, tensor in merged.items():
            if owners:
                tensor[c] = torch.stack([one.head[key][i].double() for one, i in owners]).mean(0)
    return merged


def merging(repeats: int) -> Figure:
    """The two ways of merging, whose results must be equal."""
    updates = [update(seed) for seed in range(64)]
    names = tuple(f"Class {i:04d}" for i in range(CLASSES))
    torch.testing.assert_close(by_rows(updates, names), by_class(updates, names), rtol=1e-6, atol=1e-6)
    works = {way.__name__: partial(partial, way, updates, names) for way in (by_rows, by_class)}
    found = in_turns(repeats, works)
    ours, theirs = (found[way].cpu for way in works)
    name = f"mean of 64 sites, {OWNED} of {CLASSES} classes"
    return Figure("scale", name, "s of CPU", ours, "a loop over classes", theirs)


def _name(case: Case) -> str:
    """What is other than in `BASE`."""
    sites, classes, mb = case
    names = (f"{sites:,} sites", f"{classes:,} classes", "1 GB" if mb == 1000 else f"{mb:g} MB")
    return (
        ", ".join(name for name, own, base in zip(names, case, BASE, strict=True) if own != base) or names[0]
    )


def _per_site(case: Case, costs: list[Cost], name: str = "round_") -> tuple[float, ...]:
    """CPU milliseconds a site."""
    return tuple(getattr(cost, name) / case[0] * 1e3 for cost in costs)


def _rows(case: Case, costs: list[Cost], base: list[Cost]) -> Iterable[Figure]:
    """Time and memory of a federation, the handshake of large ones, and the packing of large models."""
    name, cpu = _name(case), _per_site(case, costs)
    if case[0] > BASE[0]:
        beside: tuple[str, tuple[float, ...], tuple[Target, ...]] = (
            f"{BASE[0]} sites",
            _per_site(BASE, base),
            (_SITES_TARGET,),
        )
    else:
        beside = ("tensors alone", _per_site(case, costs, "tensors"), ())
    yield Figure("scale", f"a round, {name}", "CPU ms a site", cpu, *beside)
    if case in _MOST:
        start = _per_site(case, costs, "start")
        yield Figure("scale", f"handshake, {name}", "CPU ms a site", start, "a round", cpu)
    model = tuple(cost.model for cost in costs)
    yield Figure("scale", f"peak, {name}", "MB", tuple(cost.memory for cost in costs), "a model", model)
    if case in LARGE:
        packed = tuple(cost.packing for cost in costs)
        yield Figure("scale", f"packing, {name}", "MB", packed, "a model", model, (_PACKING_TARGET,))


def figures(options: Options) -> list[Figure]:
    """Federations by sites, classes and size of the model, and the mean by class."""
    cases = (ROWS[0], ROWS[3]) if options.quick else ROWS
    found: dict[Case, list[Cost]] = defaultdict(list)
    for _ in range(options.runs):
        for case in (BASE, *cases):
            found[case].append(apart(measured, *case))
    for case in LARGE[:1] if options.quick else LARGE:
        found[case] = [apart(measured, *case) for _ in range(options.runs if case[2] < 1000 else 1)]
    rows = [row for case, costs in found.items() for row in _rows(case, costs, found[BASE])]
    return [*rows, merging(options.repeats)]
