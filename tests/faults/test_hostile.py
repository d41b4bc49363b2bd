"""Hostile updates: each is rejected whole, with site and reason; the model is the one without that site."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ledger import Found
from poc import digest

from between import Between
from suture.federation.loop import federate
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.fedlsm.fedlsm import FedLSM

pytestmark = pytest.mark.complete


METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
STEPS = LocalTraining(lr=1e-3, batch_size=8, iterations=2)


def first(update: Update, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
    """The update with its first shared tensor changed."""
    name = next(iter(update.shared))
    return pack(replace(update, shared={**update.shared, name: change(update.shared[name])}))


def header(update: Update, **facts: Any) -> Packed:
    """The update with fields that no honest site can make."""
    packed = pack(update)
    return Packed(packed.tensors, {**packed.header, **facts})


def tensors(update: Update, **more: torch.Tensor | None) -> Packed:
    """The update with further tensors, or without some."""
    packed = pack(update)
    changed = {**packed.tensors, **{k.replace("__", "/"): t for k, t in more.items()}}
    return Packed({k: t for k, t in changed.items() if t is not None}, packed.header)


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Puts a value into one element."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return put


LIES: dict[str, tuple[Callable[[Update], Packed], str]] = {
    "NaN": (lambda u: first(u, one(float("nan"))), "is not finite"),
    "Inf": (lambda u: first(u, one(float("inf"))), "is not finite"),
    "wrong shape": (lambda u: first(u, lambda t: t.flatten()[:-1]), "has shape"),
    "broadcastable shape": (lambda u: first(u, lambda t: t[:1]), "has shape"),
    "broadcastable rows": (
        lambda u: pack(replace(u, head={k: t[:1] for k, t in u.head.items()})),
        "has shape",
    ),
    "wrong type": (lambda u: first(u, lambda t: t.double()), "torch.float64"),
    "extra tensor": (lambda u: tensors(u, shared__more=torch.ones(1)), "was not declared"),
    "extra group": (lambda u: tensors(u, memory__more=torch.ones(1)), "undeclared tensor"),
    "missing tensor": (
        lambda u: pack(replace(u, shared=dict(list(u.shared.items())[1:]))),
        "is missing",
    ),
    "no tensors": (lambda u: pack(replace(u, shared={}, head={})), "is missing"),
    "oversize": (lambda u: first(u, lambda _: torch.zeros(4_000_000)), "has shape"),
    "extra field": (lambda u: header(u, patients=["p1"]), "Update"),
    "unknown label": (lambda u: pack(replace(u, labels=("Hernia", *u.labels[1:]))), "unknown label 'Hernia'"),
    "duplicate label": (lambda u: pack(replace(u, labels=(u.labels[0],) * len(u.labels))), "appears twice"),
    "look-alike label": (lambda u: header(u, labels=["Mass ", *u.labels[1:]]), "labels"),
    "other spelling": (lambda u: pack(replace(u, labels=("mass", *u.labels[1:]))), "unknown label 'mass'"),
    "labels in another order": (lambda u: pack(replace(u, labels=u.labels[::-1])), "label"),
    "negative weight": (lambda u: header(u, weight=-1.0), "weight"),
    "huge weight": (lambda u: header(u, weight=1e30), "weight"),
    "NaN weight": (lambda u: header(u, weight=float("nan")), "weight"),
    "NaN weight of a class": (
        lambda u: pack(replace(u, class_weights=u.class_weights * float("nan"))),
        "class_weights",
    ),
    "negative weight of a class": (
        lambda u: pack(replace(u, class_weights=-u.class_weights)),
        "class_weights",
    ),
    "the largest floats": (
        lambda u: first(u, lambda t: torch.full_like(t, 3e38)),
        "more than 100 times the model's",
    ),
    "a training loss of -1.8e308": (lambda u: header(u, train_loss=-1.7976931348623157e308), "train_loss"),
    "4 MiB of type": (lambda _: Packed({}, {"type": "\x1b[2K" * 1_000_000}), r"type '\x1b[2K"),
    "another round": (lambda u: pack(replace(u, round=u.round + 1)), "round"),
    "another kind": (lambda u: header(u, kind="gradient"), "kind"),
    "no update": (lambda _: Packed({}, {"type": "siteinfo"}), "SiteInfo"),
    "nonsense": (lambda _: Packed({"x": torch.ones(1)}, {"type": "pickle"}), "unknown message type"),
}


WITHOUT_ALPHA: list[str] = []
"""The hash of the model without the site that lies; every test has the same data."""


def train(site: str, answer: Packed) -> Update | None:
    """The update of the site that lies, in a training round."""
    update = unpack(answer)
    return update if site == "alpha" and isinstance(update, Update) else None


def as_it_is(site: str, task: TaskData, answer: Packed) -> Packed:
    """Changes nothing."""
    return answer


def run(
    tiny: Any,
    out: str,
    change: Callable[[str, TaskData, Packed], Packed | None],
    method: Method = METHOD,
    rounds: int = 2,
) -> Any:
    federation = tiny(method, min_sites=2, selection="last", rounds=rounds)
    server = federation.server(out)
    federate(server, Between(federation.sites(out), change))
    return server


def lines(server: Any) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.case("hostile")
@pytest.mark.parametrize("kind", LIES)
def test_a_hostile_update_is_rejected_whole(kind: str, attempt: int, tiny: Any, note: Any) -> None:
    make, words = LIES[kind]

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        update = train(site, answer)
        return make(update) if update else answer

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if train(site, answer) else answer

    lied = run(tiny, "lied", lie, rounds=1)
    if not WITHOUT_ALPHA:
        WITHOUT_ALPHA.append(digest(run(tiny, "lost", lose, rounds=1).record.folder))
    assert digest(lied.record.folder) == WITHOUT_ALPHA[0]
    for line in lines(lied):
        assert line["sites"]["alpha"]["status"] == "rejected"
        assert words in line["sites"]["alpha"]["reason"]
    note(Found(updates_lost=len(lines(lied)), model=digest(lied.record.folder)))


@pytest.mark.case("hostile")
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(local=METHOD.local),
        FedAvg(local=METHOD.local, rows="owners"),
        FedLSM(local=STEPS, proxies="owners"),
    ],
    ids=["FedAvg", "FedAvg of owners", "FedLSM of owners"],
)
def test_a_huge_weight_of_a_class_does_not_take_its_row_over(
    method: Method, attempt: int, tiny: Any, note: Any
) -> None:
    """Where sites count with their numbers of images, a row counts with the same."""

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        update = train(site, answer)
        return pack(replace(update, class_weights=update.class_weights * 1e6)) if update else answer

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if train(site, answer) else answer

    lied, lost = run(tiny, "lied", lie, method), run(tiny, "lost", lose, method)
    assert digest(lied.record.folder) == digest(lost.record.folder)
    for line in lines(lied):
        assert line["sites"]["alpha"]["status"] == "rejected"
        assert "the class weight of" in line["sites"]["alpha"]["reason"]
    note(Found(updates_lost=len(lines(lied)), model=digest(lied.record.folder)))


@pytest.mark.case("hostile")
@pytest.mark.parametrize("kind", ["replay", "twice"])
def test_an_update_counts_in_its_round_and_once(kind: str, attempt: int, tiny: Any, note: Any) -> None:
    kept: list[Packed] = []

    def replay(site: str, task: TaskData, answer: Packed) -> Packed:
        if train(site, answer):
            kept.append(answer)
            return kept[0]
        return answer

    def after_the_first(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if train(site, answer) and task.round > 1 else answer

    class Twice(Between):
        """Sends every answer of alpha a second time, as another one."""

        def exchange(self, task: Any, payloads: Any, receive: Any) -> dict[str, str]:
            def both(site: str, answer: Packed) -> None:
                receive(site, answer)
                update = train(site, answer)
                if update:
                    receive(site, first(update, lambda t: t + 1))

            return super().exchange(task, payloads, both)  # type: ignore[arg-type]

    if kind == "replay":
        lied, honest = run(tiny, "lied", replay), run(tiny, "honest", after_the_first)
        assert [line["sites"]["alpha"]["status"] for line in lines(lied)] == ["accepted", "rejected"]
        assert "round 1 instead of 2" in lines(lied)[1]["sites"]["alpha"]["reason"]
    else:
        federation = tiny(METHOD, min_sites=2, selection="last")
        lied, honest = federation.server("lied"), run(tiny, "honest", as_it_is)
        federate(lied, Twice(federation.sites("lied"), as_it_is))
    assert digest(lied.record.folder) == digest(honest.record.folder)
    note(Found(updates_lost=int(kind == "replay"), model=digest(lied.record.folder)))
