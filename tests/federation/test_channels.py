"""Channels of the form of the model: SCAFFOLD's control variates at sites that annotate different classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rounds import reply_of
from strangers.scaffold import Scaffold
from suture.core.errors import ConfigError, RejectedUpdate
from suture.federation.loop import Loop
from suture.federation.server.global_model import read_model
from suture.federation.server.norms import Measure
from suture.federation.server.record import what_leaves
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel, hyperparameters, layout_of
from suture.models.classifier import Layout
from suture.privacy.differential_privacy import Noise
from suture.protocol.check import check_reply
from suture.protocol.egress import CLASSES, SCALE_OF_MODEL, Channel, Egress, strip_prefix
from suture.protocol.messages import Abstain, TaskData, Update, ones
from suture.protocol.packing import Packed, pack, unpack
from suture_synthetic.method_checks import aggregation_returns_the_channels, subject_of

LOCAL = LocalTraining(lr=0.05, batch_size=8, optimiser="sgd", momentum=0.0)
METHOD = Scaffold(local=LOCAL)
TWO = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")


@hyperparameters
class Bounded(Scaffold):
    """Declares that the change is of the scale of the model."""

    def egress(self, layout: Layout) -> Egress:
        egress = super().egress(layout)
        *others, change = egress.channels
        return replace(egress, channels=(*others, replace(change, range=SCALE_OF_MODEL)))


def begun(server: Server, loop: Loop) -> Server:
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    return server


def tasks(server: Server) -> dict[str, TaskData]:
    return {name: payload_of(packed) for name, packed in server.assign().items()}


def payload_of(packed: Packed) -> TaskData:
    message = unpack(packed)
    assert isinstance(message, TaskData)
    return message


@pytest.fixture
def small(tiny: Any) -> Any:
    """SCAFFOLD at three sites after round 1: server, sites, and their tasks of round 2."""
    federation = tiny(METHOD, rounds=2)
    loop = Loop(federation.sites())
    server = begun(federation.server(), loop)
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    return server, loop._sites, tasks(server)


def test_a_site_is_sent_every_tensor_and_the_rows_that_it_may_see(small: Any) -> None:
    server, sites, payloads = small
    control = strip_prefix("control", server.model.channels)
    assert control.keys() == server.model.trained.keys()
    assert not control.keys() & server.model.buffers
    assert all(bool(tensor.any()) for tensor in control.values())
    for name, payload in payloads.items():
        assert payload.labels == tuple(sorted(sites[name].trainer.data[0].names))
        where = server.model.where(payload.labels)
        for key, tensor in strip_prefix("control", payload.channels).items():
            expected = control[key][where] if key in server.model.head else control[key]
            assert torch.equal(tensor, expected), key


def test_what_leaves_is_on_the_page_of_the_run(small: Any) -> None:
    server, *_ = small
    listed = {r["field"]: r for r in what_leaves(server.plan, layout_of(server.model, METHOD))}
    assert listed["change"]["shape"] == "a tensor for each of the model that is trained"
    assert "mean gradient" in listed["change"]["why"]
    assert not listed.keys() & {"control", "own_control"}


@pytest.mark.complete
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda c: {k: t for k, t in c.items() if k != "change/head.bias"},
            "channels/change/head.bias is miss",
        ),
        (
            lambda c: {**c, "change/head.bias": torch.zeros(4)},
            r"head.bias has shape \(4,\) instead of \(2,\)",
        ),
        (
            lambda c: {**c, "change/backbone.norm1.running_mean": torch.zeros(8)},
            "running_mean was not declared",
        ),
        (lambda c: {**c, "control/head.bias": torch.zeros(2)}, "channels/control/head.bias was not declared"),
        (lambda c: {k: t.double() for k, t in c.items()}, "is torch.float64 instead of torch.float32"),
        (lambda c: {k: t.fill_(torch.nan) for k, t in c.items()}, "is not finite"),
        (lambda c: {k: t + 1e30 for k, t in c.items()}, r"has numbers outside \[-1e\+09, 1e\+09\]"),
    ],
)
def test_both_sides_refuse_another_form(change: Callable[[Any], Any], why: str, small: Any) -> None:
    server, sites, payloads = small
    site, task = sites["alpha"], payloads["alpha"]
    update = reply_of(site, task)
    assert isinstance(update, Update)
    lie = replace(update, channels=change({k: t.clone() for k, t in update.channels.items()}))
    for expected in (site.answer(task).allowed, server.collector._allowed["alpha"]):
        check_reply(update, expected)
        with pytest.raises(RejectedUpdate, match=why):
            check_reply(lie, expected)


def test_a_site_with_noise_refuses_what_noise_does_not_cover(tiny: Any) -> None:
    path = tiny(METHOD).configs["alpha"].data.table.parent / "suture.toml"
    path.write_text(path.read_text() + "clip = 1.0\nnoise = 0.5\n")
    site = tiny(METHOD).sites()["alpha"]
    for task in (TaskData("handshake"), TaskData("train", 1)):
        answer = reply_of(site, task)
        assert isinstance(answer, Abstain)
        assert answer.reason == "configuration"
    log = (site.folder / "errors.jsonl").read_text()
    assert "clip and noise do not cover change, which SCAFFOLD sends besides weights" in log
    update = Update(1, (), {}, {}, ones(()), channels={"change/w": torch.ones(2)})
    with pytest.raises(ConfigError, match="clip does not cover change/w"):
        Noise(1.0, 0.5).apply(update, TaskData("train", 1))


def test_half_precision_leaves_channels_as_they_are(tiny: Any) -> None:
    made = tiny(METHOD, rounds=2)
    made.plan = replace(made.plan, transport="float16")
    sites = made.sites()
    server = begun(Server(made.plan, made.schedule, made.folder / "half", None), Loop(sites))
    for task in tasks(server).values():
        assert {str(t.dtype) for t in task.shared.values()} == {"torch.float16"}
        assert {str(t.dtype) for t in task.channels.values()} == {"torch.float32"}
    answer = reply_of(sites["alpha"], tasks(server)["alpha"])
    assert isinstance(answer, Update)
    assert {str(t.dtype) for t in answer.shared.values()} == {"torch.float16"}
    assert {str(t.dtype) for t in answer.channels.values()} == {"torch.float32"}


@pytest.mark.complete
def test_a_class_that_joins_begins_with_zeros_at_server_and_site(tiny: Any) -> None:
    before = tiny(METHOD, TWO, rounds=1).run().model
    federation = tiny(METHOD, {**TWO, "gamma": ("Nodule", "Fibrosis")}, rounds=2)
    loop = Loop(federation.sites())
    server = begun(federation.server(), loop)
    assert (before.labels, server.model.labels) == (EVERY[1:], EVERY)
    for name, tensor in strip_prefix("control", server.model.channels).items():
        held = strip_prefix("control", before.channels)[name]
        rows = name in server.model.head
        assert torch.equal(tensor[1:] if rows else tensor, held)
        assert not (rows and tensor[0].any())
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    assert server.round == 2


@pytest.mark.complete
def test_a_continued_federation_equals_a_whole_one(tiny: Any) -> None:
    tiny(METHOD, rounds=2).run()
    server, whole = (tiny(METHOD, rounds=4).run(out) for out in ("run", "whole"))
    for group in ("shared", "head", "channels"):
        for name, tensor in getattr(whole.model, group).items():
            assert torch.equal(getattr(server.model, group)[name], tensor), name
    stored = read_model(server.states.newest()[1], server.plan, "")  # type: ignore[index]
    assert stored.buffers == server.model.buffers
    assert stored.trained.keys() == server.model.trained.keys()


def test_a_channel_of_one_scale_is_bounded_as_a_whole(small: Any) -> None:
    server, sites, payloads = small
    update = reply_of(sites["alpha"], payloads["alpha"])
    layout = layout_of(server.model, METHOD)
    norms = Measure()(update, payloads["alpha"], Bounded(local=LOCAL).egress(layout))
    total = torch.cat([t.flatten() for t in update.channels.values()]).norm()
    assert norms.channels == {"change": pytest.approx(float(total), rel=1e-5)}
    assert Measure()(update, payloads["alpha"], METHOD.egress(layout)).channels == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: type(c)(), r"'control/\S+' is missing instead of \("),
        (lambda c: {**c, "more": torch.zeros(1)}, "'more' is not declared"),
        (lambda c: {k: t[:1] for k, t in c.items()}, r"'control/\S+' is \(1.* instead of \("),
    ],
)
def test_the_server_keeps_what_is_declared(
    change: Callable[[Any], Any], why: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = Scaffold.aggregate

    def careless(self: Scaffold, *given: Any) -> GlobalModel:
        model = aggregate(self, *given)
        return replace(model, channels=change(dict(model.channels)))

    monkeypatch.setattr(Scaffold, "aggregate", careless)
    with pytest.raises(ConfigError, match=f"SCAFFOLD aggregates to a model whose channel {why}"):
        tiny(METHOD, rounds=1).run()
    with pytest.raises(AssertionError, match=why):
        aggregation_returns_the_channels(subject_of(METHOD))


def test_a_channel_says_what_it_is() -> None:
    like = Layout({"w": ((3,), "torch.float64")}, {"head.bias": ((), "torch.float32")})
    rows, model = Channel("f1", "up", (CLASSES, 2)), Channel("age", "up", (7,))
    variate = Channel("c", "up", like)
    assert [c.of_classes for c in (rows, model, variate)] == [True, False, False]
    assert rows.forms == {"f1": ((CLASSES, 2), "torch.float32")}
    assert variate.forms == {
        "c/w": ((3,), "torch.float64"),
        "c/head.bias": ((CLASSES,), "torch.float32"),
    }
    tensors: dict[str, Tensor] = {"c/w": torch.ones(1), "cc/w": torch.ones(2), "c": torch.ones(3)}
    assert strip_prefix("c", tensors).keys() == {"w"}


def test_messages_take_no_other_names() -> None:
    for name in ("a/b/c", "/a", "a/", "ä"):
        packed = pack(TaskData("train", 1, channels={"a/b": torch.ones(1)}))
        with pytest.raises(RejectedUpdate):
            unpack(replace(packed, tensors={f"channels/{name}": torch.ones(1)}))
