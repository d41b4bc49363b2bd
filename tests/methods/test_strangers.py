"""SCAFFOLD, FedDyn and FedAdam, as another package writes them; the first against its paper, step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strangers.fedadam import FedAdam
from strangers.feddyn import FedDyn
from strangers.scaffold import Scaffold
from suture.core.runtime import generator_for
from suture.federation.loop import Loop
from suture.learning.steps import masked_loss
from suture.learning.training import LocalTraining, SiteContext, training_batches
from suture.models.classifier import load_tensors
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed, unpack
from suture_synthetic.method_checks import CHECKS, subject_of

LOCAL = LocalTraining(lr=0.05, epochs=2, batch_size=8, optimiser="sgd", momentum=0.0)
CLASSES = ("Mass", "Nodule")
SITES = ("alpha", "beta", "gamma")
ABSENT = {2: "alpha"}
"""Sites that are not sampled, by round: S is a part of the N = 3 sites then."""

Tensors = dict[str, Tensor]


class World:
    """The sites of the papers, with the data of those of a federation; a model is its parameters by name."""

    def __init__(self, sites: dict[str, SiteContext], start: Tensors, buffers: Tensors) -> None:
        self.sites, self.x, self.buffers = sites, start, buffers

    def locally(self, site: str, round_: int, shift: Tensors) -> tuple[Tensors, Tensors, int]:
        """y <- y - lr (g(y) + shift), from x, over a round's batches; y, its statistics, K."""
        context = self.sites[site]
        model = copy.deepcopy(context.model)
        load_tensors(model, {**self.x, **self.buffers})
        y, steps = dict(model.named_parameters()), 0
        where = (1, site, round_)
        shuffle, noise = generator_for(*where, "shuffle"), generator_for(*where, "augmentation")
        for _ in range(LOCAL.epochs):
            model.train()
            for batch in training_batches(context, LOCAL, shuffle, noise):
                loss = masked_loss(model(batch.inputs), batch.y, batch.known, "multilabel")
                gradients = torch.autograd.grad(loss, list(y.values()))
                with torch.no_grad():
                    for (name, p), g in zip(y.items(), gradients, strict=True):
                        p -= LOCAL.lr * (g + shift[name])
                steps += 1
        return {n: p.detach() for n, p in y.items()}, dict(model.named_buffers()), steps

    def average(self, buffers: list[Tensors]) -> None:
        """No paper speaks of batch norm; its statistics are averaged as those of FedAvg."""
        self.buffers = {
            k: sum(b[k].double() for b in buffers).div(len(buffers)).float() for k in self.buffers
        }


def zeros(like: Tensors) -> Tensors:
    return {name: torch.zeros_like(t) for name, t in like.items()}


def mean(tensors: list[Tensors]) -> Tensors:
    return {name: sum(t[name] for t in tensors) / len(tensors) for name in tensors[0]}  # type: ignore[misc]


def scaffold(world: World, rounds: int, method: Scaffold) -> Iterator[Tensors]:
    """Algorithm 1, option II."""
    c, c_i = zeros(world.x), {i: zeros(world.x) for i in SITES}
    for r in range(1, rounds + 1):
        dy, dc, buffers = [], [], []
        for i in (i for i in SITES if i != ABSENT.get(r)):
            y, b, k = world.locally(i, r, {n: c[n] - c_i[i][n] for n in c})
            plus = {n: c_i[i][n] - c[n] + (world.x[n] - y[n]) / (k * LOCAL.lr) for n in y}
            dy.append({n: y[n] - world.x[n] for n in y})
            dc.append({n: plus[n] - c_i[i][n] for n in y})
            c_i[i] = plus
            buffers.append(b)
        world.x = {n: world.x[n] + method.server_lr * d for n, d in mean(dy).items()}
        c = {n: c[n] + len(dc) / len(SITES) * d for n, d in mean(dc).items()}
        world.average(buffers)
        yield world.x


@pytest.mark.complete
def test_scaffold_is_the_algorithm_of_its_paper(tiny: Any) -> None:
    """Four rounds, in the second of which a site is not sampled: every parameter, to 1e-6."""
    method = Scaffold(local=LOCAL, server_lr=0.7)
    federation = tiny(method, dict.fromkeys(SITES, CLASSES), rounds=4, min_sites=2)
    server, sites = federation.server(), federation.sites()
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    contexts, begun = {}, server.model.trained
    start = {name: t.clone() for name, t in begun.items()}
    buffers = {name: server.model.shared[name].clone() for name in server.model.buffers}
    assert buffers
    for name, packed in server.assign().items():
        task = unpack(packed)
        assert isinstance(task, TaskData)
        context = sites[name].trainer.context(task, Packed({}, {}))
        contexts[name] = replace(context, model=copy.deepcopy(context.model))
    moved = 0.0
    for number, expected in enumerate(scaffold(World(contexts, start, buffers), 4, method), 1):
        tasks = {site: one for site, one in server.assign().items() if site != ABSENT.get(number)}
        server.close_round(loop.exchange("train", tasks, server.receiver()))
        assert server.round == number
        assert server.model.trained.keys() == expected.keys()
        for name, tensor in server.model.trained.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=f"{number}: {name}")
            moved = max(moved, float((tensor - begun[name]).abs().max()))
    assert moved > 1e-2


@pytest.mark.complete
@pytest.mark.parametrize("kind", [Scaffold, FedDyn, FedAdam], ids=lambda kind: kind.about.name)
def test_it_keeps_the_contract(kind: Any) -> None:
    """Without what holds for a mean alone; and their steps are those of plain SGD, which has no state."""
    others = {"local.betas", "local.momentum", "local.optimiser"}
    subject = replace(subject_of(kind(), exempt=others), types=("multilabel",))  # they never look at labels
    for check in CHECKS:
        if check.__name__ not in {"one_site_alone_decides", "optimiser_state_carries_over"}:
            check(subject)
