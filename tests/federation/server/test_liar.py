"""One site that lies costs its own part: the run ends, its report can be read, the model is the others'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    events,
    exported,
    history,
    run,
    says,
    task_in,
)
from safetensors.torch import load_file
from torch import Tensor

from between import Between
from suture.core.errors import FederationError
from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server import results
from suture.federation.server.server import Server
from suture.protocol.messages import Evaluation, Reply, SiteInfo, TaskData, TaskName, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_results.notes import read_sentences
from suture_results.report import write_report
from suture_results.report_command import show_run
from world import refused


def with_fields(**fields: Any) -> Callable[[Any], Packed]:
    """A packed reply with fields that no honest site can make."""

    def change(reply: Reply) -> Packed:
        packed = pack(reply)
        return Packed(packed.tensors, {**packed.header, **fields})

    return change


def with_metrics(**fields: Any) -> Callable[[Any], Packed]:
    return lambda reply: with_fields(metrics={**pack(reply).header["metrics"], **fields})(reply)


def of_mass(**changed: Any) -> Callable[[Any], Packed]:
    plain = {"auroc": 0.5, "low": None, "high": None, "positives": 3, "negatives": 3, "recall": None}
    return with_metrics(classes={"Mass": {**plain, **changed}})


def of_tensors(change: Callable[[str, Tensor], Tensor]) -> Callable[[Update], Packed]:
    return lambda u: pack(replace(u, shared={k: change(k, t) for k, t in u.shared.items()}))


def negative(name: str, tensor: Tensor) -> Tensor:
    """No site could train on the mean of variances, and the others would be blamed for it."""
    return tensor - 8 if name.endswith("running_var") else tensor


LIES: dict[str, tuple[type[Any], Callable[[Any], Packed]]] = {
    "clip without noise": (SiteInfo, with_fields(protection={"clip": 1.0})),
    "noise of 1e-300": (SiteInfo, with_fields(protection={"clip": 1.0, "noise": 1e-300, "delta": 1e-5})),
    "delta of 2": (SiteInfo, with_fields(protection={"clip": 1.0, "noise": 1.0, "delta": 2.0})),
    "clip of 1e308": (SiteInfo, with_fields(protection={"clip": 1e308, "noise": 1.0, "delta": 1e-5})),
    "a million threads": (SiteInfo, with_fields(threads=10**6)),
    "4 MiB of type": (SiteInfo, with_fields(type="\x1b[2K" * 10**6)),
    "nan": (Update, of_tensors(lambda _, t: torch.full_like(t, float("nan")))),
    "another shape": (Update, of_tensors(lambda _, t: t[..., None])),
    "a negative variance": (Update, of_tensors(negative)),
    "a weight of 100": (Update, lambda u: pack(replace(u, weight=100.0))),
    "a foreign label": (Update, lambda u: pack(replace(u, labels=("Hernia", *u.labels[1:])))),
    "another round": (Update, lambda u: pack(replace(u, round=99))),
    "an extra field": (Update, with_fields(patients=["p1"])),
    "an extra tensor": (
        Update,
        lambda u: Packed({**pack(u).tensors, "shared/x": torch.ones(1)}, pack(u).header),
    ),
    "no answer at all": (Update, lambda _: Packed({}, {"type": "handshake"})),
    "a training loss of -1.7e308": (Update, with_fields(train_loss=-1.7e308)),
    "a validation loss of 1.7e308": (Update, with_metrics(loss=1.7e308)),
    "a billion and one images": (Update, with_metrics(n=10**9 + 1)),
    "an AUROC of 2": (Update, of_mass(auroc=2.0)),
    "a negative count": (Update, of_mass(positives=-1)),
    "a count of 2e9": (Update, of_mass(positives=2 * 10**9)),
    "a recall of -1": (Update, of_mass(recall=-1.0)),
    "an accuracy of 1e300": (Update, with_metrics(overall={"accuracy": 1e300})),
    # These are in their range, but the sum over the sites is in none that one site may send.
    "a test loss of 1.7e308": (Evaluation, with_metrics(loss=1.7e308)),
    "a billion test images": (Evaluation, with_metrics(n=10**9)),
    "a billion positives": (Evaluation, of_mass(positives=10**9)),
}
WITHOUT: dict[type[Any], bytes] = {}
"""The model where alpha's answers of a kind are lost; every test has the same data."""


