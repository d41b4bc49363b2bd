"""What one site, or a diverging step, can destroy: its own part, and never a committed model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import METHOD, Change, events, exported, history, run, says, task_in
from safetensors.torch import load_file
from torch import Tensor

from between import Between
from noted import noted
from rounds import conformant
from suture.core.errors import FederationError
from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server import results
from suture.federation.server.norms import untrainable
from suture.federation.server.server import Server
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import Channel
from suture.protocol.messages import Abstain, Evaluation, Reply, SiteInfo, TaskData, TaskName, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_papers.metafl.inner_loop import ServerStep
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
    "a billion and one images": (Update, with_metrics(n=10**9 + 1)),
    "an AUROC of 2": (Update, of_mass(auroc=2.0)),
    "a negative count": (Update, of_mass(positives=-1)),
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


@pytest.mark.complete
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


class Dead(Exception):
    """The process was killed."""


def poison(site: str, task: TaskData, answer: Packed) -> Packed:
    """From round 2 on, alpha sends the largest floats."""
    update = unpack(answer)
    if site != "alpha" or not isinstance(update, Update) or task.round < 2:
        return answer
    return pack(replace(update, shared={k: torch.full_like(t, 3e38) for k, t in update.shared.items()}))


def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
    """From round 2 on, alpha's updates are lost."""
    return None if site == "alpha" and task.task == "train" and task.round >= 2 else answer


def tolerant(tiny: Any, **schedule: Any) -> Any:
    """A federation that bounds no update."""
    return tiny(METHOD, **{"min_sites": 2, "rounds": 4, "max_update": None, **schedule})


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["last", "site_loss"])
def test_a_diverged_model_is_taken_back_and_its_site_excluded(selection: str, tiny: Any) -> None:
    federation = tolerant(tiny, selection=selection)
    server = run(federation, "poisoned", poison)
    assert server.record.run["status"] == "finished"
    statuses = sorted((line["round"], line["status"]) for line in history(server))
    done = [(1, "committed"), (2, "committed"), (3, "committed"), (4, "committed")]
    assert statuses == sorted([*done, (2, "unchanged"), (3, "unchanged")])
    undone = next(line for line in history(server) if (line["round"], line["status"]) == (2, "unchanged"))
    assert "round 2" in undone["sites"]["alpha"]["reason"]
    assert any("alpha left this experiment" in note for note in noted(server))
    assert events(server, "rolled_back")
    write_report(server.record.folder)
    if selection == "last":  # by losses, alpha's own would count
        assert exported(server) == exported(run(federation, "lost", lose))


