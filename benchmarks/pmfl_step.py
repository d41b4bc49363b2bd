"""A server step of MetaFL and PMFL over five sites against bare PyTorch; and the bytes of a round.

python benchmarks/pmfl_step.py

The whole round has messages, checks and files that bare PyTorch lacks; the sites' own work has none of these.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from suture.core.allocator import keep_memory
from suture.core.labels import LabelSet
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples
from suture.data.config import SiteConfig, StorageConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.text import clinical_vocabulary
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.learning.samples import load_samples, single_target
from suture.learning.training import LocalRound, SiteContext
from suture.methods.base import Method
from suture.methods.meta.fl import FL
from suture.methods.meta.inner_loop import MetaLearning, batch_of
from suture.methods.meta.metafl import MetaFL
from suture.methods.meta.pmfl import PMFL
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, load_tensors, split_state
from suture.protocol.messages import Payload
from suture.protocol.privacy import PrivacyConfig

SITES, DOCUMENTS, WORDS, ROUNDS, BATCHES = 5, 200, 45, 9, 25
SPEC = ModelSpec("lstm")
STEPS, LR = 10, 0.01


def silos(folder: Path) -> dict[str, SiteConfig]:
    """Five hospitals of made-up reports, as long as those of Open-i."""
    words, draw = clinical_vocabulary().words[:2000], random.Random(0)
    configs = {}
    for i in range(SITES):
        place = folder / f"site-{i}"
        place.mkdir()
        lines = ["image,patient,split,text,Edema"]
        for n in range(DOCUMENTS):
            text = " ".join(draw.choices(words, k=draw.randint(WORDS // 3, 2 * WORDS))).replace(",", " ")
            lines.append(f"{n},p{n},train,{text},{n % 2}")
        (place / "labels.csv").write_text("\n".join(lines) + "\n")
        data = HospitalConfig(
            root=place / "labels.csv",
            table=place / "labels.csv",
            text_column="text",
            target="Edema",
        )
        configs[place.name] = SiteConfig(
            data=data,
            privacy=PrivacyConfig(min_count=0, min_loss=0),
            storage=StorageConfig(state=place / "state", cache=place / "cache"),
        )
    return configs


def federation(method: Method, configs: dict[str, SiteConfig], folder: Path) -> tuple[float, float, float]:
    """Seconds of a round (median), and the megabytes that go down and up."""
    plan = Plan(method, SPEC, Augmentation(), 1, method.about.name, code_hash())
    server = open_server(plan, Schedule(ROUNDS, selection="last"), None, folder)
    sites = {
        name: Site(name, c, plan, ROUNDS, folder / method.about.name / name) for name, c in configs.items()
    }
    federate(server, Loop(sites))
    lines = (folder / method.about.name / "history.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines][1:]  # the first sends each site its own half
    seconds = statistics.median(r["seconds"] for r in rounds)
    return seconds, *(statistics.median(r[f"bytes_{way}"] for r in rounds) / 1e6 for way in ("down", "up"))


def alone(method: FL | MetaLearning, configs: dict[str, SiteConfig]) -> float:
    """CPU seconds of the sites' own work in a round (median): no message, file or check."""
    theta = _theta()
    shared, head = split_state(theta.state_dict())
    task = Payload("train", 1, 0, labels=theta.labels.names, shared=shared, head=head)
    sites = [_bench(copy.deepcopy(theta), train) for train in _data(configs)]
    times = []
    for round_ in range(1, ROUNDS + 1):
        for site in sites:
            load_tensors(site.model, theta.state_dict())
        began = time.process_time()
        for site in sites:
            method.train(site, task, LocalRound(method.local, "frozen", 1, round_))
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


def bare(configs: dict[str, SiteConfig]) -> tuple[float, float]:
    """Seconds of a step as a plain program takes it, of the clock and of the CPU (medians).

    Five inner loops one after another, then Adam.
    """
    theta, data = _theta(), _data(configs)
    adam = torch.optim.Adam(theta.parameters(), 1e-3)
    times = []
    for round_ in range(1, ROUNDS + 1):
        halves = [batch_of(_bench(theta, train), round_, BATCHES, 1) for train in data]
        began = time.perf_counter(), time.process_time()
        total = [torch.zeros_like(p) for p in theta.parameters()]
        for support, query in halves:
            for t, gradient in zip(total, _inner(theta, support, query), strict=True):
                t += gradient / SITES
        for p, gradient in zip(theta.parameters(), total, strict=True):
            p.grad = gradient
        adam.step()
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, cpu = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return wall, cpu


def _inner(theta: Classifier, support: object, query: object) -> list[Tensor]:
    model = copy.deepcopy(theta)
    sgd = torch.optim.SGD(model.parameters(), LR)
    for _ in range(STEPS):
        sgd.zero_grad(set_to_none=True)
        _loss(model, support).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return list(torch.autograd.grad(_loss(model, query), list(model.parameters())))


def _loss(model: Classifier, batch: object) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch.inputs), batch.y)  # type: ignore[attr-defined]


def _theta() -> Classifier:
    return build(SPEC, LabelSet(("Target",)), 1, pretrained=False)


def _data(configs: dict[str, SiteConfig]) -> list[Samples]:
    return [single_target(load_samples(c, SPEC, name), None, name)[1]["train"] for name, c in configs.items()]


def _bench(model: Classifier, train: Samples) -> SiteContext:
    cpu = torch.device("cpu")
    return SiteContext("a", model, {"train": train}, SPEC.preprocessing, Augmentation(), cpu)


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    keep_memory()  # as in the processes that Suture starts
    table = Table(
        title=f"{SITES} sites, {STEPS} inner steps on 4 documents\n{machine()}", title_justify="left"
    )
    for column in ("", "s a round", "of bare", "sites, CPU", "MB down", "MB up"):
        table.add_column(column, justify="left" if not column else "right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = silos(folder)
        wall, cpu = bare(configs)
        table.add_row("bare PyTorch", f"{wall:.2f}", "", "", "", "")
        for method in (FL(batches=BATCHES), MetaFL(batches=BATCHES), PMFL(batches=BATCHES)):
            seconds, down, up = federation(method, configs, folder)
            ratios = (f"{seconds / wall:.2f}", f"{alone(method, configs) / cpu:.2f}")
            table.add_row(method.about.title, f"{seconds:.2f}", *ratios, f"{down:.1f}", f"{up:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