@pytest.mark.complete
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_the_site_its_answer_alone(lie: str, tiny: Any) -> None:
    """The model is the one without that answer, byte by byte, and the report can be made."""
    kind, change = LIES[lie]
    federation = tiny(METHOD, min_sites=2, **({"selection": "last"} if kind is Evaluation else {}))
    if kind not in WITHOUT:
        lost = run(federation, "lost", says("alpha", kind, None))
        WITHOUT[kind] = exported(lost)
        if kind is Update:
            assert history(lost)[0]["sites"]["alpha"]["status"] == "missing"
    server = run(federation, "lied", says("alpha", kind, change))
    assert server.record.run["status"] == "finished"
    write_report(server.record.folder)
    assert exported(server) == WITHOUT[kind]
    assert (server.record.folder / "metrics.json").exists()
    reasons = []
    if kind is SiteInfo:
        assert sorted(server.registry.members) == ["beta", "gamma"]
        reasons = [events(server, "begin")[0]["refused"]["alpha"]]
    if kind is Update:
        said = [line["sites"]["alpha"] for line in history(server)]
        assert {one["status"] for one in said} == {"rejected"}
        reasons = [one["reason"] for one in said]
    assert all(0 < len(reason) <= 500 and reason.isprintable() for reason in reasons)


@pytest.mark.complete
def test_losses_at_the_edge_of_their_range_have_a_mean(tiny: Any) -> None:
    def most(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        return with_metrics(loss=1e9)(reply) if isinstance(reply, Update) and reply.metrics else answer

    server = run(tiny(METHOD), change=most)
    write_report(server.record.folder)
    assert history(server)[0]["validation"]["loss"] == 1e9


@pytest.mark.complete
@pytest.mark.parametrize(("refused_in", "marked"), [((1, 2), False), ((1, 2, 3), True)])
def test_a_site_that_was_rejected_in_most_rounds_marks_the_run(
    refused_in: tuple[int, ...], marked: bool, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(update: Update) -> Packed:
        return pack(replace(update, weight=-1.0 if update.round in refused_in else update.weight))

    server = run(tiny(METHOD, min_sites=2, rounds=4), change=says("alpha", Update, lie))
    write_report(server.record.folder)
    said = [text for text in read_sentences(server.record.folder).left_out if "alpha" in text]
    assert [f"{len(refused_in)} of its 4 rounds" in text for text in said] == [True] * marked
    show_run(server.record.folder)
    page = (server.record.folder / "report.html").read_text()
    for text in (" ".join(capsys.readouterr().out.split()), page[: page.index("<h2")]):
        assert ("updates of alpha were rejected in" in text) == marked


@pytest.mark.complete
def test_identity_comes_from_the_transport(tiny: Any) -> None:
    """An answer of a site that was not asked, or a second one, changes nothing."""
    federation = tiny(METHOD)
    server, sites = federation.server(), federation.sites()

    class Twice(Loop):
        def exchange(
            self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver
        ) -> dict[str, str]:
            super().exchange(task, payloads, receive)
            receive("stranger", sites["alpha"].answer(task_in(payloads["alpha"])).packed)
            receive("alpha", Packed({}, {"type": "handshake"}))
            return {}

    federate(server, Twice(sites))
    assert exported(server) == exported(federation.run("plain"))


# A run that ends with an error


def failed_run(folder: Path) -> None:
    """A run that failed after its last round has left its model and figures."""
    write_report(folder)
    assert (folder / "model" / "model.safetensors").exists()
    assert json.loads((folder / "metrics.json").read_text())["selected_round"] == 2
    made = json.loads((folder / "run.json").read_text())
    assert made["status"] == "running"  # until the caller has recorded the error that it gets
    assert made["selected_round"] == 2


@pytest.mark.parametrize("step", ["validation", "test", "results"])
def test_what_fails_after_the_last_round_leaves_model_metrics_and_the_error(
    step: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("noise")

    names = {"validation": (Server, "close_validation"), "test": (Server, "close_test")}
    monkeypatch.setattr(*names.get(step, (results, "mean_over_sites")), fail)
    federation = tiny(METHOD, selection="last")
    server = federation.server()
    with pytest.raises(KeyError, match="noise"):
        federate(server, Between(federation.sites(), lambda *answered: answered[2]))
    failed_run(server.record.folder)


@pytest.mark.complete
def test_a_run_without_any_validation_loss_keeps_its_last_model(tiny: Any) -> None:
    def without(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if isinstance(reply, (Update, Evaluation)) and reply.metrics:
            return pack(replace(reply, metrics=replace(reply.metrics, loss=None)))
        return answer

    federation = tiny(METHOD)
    server = federation.server()
    with refused("selection", by=FederationError):
        federate(server, Between(federation.sites(), without))
    failed_run(server.record.folder)
    stored = load_file(server.record.folder / "model" / "model.safetensors")
    state = load(server.states.path(2)).tensors
    assert all(torch.equal(stored[name.partition("/")[2]], tensor) for name, tensor in state.items())
