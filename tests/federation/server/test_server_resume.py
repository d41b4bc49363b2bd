"""What an experiment that continues must have in common with its beginning, and a best model that is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from suture.core.errors import ConfigError, SutureError
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan
from suture.federation.server.resume import begun_with, read_best, refuse_another, still_there
from suture.federation.server.selection import Best, better
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 2}, "begun with seed=1, and this job has seed=2"),
        (
            {"method": VanillaFL(local=METHOD.local)},
            "begun with method=surgical, and this job has method=vanilla",
        ),
        (
            {"method": replace(METHOD, local=replace(METHOD.local, lr=0.5))},
            "begun with method.local.lr=0.01, and this job has method.local.lr=0.5",
        ),
    ],
)
def test_another_plan_is_refused_by_the_name_of_what_differs(
    change: dict[str, Any], says: str, tiny: Any
) -> None:
    federation = tiny(METHOD, rounds=1)
    federation.run()
    federation.schedule = replace(federation.schedule, rounds=2)
    plan: Plan = federation.plan
    federation.plan = replace(plan, **change)
    server = federation.server()
    with pytest.raises(ConfigError, match=says):
        federate(server, Loop(federation.sites()))
    assert server.states.rounds() == [0, 1]
    federation.plan = plan
    assert federation.run().round == 2, "more rounds are no other plan"


def test_a_plan_is_the_same_after_it_was_written_down(tiny: Any) -> None:
    """A tuple comes back as a list."""
    plan: Plan = tiny(METHOD).plan
    refuse_another(json.loads(json.dumps(begun_with(plan))), begun_with(plan), plan.experiment)
    refuse_another({}, begun_with(plan), plan.experiment)


def test_a_best_model_that_has_rotted_is_named_and_the_newest_takes_its_place(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=6, selection="last")
    states = federation.run().states
    best = states.kept(6)
    best.write_bytes(best.read_bytes()[:-2])
    with pytest.raises(SutureError, match=f"{best.name} is corrupt.*delete the files of round 6 in"):
        read_best(states, 6)
    assert still_there(Best(6, -0.5), states, 6) == Best(6, -0.5)
    assert still_there(None, states, 6) is None
    instead = still_there(Best(1, -0.5), states, 5)
    assert instead is not None
    assert better(instead, Best(6, -9e9)) == Best(6, -9e9), "any measured round is better"
    best.unlink()
    states.path(6).unlink()
    again = federation.run()
    assert again.selected_round == 6
    assert again.selected().labels


def test_a_torn_line_of_the_history_does_not_stop_a_run(tiny: Any) -> None:
    """A process that was killed while it wrote; the line is of a round that was committed before."""
    federation = tiny(METHOD, rounds=2)
    folder = federation.run().record.folder
    path = folder / "history.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    federation.schedule = replace(federation.schedule, rounds=3)
    federation.run()
    rounds = [json.loads(line)["round"] for line in path.read_text().splitlines()]
    assert rounds == [1, 2, 3]
