"""A server step of FL, MetaFL and PMFL over five sites against bare PyTorch; and the bytes of a round.

A whole round has messages, checks and files that bare PyTorch lacks; the sites' own work has none of these.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from figures import Figure, Options, Target
from harness import in_turns
from torch import Tensor, nn

from suture.core.files import read_records
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Augmentation, Batch, Samples
from suture.data.config import SiteConfig, StorageConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.text import clinical_vocabulary
from suture.federation.loop import Loop
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.learning.samples import load_samples, single_target
from suture.learning.training import LocalRound, SiteContext
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, load_tensors, split_state
from suture.protocol.messages import TaskData
from suture_papers.metafl.fl import FL
from suture_papers.metafl.inner_loop import MetaLearning, batch_of
from suture_papers.metafl.metafl import MetaFL
from suture_papers.metafl.pmfl import PMFL

SITES, DOCUMENTS, WORDS, BATCHES = 5, 200, 45, 25
SPEC = ModelSpec("lstm")
STEPS, LR = 10, 0.01
METHODS: tuple[FL | MetaLearning, ...] = (FL(batches=BATCHES), MetaFL(batches=BATCHES), PMFL(batches=BATCHES))
Work = Callable[[], Callable[[], object]]
"""Prepares a step, which is then timed."""


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


def federation(
    method: FL | MetaLearning, configs: Mapping[str, SiteConfig], rounds: int, folder: Path
) -> Work:
    """Rounds of a federation, with its messages, checks and files."""
    plan = Plan(method, SPEC, Augmentation(), 1, method.about.name, code_hash())
    server = open_server(
        plan, Schedule(name="pmfl", title="PMFL", rounds=rounds, selection="last"), None, folder
    )
    states = {name: experiment_folder(folder / "sites" / name, plan.experiment) for name in configs}
    loop = Loop({name: Site(name, c, plan, rounds, states[name]) for name, c in configs.items()})
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))

    def step() -> None:
        server.close_round(loop.exchange("train", server.assign(), server.receiver()))

    return lambda: step


def alone(method: FL | MetaLearning, data: list[Samples]) -> Work:
    """The sites' own work in a round: no message, file or check."""
    theta, rounds = _theta(), itertools.count(1)
    shared, head = split_state(theta.state_dict())
    task = TaskData("train", 1, 0, labels=theta.labels.names, shared=shared, head=head)
    sites = [_bench(copy.deepcopy(theta), train) for train in data]

    def step(round_: LocalRound) -> None:
        for site in sites:
            method.train(site, task, round_)

    def prepare() -> Callable[[], object]:
        for site in sites:
            load_tensors(site.model, theta.state_dict())
        return partial(step, LocalRound(method.local, "frozen", 1, next(rounds)))

    return prepare


def bare(data: list[Samples]) -> Work:
    """A step as a plain program takes it: five inner loops one after another, then Adam."""
    theta, rounds = _theta(), itertools.count(1)
    adam = torch.optim.Adam(theta.parameters(), 1e-3)

    def step(halves: list[tuple[Batch, Batch]]) -> None:
        total = [torch.zeros_like(p) for p in theta.parameters()]
        for support, query in halves:
            for t, gradient in zip(total, _inner(theta, support, query), strict=True):
                t += gradient / SITES
        for p, gradient in zip(theta.parameters(), total, strict=True):
            p.grad = gradient
        adam.step()

    def prepare() -> Callable[[], object]:
        round_ = next(rounds)
        return partial(step, [batch_of(_bench(theta, train), round_, BATCHES, 1) for train in data])

    return prepare


def _inner(theta: Classifier, support: Batch, query: Batch) -> list[Tensor]:
    model = copy.deepcopy(theta)
    sgd = torch.optim.SGD(model.parameters(), LR)
    for _ in range(STEPS):
        sgd.zero_grad(set_to_none=True)
        _loss(model, support).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return list(torch.autograd.grad(_loss(model, query), list(model.parameters())))


def _loss(model: Classifier, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch.inputs), batch.y)


def _theta() -> Classifier:
    return build(SPEC, LabelSet(("Target",)), 1, pretrained=False)


def _data(configs: Mapping[str, SiteConfig]) -> list[Samples]:
    return [single_target(load_samples(c, SPEC, name), None, name)[1]["train"] for name, c in configs.items()]


def _bench(model: Classifier, train: Samples) -> SiteContext:
    cpu = torch.device("cpu")
    return SiteContext("a", model, {"train": train}, SPEC.preprocessing, Augmentation(), cpu)


def figures(options: Options) -> list[Figure]:
    """The sites' work and a whole round of each method, and its bytes beside those of FL."""
    repeats, rows, sizes = options.repeats, [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = silos(folder)
        data = _data(configs)
        works = {"bare": bare(data)}
        for method in METHODS:
            works[method.about.name] = alone(method, data)
            works[f"round {method.about.name}"] = federation(method, configs, repeats + 1, folder)
        found = in_turns(repeats, works)
        for method in METHODS:
            last = read_records(folder / method.about.name / "history.jsonl")[-1]
            sizes[method] = ((last["bytes_down"] + last["bytes_up"]) / 1e6,)
    beside = "bare PyTorch"
    cpu, clock = found["bare"].cpu, found["bare"].clock
    for method in METHODS:
        name = method.about.name
        own = (f"the sites' work, {name}", "s of CPU", found[name].cpu, beside, cpu)
        rows.append(Figure("pmfl", *own, (Target("ratio", "≤", 1.1),)))
        round_ = found[f"round {name}"].clock
        rows.append(Figure("pmfl", f"a round with its files, {name}", "s", round_, beside, clock))
    size = ("bytes of a round, pmfl", "MB", sizes[METHODS[-1]], "fl")
    rows.append(Figure("pmfl", *size, sizes[METHODS[0]]))
    return rows
