"""What a round of each method costs, relative to FedAvg on the same data.

Three sites with 192 images of 32 px, a small ResNet, one torch thread; rounds two and three of a federation
in one process (some methods begin in the second), without the evaluation of the last model. Each is paired
with a run of FedAvg right before it, with labels of the same type; the median of the pairs is written to
benchmarks/method_costs.json, which `suture list methods` shows.

    python benchmarks/method_cost.py [--pairs 3] [--methods METHOD ...]
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, command, machine

from suture.core.files import write_json
from suture.core.labels import LabelType
from suture.federation.loop import Loop
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import Method
from suture.models import ModelSpec
from suture_papers.metafl.inner_loop import INNER
from suture_synthetic import trial
from suture_synthetic.trial import Trial

FILE = ROOT / "benchmarks" / "method_costs.json"
MODEL = ModelSpec("resnet_small", size=32, weights="random")
ROUNDS = 3


def _larger(images: Any) -> Any:
    def samples(site: str, label_type: LabelType) -> Any:
        own, parts = images(site, label_type)
        grown = {
            split: replace(part, inputs={"image": part.inputs["image"].repeat(1, 1, 2, 2)})
            for split, part in parts.items()
        }
        return own, grown

    return samples


def method_of(name: str) -> Method:
    """The method with a round of one epoch in batches of 16; as its paper has it otherwise."""
    kind: Any = METHODS[name]
    if kind().labels.view == "target":
        made = kind(local=replace(INNER, iterations=3), batches=4)
    else:
        made = kind(local=LocalTraining(lr=1e-3, batch_size=16))
    return made  # type: ignore[no-any-return]


def seconds(method: Method, label_type: LabelType) -> float:
    """The CPU seconds of rounds two and three, of sites and server."""
    with Trial(method, MODEL, label_type, rounds=ROUNDS) as federation:
        federation.payload("alpha")  # the handshake and the first task
        loop, server, marks = Loop(federation.sites), federation.server, list[float]()
        for _ in range(ROUNDS):
            server.close_round(loop.exchange("train", server.assign(), server.receiver()))
            marks.append(time.process_time())
    return marks[-1] - marks[0]


def cost(name: str, pairs: int) -> float | None:
    """The median ratio to FedAvg; None of a method that trains in no federation."""
    method = method_of(name)
    if method.about.local_only:
        return None
    label_type = method.labels.types[0]
    plain = method_of("fedavg")
    ratios = [seconds(method, label_type) / seconds(plain, label_type) for _ in range(pairs)]
    print(f"{name:16s} {statistics.median(ratios):5.2f}   {min(ratios):.2f} to {max(ratios):.2f}", flush=True)
    return round(statistics.median(ratios), 1)


def main(methods: tuple[str, ...] = tuple(METHODS), pairs: int = 3, out: Path = FILE) -> None:
    """Measure some methods, and write their costs beside the others'."""
    torch.set_num_threads(1)
    trial.SIZES = {"train": 192, "validation": 32, "test": 0}
    trial._samples = _larger(trial._samples)
    print(machine())
    known = json.loads(out.read_text()) if out.exists() else {}
    found = known | {name: cost(name, pairs) for name in methods}
    write_json(out, {name: found[name] for name in sorted(found) if name in METHODS})


if __name__ == "__main__":
    command(main, methods=("surgical",), pairs=1, out=ROOT / "runs" / "method_costs.json")
