"""What every registered method must hold; a new one is tested by being registered."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from suture.core.labels import LabelType
from suture.federation.plan import Plan
from suture.federation.server.server import Server
from suture.learning.samples import TARGET
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method, Phase, RoundContext
from suture.methods.meta.inner_loop import INNER, ServerStep
from suture.methods.parameters import parts
from suture.models.classifier import Layout
from suture.protocol.messages import Payload, Update, ones
from suture.protocol.packing import load

ALL = pytest.mark.parametrize("name", sorted(METHODS))
LABELS = ("A", "B", "C")


def make(name: str) -> Method:
    """The method with a learning rate at which a tiny network moves."""
    kind: Any = METHODS[name]
    if kind.single_target:
        method: Method = kind(local=replace(INNER, lr=0.1, iterations=3), batches=1)
        return replace(method, server=ServerStep(lr=1e-2)) if sends(method) == "gradient" else method  # type: ignore[call-arg]
    return kind(local=LocalTraining(lr=1e-2, batch_size=8))  # type: ignore[no-any-return]


def sends(method: Method) -> str:
    """Weights, or a gradient."""
    return method.egress(Layout({}, {})).kind


def context() -> RoundContext:
    return RoundContext(1, Phase("main", 1), 0)


def a_model(method: Method) -> GlobalModel:
    g = torch.Generator().manual_seed(0)
    head = {"head.weight": torch.randn(3, 4, generator=g), "head.bias": torch.randn(3, generator=g)}
    shared = {} if method.personal == "model" else {"w": torch.randn(5, generator=g)}
    return GlobalModel(LABELS, shared, head)


def an_update(
    method: Method, previous: GlobalModel, labels: tuple[str, ...], seed: int, noise: float = 1.0
) -> Update:
    """What a site sends, of what crosses: its tensors moved by noise, or noise as a gradient."""
    g = torch.Generator().manual_seed(seed)
    by = 0 if sends(method) == "gradient" else 1
    moved = lambda t: by * t + noise * torch.randn(t.shape, generator=g)  # noqa: E731
    shared, rows = parts(method, previous.shared, previous.rows(labels))
    shared, rows = ({k: moved(t) for k, t in group.items()} for group in (shared, rows))
    return Update(1, labels, shared, rows, ones(labels), kind=sends(method))  # type: ignore[arg-type]


def labels_for(method: Method, own: tuple[str, ...]) -> tuple[str, ...]:
    """The rows that a site of `own` classes sends."""
    return LABELS if method.label_view == "all" else own


def tensors(model: GlobalModel) -> dict[str, Tensor]:
    return {**model.shared, **model.head}


def run_tensors(server: Server) -> dict[str, Tensor]:
    return dict(load(server.states.path(server.round)).tensors)


@ALL
def test_says_what_it_is_and_survives_a_job_file(name: str) -> None:
    method = make(name)
    assert method.name == name
    assert method.title
    assert method.paper
    plan = Plan(
        method, __import__("suture.models", fromlist=["x"]).ModelSpec(), _no_augmentation(), 3, "e", "c"
    )
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert dataclasses.is_dataclass(method)


def _no_augmentation() -> Any:
    from suture.data.augmentation import Augmentation

    return Augmentation()


@ALL
def test_order_of_sites_does_not_matter_beyond_rounding(name: str) -> None:
    method, before = make(name), a_model(make(name))
    updates = [
        an_update(method, before, labels_for(method, own), i)
        for i, own in enumerate([("A", "B"), ("B", "C"), ("B",)])
    ]
    one = tensors(method.aggregate(before, updates, context()))
    two = tensors(method.aggregate(before, updates[::-1], context()))
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, two[key], rtol=1e-6, atol=1e-7)


@ALL
def test_same_updates_in_the_same_order_give_the_same_bytes(name: str) -> None:
    method, before = make(name), a_model(make(name))
    updates = [
        an_update(method, before, labels_for(method, own), i)
        for i, own in enumerate([("A", "B"), ("B", "C")])
    ]
    one, two = (tensors(method.aggregate(before, iter(updates), context())) for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@ALL
def test_identical_updates_are_a_fixed_point(name: str) -> None:
    """Sites that send back what they got, or a gradient of 0, leave the model as it was."""
    method, before = make(name), a_model(make(name))
    updates = [
        an_update(method, before, rows, 0, noise=0.0)
        for rows in (labels_for(method, ("A", "B")), labels_for(method, ("B", "C")))
    ]
    after = tensors(method.aggregate(before, updates, context()))
    for key, tensor in tensors(before).items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-6, atol=1e-7)


@ALL
def test_one_site_alone_decides(name: str) -> None:
    method, before = make(name), a_model(make(name))
    update = an_update(method, before, LABELS, 3)
    after = tensors(method.aggregate(before, [update], context()))
    for key, sent in {**update.shared, **update.head}.items():
        if sends(method) == "weights":
            torch.testing.assert_close(after[key], sent, rtol=1e-6, atol=1e-7)
        else:  # a step against the gradient
            crossed = slice(len(sent))
            assert bool(((after[key] - tensors(before)[key])[crossed] * sent < 0).all())


@pytest.mark.parametrize("name", sorted(n for n, m in METHODS.items() if m.label_view == "own"))
def test_a_class_that_nobody_sent_keeps_its_row(name: str) -> None:
    method, before = make(name), a_model(make(name))
    after = method.aggregate(
        before, [an_update(method, before, ("A",), 1), an_update(method, before, ("B",), 2)], context()
    )
    for key in before.head:
        assert torch.equal(after.head[key][2], before.head[key][2])
        assert bool(torch.isfinite(after.head[key]).all())


@ALL
@pytest.mark.parametrize("task", ["multilabel", "multiclass"])
def test_what_stands_at_an_unknown_label_changes_no_gradient(name: str, task: LabelType) -> None:
    method = make(name)
    known = torch.tensor([[True, False, True]] * 6)
    y = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2])]
    flipped = torch.where(known, y, 1 - y)
    gradients = []
    for labels in (y, flipped):
        logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        method.loss(logits, labels, known, task).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        gradients.append(logits.grad)
    assert torch.equal(gradients[0], gradients[1])


@ALL
def test_whole_federation_twice_gives_the_same_bytes(name: str, tiny: Any) -> None:
    federation = tiny(make(name))
    one, two = federation.run("one"), federation.run("two")
    assert run_tensors(one).keys() == run_tensors(two).keys()
    assert all(torch.equal(t, run_tensors(two)[key]) for key, t in run_tensors(one).items())
    moved = {**one.model.shared, **one.model.head}
    start = run_tensors(one)
    assert moved.keys() <= {key.split("/", 1)[1] for key in start}


@ALL
def test_training_moves_the_model_and_its_figures_are_written(name: str, tiny: Any) -> None:
    federation = tiny(make(name), rounds=3)
    server = federation.run()
    folder = Path(server.record.folder)
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == [1, 2, 3]
    losses = [line["validation"]["loss"] for line in history]
    if sends(federation.plan.method) == "gradient":  # which is of the loss after a site has adapted
        losses = [sum(site["scalars"]["query_loss"] for site in line["sites"].values()) for line in history]
    assert losses[-1] < losses[0]
    metrics = json.loads((folder / "metrics.json").read_text())
    every = {TARGET} if METHODS[name].single_target else {"Fibrosis", "Hernia", "Mass", "Nodule"}
    assert set(metrics["auroc"]) == every


@ALL
def test_sites_see_what_the_method_declares_and_nothing_else(name: str, tiny: Any) -> None:
    """With `own`, no message to a site holds a class name that is not the site's."""
    federation = tiny(make(name))
    server, sites = federation.server(), federation.sites()
    sent: dict[str, list[Payload]] = {site: [] for site in sites}

    class Listening:
        sites = sorted(federation.sites())

        def exchange(self, task: Any, payloads: Any, receive: Any) -> dict[str, str]:
            from suture.protocol.packing import pack, unpack

            for site, packed in payloads.items():
                payload = unpack(packed)
                assert isinstance(payload, Payload)
                sent[site].append(payload)
                receive(site, pack(all_sites[site].answer(payload)))
            return {}

    all_sites = sites
    from suture.federation.loop import federate

    federate(server, Listening())
    own = {site: set(member.names) for site, member in server.registry.members.items()}
    for site, payloads in sent.items():
        seen = {label for payload in payloads for label in payload.labels}
        expected = own[site] if METHODS[name].label_view == "own" else set(server.registry.labels)
        assert seen <= expected
        rows = {t.shape[0] for p in payloads for t in p.head.values()}
        assert rows <= {len(expected)}
