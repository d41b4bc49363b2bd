"""What a round costs by sites, classes and size: `python benchmarks/scale.py`.

The server with sites that answer with what they have received, and measure nothing: all CPU seconds are the
server's, and those of packing and unpacking. Each row is a process of its own. `start` is the handshake and
the vocabulary; a round is from its payloads to its committed state, the median (range) of the rounds. Memory
is what the process has at its peak beyond its imports, in units of the model too. `packing` is the peak, in
units of the model and with it, of a process that packs a model, stores it, reads it back and unpacks it.
`--sites 10 1000 --classes 14 --mb 0.25` chooses rows; by default 10 to 1,000 sites, then 14 to 10,000
classes, then the sizes, of which 1,000 MB take two minutes, 5 GB of memory and of the disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import nn

from suture.data.augmentation import Augmentation
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.methods.surgical import SurgicalAggregation
from suture.models import MODELS, Backbone, ModelSpec
from suture.protocol.messages import Payload, SiteInfo, Update, ones
from suture.protocol.packing import Packed, load, pack, save, unpack

ROWS = [(10, 14, 0.25), (100, 14, 0.25), (300, 14, 0.25), (1000, 14, 0.25)]
ROWS += [(10, 1000, 0.25), (10, 10_000, 0.25), (10, 14, 28), (3, 14, 1000)]
_WIDE = 4096


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


def _answer(packed: Packed, labels: tuple[str, ...], plan: Plan) -> Packed:
    task = unpack(packed)
    assert isinstance(task, Payload)
    if task.task == "handshake":
        return pack(SiteInfo(labels, {"train": 8, "validation": 2}, 1, plan.code))
    return pack(Update(task.round, task.labels, task.shared, task.head, ones(task.labels)))


def _peak() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def packing(message: Payload) -> float:
    """Peak of packing, storing, reading and unpacking a message, with the message itself, in its size."""
    status = Path("/proc/self/status")

    def resident(line: str) -> int:
        return next(int(text.split()[1]) for text in status.read_text().splitlines() if text.startswith(line))

    with tempfile.TemporaryDirectory() as folder:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        save(Path(folder) / "model", pack(message))
        found = unpack(load(Path(folder) / "model"))
        assert isinstance(found, Payload)
        if not all(torch.equal(tensor, found.shared[name]) for name, tensor in message.shared.items()):
            raise SystemExit("what was read is something else than what was stored")
        return 1 + (resident("VmHWM") - before) * 1024 / sum(t.nbytes for t in message.shared.values())


def measured(sites: int, classes: int, mb: float, rounds: int) -> dict[str, Any]:
    """CPU seconds and memory of a federation of so many sites."""
    torch.set_num_threads(1)
    method = SurgicalAggregation()
    plan = Plan(method, _SPECS[mb], Augmentation(), 1, "scale", code_hash(type(method)))
    labels = tuple(f"class {i * 7919 % 1000003:06d}" for i in range(classes))
    names = [f"site-{i:04d}" for i in range(sites)]
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(rounds, selection="last", accept_labels=True)
        server = open_server(plan, schedule, None, Path(folder))
        before, started = _peak(), time.process_time()

        def exchange(payloads: Mapping[str, Packed]) -> dict[str, str]:
            receive = server.receiver()
            for site, packed in payloads.items():
                receive(site, _answer(packed, labels, plan))
            return {}

        server.begin(exchange(server.handshake(names)))
        start, seconds = time.process_time() - started, []
        for _ in range(rounds):
            began = time.process_time()
            server.close_round(exchange(server.assign()))
            seconds.append(time.process_time() - began)
        memory = _peak() - before
        model = sum(t.nbytes for t in {**server.model.shared, **server.model.head}.values()) / 2**20
    return {
        "packing": packing(Payload("train", labels=labels, shared=dict(server.model.shared))),
        "start": start,
        "rounds": seconds,
        "memory": memory,
        "model": model,
    }


def _row(sites: int, classes: int, mb: float, rounds: int) -> dict[str, Any]:
    code = f"import json, scale; print(json.dumps(scale.measured({sites}, {classes}, {mb}, {rounds})))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parent
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints a row for each federation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[])
    parser.add_argument("--classes", type=int, default=14)
    parser.add_argument("--mb", type=float, default=0.25, choices=_SPECS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = [(n, args.classes, args.mb) for n in args.sites] or ROWS
    head = ("sites", "classes", "model, MiB", "start, CPU s", "round, CPU s", "ms a round and site")
    table = Table(*head, "memory, MiB", "of the model", "packing", box=None)
    for sites, classes, mb in rows:
        row = _row(sites, classes, mb, args.rounds)
        middle, *ends = (f(row["rounds"]) for f in (statistics.median, min, max))
        least, most = (f"{1000 * end / sites:.2f}" for end in ends)
        cost = f"{1000 * middle / sites:.2f} ({least}-{most})"
        figures = (f"{row['model']:.1f}", f"{row['start']:.2f}", f"{middle:.3f}", cost)
        grown = (
            f"{row['memory']:.0f}",
            f"{row['memory'] / row['model']:.1f}",
            f"{row['packing']:.1f}" if mb > 1 else "-",
        )
        table.add_row(f"{sites:,}", f"{classes:,}", *figures, *grown)
    Console(width=120).print(machine(), table)


if __name__ == "__main__":
    main()
