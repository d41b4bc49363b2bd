"""A committed model on which no site can train is taken back, without the site that has destroyed it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from between import Between
from noted import noted
from rounds import conformant
from suture.core.errors import FederationError
from suture.federation.loop import Loop, federate
from suture.federation.server.norms import untrainable
from suture.federation.server.server import Server
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import Channel
from suture.protocol.messages import Abstain, TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.metafl.inner_loop import ServerStep
from suture_results.report import write_report


class Dead(Exception):
    """The process was killed."""


METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


def poison(site: str, task: TaskData, answer: Packed) -> Packed:
    """From round 2 on, alpha sends the largest floats."""
    update = unpack(answer)
    if site != "alpha" or not isinstance(update, Update) or task.round < 2:
        return answer
    return pack(replace(update, shared={k: torch.full_like(t, 3e38) for k, t in update.shared.items()}))


def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
    """From round 2 on, alpha's updates are lost."""
    return None if site == "alpha" and task.task == "train" and task.round >= 2 else answer


def run(tiny: Any, out: str, change: Any, **schedule: Any) -> Server:
    federation = tiny(METHOD, **{"min_sites": 2, "rounds": 4, "max_update": None, **schedule})
    server = federation.server(out)
    federate(server, Between(federation.sites(out), change))
    return server


def model(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["last", "site_loss"])
def test_a_diverged_model_is_taken_back_and_its_site_excluded(selection: str, tiny: Any) -> None:
    server = run(tiny, "poisoned", poison, selection=selection)
    assert server.record.run["status"] == "finished"
    history = [(line["round"], line["status"]) for line in lines(server)]
    done = [(1, "committed"), (2, "committed"), (3, "committed"), (4, "committed")]
    assert sorted(history) == sorted([*done, (2, "unchanged"), (3, "unchanged")])
    undone = next(line for line in lines(server) if line["round"] == 2 and line["status"] == "unchanged")
    assert "its update of round 2 was the largest" in undone["sites"]["alpha"]["reason"]
    assert any("alpha left this experiment" in note for note in noted(server))
    assert "rolled_back" in (server.record.folder / "events.jsonl").read_text()
    write_report(server.record.folder)
    if selection == "last":  # by losses, alpha's own would count
        assert model(server) == model(run(tiny, "lost", lose, selection=selection))


@pytest.mark.complete
def test_a_run_that_dies_after_the_step_back_ends_with_the_same_model(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny, "whole", poison, selection="last")
    for out in ("before", "after"):
        federation = tiny(METHOD, min_sites=2, rounds=4, max_update=None, selection="last")
        server = federation.server(out)
        step_back = Rounds.step_back

        def die(states: Rounds, *args: Any, out: str = out, step_back: Any = step_back) -> None:
            if out == "after":
                step_back(states, *args)
            raise Dead

        monkeypatch.setattr(Rounds, "step_back", die)
        with pytest.raises(Dead):
            federate(server, Between(federation.sites(out), poison))
        monkeypatch.setattr(Rounds, "step_back", step_back)
        again = federation.server(out)
        federate(again, Between(federation.sites(out), poison))
        assert model(again) == model(whole)
        assert [line["round"] for line in lines(again) if line["status"] == "committed"] == [1, 2, 3, 4]


def test_where_every_site_is_needed_the_run_stops_with_the_model_before(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=4, max_update=None)
    server = federation.server()
    with pytest.raises(FederationError, match=r"alpha: excluded: .*The model of round 1 is kept"):
        federate(server, Between(federation.sites(), poison))
    assert server.round == 1
    assert server.states.newest()[0] == 1  # type: ignore[index]


@pytest.mark.complete
def test_a_site_cannot_have_another_excluded(tiny: Any) -> None:
    """It claims that the model cannot be trained; the others train, or there are too few to tell."""

    def claim(site: str, task: TaskData, answer: Packed) -> Packed:
        refused = site == "alpha" and task.task == "train" and task.round == 2
        return pack(Abstain("non_finite_loss", "NonFiniteLoss")) if refused else answer

    server = run(tiny, "claimed", claim, rounds=2)
    assert "rolled_back" not in (server.record.folder / "events.jsonl").read_text()


