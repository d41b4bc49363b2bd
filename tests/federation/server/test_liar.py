"""One site that lies costs its own part: the run ends, its report can be read, the model is the others'."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from between import Between
from suture.core.errors import FederationError
from suture.federation.loop import federate
from suture.federation.server import results
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Evaluation, Reply, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_results.notes import read_sentences
from suture_results.report import write_report
from suture_results.report_command import show_run

pytestmark = pytest.mark.complete


METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))

Change = Callable[[Any], Packed]


def with_fields(reply: Reply, **fields: Any) -> Packed:
    """The packed reply with fields that no honest site can make."""
    packed = pack(reply)
    return Packed(packed.tensors, {**packed.header, **fields})


def with_metrics(reply: Any, **fields: Any) -> Packed:
    """The packed reply with changed metrics."""
    packed = pack(reply)
    return Packed(packed.tensors, {**packed.header, "metrics": {**packed.header["metrics"], **fields}})


def lied(tiny: Any, out: str, kind: type[Reply], change: Change | None, **schedule: Any) -> Server:
    """A federation in which alpha changes every answer of one kind, or loses it; its report is written."""
    federation = tiny(METHOD, **{"min_sites": 2, **schedule})

    def lie(site: str, task: TaskData, answer: Packed) -> Packed | None:
        reply = unpack(answer)
        if site != "alpha" or not isinstance(reply, kind):
            return answer
        return change(reply) if change else None

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lie))
    assert server.record.run["status"] == "finished"
    write_report(server.record.folder)
    return server


WITHOUT: dict[type[Reply], bytes] = {}


def without(tiny: Any, kind: type[Reply], **schedule: Any) -> bytes:
    """The model where alpha's answers of a kind are lost; every test has the same data."""
    if kind not in WITHOUT:
        WITHOUT[kind] = model(lied(tiny, "lost", kind, None, **schedule))
    return WITHOUT[kind]


def model(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]


INFOS: dict[str, Change] = {
    "clip without noise": lambda info: with_fields(info, protection={"clip": 1.0}),
    "noise of 1e-300": lambda i: with_fields(i, protection={"clip": 1.0, "noise": 1e-300, "delta": 1e-5}),
    "delta of 2": lambda i: with_fields(i, protection={"clip": 1.0, "noise": 1.0, "delta": 2.0}),
    "clip of 1e308": lambda i: with_fields(i, protection={"clip": 1e308, "noise": 1.0, "delta": 1e-5}),
    "a million threads": lambda i: with_fields(i, threads=10**6),
    "4 MiB of type": lambda i: with_fields(i, type="\x1b[2K" * 10**6),
}


@pytest.mark.parametrize("kind", INFOS)
def test_a_site_info_out_of_range_costs_the_site_its_place(kind: str, tiny: Any) -> None:
    server = lied(tiny, "lied", SiteInfo, INFOS[kind])
    assert sorted(server.registry.members) == ["beta", "gamma"]
    assert model(server) == without(tiny, SiteInfo)
    begun = next(e for e in events(server) if e["event"] == "begin")
    assert 0 < len(begun["refused"]["alpha"]) <= 500
    assert begun["refused"]["alpha"].isprintable()


def events(server: Server) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "events.jsonl").read_text().splitlines()]


UPDATES: dict[str, Change] = {
    "a training loss of -1.8e308": lambda u: with_fields(u, train_loss=-1.7976931348623157e308),
    "a training loss of -1.7e308": lambda u: with_fields(u, train_loss=-1.7e308),
    "a validation loss of 1.7e308": lambda u: with_metrics(u, loss=1.7e308),
    "a billion and one images": lambda u: with_metrics(u, n=10**9 + 1),
    "an AUROC of 2": lambda u: with_metrics(u, classes={"Mass": score(auroc=2.0)}),
    "a negative count": lambda u: with_metrics(u, classes={"Mass": score(positives=-1)}),
    "a count of 2e9": lambda u: with_metrics(u, classes={"Mass": score(positives=2 * 10**9)}),
    "a recall of -1": lambda u: with_metrics(u, classes={"Mass": score(recall=-1.0)}),
    "an accuracy of 1e300": lambda u: with_metrics(u, overall={"accuracy": 1e300}),
}


