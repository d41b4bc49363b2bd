"""A committed model on which no site can train is taken back, without the site that has destroyed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    Change,
    events,
    exported,
    history,
    run,
)

from between import Between
from noted import noted
from rounds import conformant
from suture.core.errors import FederationError
from suture.federation.loop import Loop, federate
from suture.federation.server.norms import untrainable
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import Channel
from suture.protocol.messages import Abstain, TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.metafl.inner_loop import ServerStep
from suture_results.report import write_report
from world import refused


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