def test_who_has_destroyed_a_model_by_hand() -> None:
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"b", "c"}) == "a"
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"a", "b", "c", "d"}) == "a"
    assert untrainable({"a": 9.0, "b": 1.0, "c": 2.0}, {"a", "b"}) is None
    assert untrainable({"a": 9.0, "b": 1.0}, {"b"}) is None
    assert untrainable({"a": 9.0, "b": 1.0}, {"a", "b"}) == "a"
    assert untrainable({}, {"a"}) is None


@pytest.mark.parametrize(
    ("rate", "why"),
    [(1e30, "can train on the model of round 1"), (1e39, "overflow")],
)
def test_a_step_of_the_server_that_diverges_is_blamed_on_no_site(rate: float, why: str, tiny: Any) -> None:
    method: Any = conformant("metafl")
    method = replace(method, server=ServerStep("sgd", rate))
    federation = tiny(method, min_sites=2, rounds=4, selection="last", max_failed_rounds=5)
    server = federation.server()
    with pytest.raises(FederationError, match=f"{why}.* server's step of MetaFL") as error:
        federate(server, Loop(federation.sites()))
    assert f"a lower method.server.lr (now {rate:g})" in str(error.value)
    assert server.round == 0
    assert server.states.newest()[0] == 0  # type: ignore[index]
    assert not server.state.excluded
    assert all(tensor.isfinite().all() for tensor in server.model.shared.values())


@pytest.mark.parametrize("group", ["shared", "head", "channels"])
def test_a_number_of_the_next_model_that_is_not_finite_names_the_server_s_step(
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
    server = federation.server()
    with pytest.raises(
        FederationError, match=f"{group}/x of the model of round 1 is not finite after the server"
    ):
        federate(server, Loop(federation.sites()))
    assert server.states.newest()[0] == server.round == 0  # type: ignore[index]


def test_a_learning_rate_that_diverges_at_every_site_is_blamed_on_none(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=3e9, batch_size=8))
    federation = tiny(method, rounds=4, selection="last")
    server = federation.server()
    with pytest.raises(FederationError):
        federate(server, Loop(federation.sites()))
    assert not server.state.excluded


@pytest.mark.complete
def test_two_sites_cannot_have_the_third_excluded_by_claims(tiny: Any) -> None:
    """They send next to nothing, so that its update is the largest, and say that the model has diverged."""

    def claim(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "alpha" or task.task != "train":
            return answer
        if task.round >= 2:
            return pack(Abstain("non_finite_loss", "NonFiniteLoss"))
        update = unpack(answer)
        assert isinstance(update, Update)
        return pack(replace(update, shared={k: (t * 1.0001) for k, t in task.shared.items()}))

    federation = tiny(METHOD, min_sites=2, rounds=4, selection="last")
    server = federation.server()
    with pytest.raises(FederationError, match="beta: non_finite_loss"):
        federate(server, Between(federation.sites(), claim))
    assert not server.state.excluded
    assert server.round == 1


@pytest.mark.complete
def test_claims_change_nothing_where_a_site_without_a_part_in_the_model_trains(tiny: Any) -> None:
    """Two sites made the model of round 2 alone, and say in round 3 that it has diverged."""

    def claim(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if task.task != "train" or task.round == 1:
            return answer
        if task.round == 2:
            return None if site == "gamma" else answer
        return answer if site == "gamma" else pack(Abstain("non_finite_loss", "NonFiniteLoss"))

    federation = tiny(METHOD, min_sites=1, rounds=3, selection="last")
    server = federation.server()
    federate(server, Between(federation.sites(), claim))
    assert not server.state.excluded
    assert server.round == 3