@pytest.mark.complete
def test_a_run_that_dies_after_the_step_back_ends_with_the_same_model(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tolerant(tiny, selection="last")
    whole, step_back = run(federation, "whole", poison), Rounds.step_back
    for out in ("before", "after"):

        def die(states: Rounds, *args: Any, out: str = out) -> None:
            if out == "after":
                step_back(states, *args)
            raise Dead

        with monkeypatch.context() as patch:
            patch.setattr(Rounds, "step_back", die)
            with pytest.raises(Dead):
                run(federation, out, poison)
        again = run(federation, out, poison)
        assert exported(again) == exported(whole)
        assert [line["round"] for line in history(again) if line["status"] == "committed"] == [1, 2, 3, 4]


def test_where_every_site_is_needed_the_run_stops_with_the_model_before(tiny: Any) -> None:
    federation = tolerant(tiny, min_sites=None)
    with refused("alpha", "round 1", by=FederationError):
        run(federation, change=poison)
    assert federation.server().states.newest()[0] == 1


def diverged() -> Packed:
    return pack(Abstain("non_finite_loss", "NonFiniteLoss"))


def claims_alone(site: str, task: TaskData, answer: Packed) -> Packed:
    """alpha says that the model cannot be trained; the others train."""
    return diverged() if (site, task.task, task.round) == ("alpha", "train", 2) else answer


def claim_of_two(site: str, task: TaskData, answer: Packed) -> Packed:
    """Two send next to nothing, so that alpha's update is the largest, and say that the model diverged."""
    update = unpack(answer)
    if site == "alpha" or not isinstance(update, Update):
        return answer
    if task.round >= 2:
        return diverged()
    return pack(replace(update, shared={k: t * 1.0001 for k, t in task.shared.items()}))


def claim_of_its_makers(site: str, task: TaskData, answer: Packed) -> Packed | None:
    """Two sites made the model of round 2 alone, and say in round 3 that it has diverged."""
    if task.task != "train" or task.round == 1:
        return answer
    if task.round == 2:
        return None if site == "gamma" else answer
    return answer if site == "gamma" else diverged()


@pytest.mark.complete
@pytest.mark.parametrize(
    ("change", "sites", "rounds"), [(claims_alone, 2, 2), (claim_of_two, 2, 1), (claim_of_its_makers, 1, 3)]
)
def test_claims_exclude_nobody(change: Change, sites: int, rounds: int, tiny: Any) -> None:
    federation = tiny(METHOD, min_sites=sites, rounds=3, selection="last", max_failed_rounds=2)
    server = federation.server()
    if change is claim_of_two:
        with refused("beta: non_finite_loss", by=FederationError):
            federate(server, Between(federation.sites(), change))
    else:
        federate(server, Between(federation.sites(), change))
    assert not events(server, "rolled_back")
    assert not server.state.excluded
    assert server.round >= rounds


def test_who_has_destroyed_a_model_by_hand() -> None:
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"b", "c"}) == "a"
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"a", "b", "c", "d"}) == "a"
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"a", "b"}) is None
    assert untrainable({"a": 9.0, "b": 1.0}, {"b"}) is None
    assert untrainable({"a": 9.0, "b": 1.0}, {"a", "b"}) == "a"
    assert untrainable({}, {"a"}) is untrainable({"a": 9.0}, {"a"}) is None


@pytest.mark.parametrize("rate", [1e30, 1e39])
def test_a_step_of_the_server_that_diverges_is_blamed_on_no_site(rate: float, tiny: Any) -> None:
    """On its model no site can train, or it overflows."""
    method = replace(conformant("metafl"), server=ServerStep("sgd", rate))
    federation = tiny(method, min_sites=2, rounds=4, selection="last", max_failed_rounds=5)
    server = federation.server()
    with refused("MetaFL", f"method.server.lr (now {rate:g})", by=FederationError):
        federate(server, Loop(federation.sites()))
    assert server.states.newest()[0] == server.round == 0
    assert not server.state.excluded
    assert all(tensor.isfinite().all() for tensor in server.model.shared.values())


@pytest.mark.parametrize("group", ["shared", "head", "channels"])
def test_a_number_of_the_next_model_that_is_not_finite_is_named(
    group: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate, egress = SurgicalAggregation.aggregate, SurgicalAggregation.egress
    if group == "channels":
        declared = (Channel("x", "server", (1,)),)
        monkeypatch.setattr(
            SurgicalAggregation, "egress", lambda *args: replace(egress(*args), channels=declared)
        )

    def broken(self: SurgicalAggregation, previous: GlobalModel, *args: Any) -> GlobalModel:
        found = aggregate(self, previous, *args)
        return replace(found, **{group: {**getattr(found, group), "x": torch.tensor([float("nan")])}})

    monkeypatch.setattr(SurgicalAggregation, "aggregate", broken)
    federation = tiny(METHOD)
    with refused(f"{group}/x", "round 1", by=FederationError):
        federation.run()
    assert federation.server().states.newest()[0] == 0


def test_a_learning_rate_that_diverges_at_every_site_is_blamed_on_none(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=3e9, batch_size=8))
    federation = tiny(method, rounds=4, selection="last")
    server = federation.server()
    with refused(by=FederationError):
        federate(server, Loop(federation.sites()))
    assert not server.state.excluded
