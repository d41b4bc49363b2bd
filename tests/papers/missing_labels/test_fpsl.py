"""FPSL: a step by hand, and two epochs written out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federated import ROUND, at_site
from rounds import precise
from suture.core.labels import LabelType
from suture.core.runtime import generator_for
from suture.data.batch import Batch
from suture.learning.steps import NonFiniteLoss
from suture.learning.training import LocalTraining, SiteContext, training_batches
from suture.methods.class_weights import NAME
from suture_papers.missing_labels.fpsl import FPSL, bilevel_loss
from world import refused

SGD = LocalTraining(lr=0.1, batch_size=8, epochs=2, optimiser="sgd", momentum=0.0)
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


class Product(nn.Module):
    """The model psi f x."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.f * inputs["x"]


def test_a_step_by_hand() -> None:
    """L = (psi f x - t)^2 / 2, A = (1, 2), B = (1, 0), f = psi = 1, eta = .1.

    psi' = 1 + .1 = 1.1; f = 1 - .1 * 1.1^2 = .879; psi = 1 + .1 * (2 - 1) = 1.1.
    """
    model: Any = Product()
    a, b = (Batch({"x": torch.ones(1, 1)}, torch.tensor([[t]]), torch.ones(1, 1).bool()) for t in (2.0, 0.0))
    loss = bilevel_loss(model, a, b, lambda z, y, known: 0.5 * known * (z - y) ** 2, 0.1)
    assert loss.item() == pytest.approx(0.5 + 0.5 * 1.1**2)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.f.item() == pytest.approx(0.879)
    assert model.head.weight.item() == pytest.approx(1.1)


def slow_loss(z: Tensor, batch: Batch, label_type: LabelType, weights: Tensor) -> Tensor:
    """The loss of known labels, image by image and class by class."""
    total, count = 0 * z.sum(), 0
    for i in range(len(z)):
        known = [c for c in range(z.shape[1]) if batch.known[i, c]]
        if label_type == "multilabel":
            for c in known:
                p = 1 / (1 + torch.exp(-z[i, c]))
                total = total - (weights[c] * torch.log(p) if batch.y[i, c] == 1 else torch.log(1 - p))
                count += 1
        for c in known if label_type == "multiclass" else ():
            if batch.y[i, c] == 1:
                others = torch.stack([torch.exp(z[i, k]) for k in known])
                total = total - torch.log(torch.exp(z[i, c]) / others.sum())
                count += 1
    return total / max(count, 1)


def pairs(site: SiteContext, local: LocalTraining) -> Iterator[tuple[Batch, Batch]]:
    """A and B of each step of two epochs."""
    shuffle, noise, second = (
        generator_for(ROUND.seed, site.name, ROUND.round, word)
        for word in ("shuffle", "augmentation", "second batch")
    )
    for _ in range(2):
        a = list(training_batches(site, local, shuffle, noise))
        yield from zip(a, training_batches(site, local, second, second), strict=True)


@BOTH
@pytest.mark.parametrize("name", ["alpha", "gamma"])
def test_it_is_the_slow_transcription(label_type: LabelType, name: str) -> None:
    """Every parameter after two epochs of plain SGD."""
    site, received = at_site(FPSL(local=SGD), label_type, name)
    received = replace(received, channels={k: t.double() for k, t in received.channels.items()})
    site, weights = precise(site), received.channels.get(NAME, torch.ones(len(received.labels)))
    model = copy.deepcopy(site.model).train().requires_grad_(True)
    steps = 0
    for a, b in pairs(site, SGD):
        steps += 1
        inner = copy.deepcopy(model)
        slow_loss(inner(a.inputs), a, label_type, weights).backward()  # type: ignore[no-untyped-call]
        ahead = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(ahead.head.parameters(), inner.head.parameters(), strict=True):
                p -= SGD.lr * q.grad
        slow_loss(ahead(b.inputs), b, label_type, weights).backward()  # type: ignore[no-untyped-call]
        outer = dict(ahead.named_parameters())
        of_head = {key: p.grad for key, p in inner.named_parameters() if key.startswith("head.")}
        with torch.no_grad():
            for key, p in model.named_parameters():
                gradient = of_head[key] if key in of_head else outer[key].grad
                p -= SGD.lr * gradient
    assert steps > 3
    FPSL(local=SGD).train(site, received, replace(ROUND, local=SGD))
    found, before = dict(site.model.named_parameters()), {**received.shared, **received.head}
    for key, p in model.named_parameters():
        assert torch.allclose(found[key], p, rtol=0, atol=1e-10), key
        assert not torch.allclose(p, before[key].double(), atol=1e-5), key


def test_a_step_is_clipped_as_a_whole() -> None:
    """One step of plain SGD is as long as the clip allows, over extractor and head together."""
    local = replace(SGD, epochs=1, batch_size=18, lr=1.0, clip=1e-3)
    site, received = at_site(FPSL(local=local))
    site, before = precise(site), copy.deepcopy(site.model)
    FPSL(local=local).train(site, received, replace(ROUND, local=local))
    moves = zip(site.model.parameters(), before.parameters(), strict=True)
    assert sum((p - q).detach().square().sum().item() for p, q in moves) ** 0.5 == pytest.approx(
        1e-3, rel=1e-4
    )


def test_mixed_precision_trains_the_extractor_too() -> None:
    site, received = at_site(FPSL(local=SGD))
    site.model.float().compute_in(torch.bfloat16)
    FPSL(local=SGD).train(site, received, replace(ROUND, local=SGD))
    frozen = [
        name
        for name, p in site.model.named_parameters()
        if torch.equal(p, {**received.shared, **received.head}[name])
    ]
    assert frozen == []


@pytest.mark.complete
def test_a_loss_that_is_no_number_ends_the_round() -> None:
    site, received = at_site(FPSL(local=SGD))
    site.model.float()
    with torch.no_grad():
        site.model.head.weight[:] = float("nan")
    with refused("alpha", "round 1, step 1", by=NonFiniteLoss):
        FPSL(local=SGD).train(site, received, replace(ROUND, local=SGD))