def score(**changed: Any) -> dict[str, Any]:
    return {
        "auroc": 0.5,
        "low": None,
        "high": None,
        "positives": 3,
        "negatives": 3,
        "recall": None,
        **changed,
    }


@pytest.mark.parametrize("kind", UPDATES)
def test_a_number_out_of_range_costs_the_update(kind: str, tiny: Any) -> None:
    server = lied(tiny, "lied", Update, UPDATES[kind])
    assert model(server) == without(tiny, Update)
    for line in lines(server):
        assert line["sites"]["alpha"]["status"] == "rejected"
        assert line["sites"]["alpha"]["reason"].isprintable()


def test_a_negative_variance_costs_the_update(tiny: Any) -> None:
    """No site could train on its mean, and the others would be blamed for it."""

    def negative(update: Update) -> Packed:
        variances = {k: t.clone() for k, t in update.shared.items() if k.endswith("running_var")}
        assert variances
        for tensor in variances.values():
            tensor[0] = -8
        return pack(replace(update, shared=update.shared | variances))

    server = lied(tiny, "lied", Update, negative)
    assert model(server) == without(tiny, Update)
    assert all("negative variance" in line["sites"]["alpha"]["reason"] for line in lines(server))


EVALUATIONS: dict[str, Change] = {
    "a loss of 1.7e308": lambda e: with_metrics(e, loss=1.7e308),
    "a billion images": lambda e: with_metrics(e, n=10**9),
    "a billion positives": lambda e: with_metrics(e, classes={"Mass": score(positives=10**9)}),
}


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_a_lie_about_the_test_data_costs_no_report(kind: str, tiny: Any) -> None:
    """The counts are in their range, but their sum over the sites is in none that one site may send."""
    server = lied(tiny, "lied", Evaluation, EVALUATIONS[kind], selection="last")
    assert model(server) == without(tiny, Evaluation, selection="last")
    assert (server.record.folder / "metrics.json").exists()


def test_losses_at_the_edge_of_their_range_have_a_mean(tiny: Any) -> None:
    federation = tiny(METHOD)

    def most(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        return with_metrics(reply, loss=1e9) if isinstance(reply, Update) and reply.metrics else answer

    server = federation.server()
    federate(server, Between(federation.sites(), most))
    write_report(server.record.folder)
    assert lines(server)[0]["validation"]["loss"] == 1e9


def failed_run(folder: Path) -> dict[str, Any]:
    """What a run that failed after its last round has left."""
    write_report(folder)
    assert (folder / "model" / "model.safetensors").exists()
    assert json.loads((folder / "metrics.json").read_text())["selected_round"] == 2
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "running"  # until the caller has recorded the error that it gets
    assert run["selected_round"] == 2
    return run


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


def test_a_run_without_any_validation_loss_keeps_its_last_model(tiny: Any) -> None:
    federation = tiny(METHOD)

    def without(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if isinstance(reply, (Update, Evaluation)) and reply.metrics:
            return pack(replace(reply, metrics=replace(reply.metrics, loss=None)))
        return answer

    server = federation.server()
    with pytest.raises(FederationError, match="no validation loss"):
        federate(server, Between(federation.sites(), without))
    failed_run(server.record.folder)
    exported = load_file(server.record.folder / "model" / "model.safetensors")
    state = load(server.states.path(2)).tensors
    assert all(torch.equal(exported[name.partition("/")[2]], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("refused", "marked"), [((1, 2), False), ((1, 2, 3), True), ((1, 2, 3, 4), True)])
def test_a_site_that_was_rejected_in_most_rounds_marks_the_run(
    refused: tuple[int, ...], marked: bool, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(update: Update) -> Packed:
        weight = -1.0 if update.round in refused else update.weight
        return pack(replace(update, weight=weight))

    server = lied(tiny, "marked", Update, lie, rounds=4)
    said = [line for line in read_sentences(Path(server.record.folder)).left_out if "rejected" in line]
    assert bool(said) == marked
    show_run(server.record.folder)
    printed = " ".join(capsys.readouterr().out.split())
    page = (server.record.folder / "report.html").read_text()
    top = page[: page.index("<h2")]
    if marked:
        assert said[0].startswith(f"The updates of alpha were rejected in {len(refused)} of its 4 rounds")
        assert "updates of alpha were rejected in" in printed
    assert ("updates of alpha were rejected in" in top) == marked
