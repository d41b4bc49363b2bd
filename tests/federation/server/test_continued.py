"""Experiments that continue: settings that may not change, lost and foreign states, rounds compared anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    history,
)

from noted import noted
from suture.core.errors import ConfigError
from suture.federation.plan import Plan
from suture.federation.server.checks import check_unchanged, fixed_settings
from suture.federation.server.norms import NormBound
from suture.federation.server.selection import Best, ModelSelection
from suture.federation.server.state import RunState
from suture.federation.state_files import FORMAT, Rounds
from suture.methods.vanilla import VanillaFL
from suture.protocol.packing import Packed, load, save
from world import refused


@pytest.mark.complete
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, ("seed=1", "seed=2")),
        ({"method": VanillaFL(local=METHOD.local)}, ("method=surgical", "method=vanilla")),
        (
            {"method": replace(METHOD, local=replace(METHOD.local, lr=0.5))},
            ("method.local.lr=0.01", "method.local.lr=0.5"),
        ),
    ],
)
def test_another_plan_is_refused_by_the_name_of_what_differs(
    change: dict[str, Any], named: tuple[str, ...], tiny: Any
) -> None:
    federation = tiny(METHOD, rounds=1)
    federation.run()
    federation.schedule = replace(federation.schedule, rounds=2)
    plan: Plan = federation.plan
    federation.plan = replace(plan, **change)
    with refused(*named, by=ConfigError):
        federation.run()
    federation.plan = plan
    assert federation.server().states.rounds() == [0, 1]
    assert federation.run().round == 2, "more rounds are no other plan"


def test_a_plan_is_the_same_after_it_was_written_down(tiny: Any) -> None:
    """A tuple comes back as a list."""
    plan: Plan = tiny(METHOD).plan
    check_unchanged(json.loads(json.dumps(fixed_settings(plan))), fixed_settings(plan), plan.experiment)
    check_unchanged({}, fixed_settings(plan), plan.experiment)


@pytest.mark.complete
def test_a_corrupt_best_model_is_named_and_the_newest_takes_its_place(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=6, selection="last")
    states = federation.run().states
    best = states.best_path(6)
    best.write_bytes(best.read_bytes()[:-2])
    with refused(best.name, "round 6"):
        states.read_best(6)
    for best_round, expected in ((Best(6, -0.5), Best(6, -0.5)), (None, None)):
        assert ModelSelection(best_round, by="last").restore(states, 6, "last").best == expected
    standings = ModelSelection(Best(1, -0.5), by="last").restore(states, 5, "last")
    assert standings.best is not None
    assert standings.best.round == 5
    assert standings.after(Best(6, -9e9)).best == Best(6, -9e9), "any measured round is better"
    best.unlink()
    states.path(6).unlink()
    again = federation.run()
    assert again.selected_round == 6
    assert again.select_model().labels


@pytest.mark.complete
def test_a_torn_line_of_the_history_does_not_stop_a_run(tiny: Any) -> None:
    """A process that was killed while it wrote; the line is of a round that was committed before."""
    federation = tiny(METHOD, rounds=2)
    path = federation.run().record.folder / "history.jsonl"
    path.write_text(path.read_text()[:-20])
    federation.schedule = replace(federation.schedule, rounds=3)
    assert [line["round"] for line in history(federation.run())] == [1, 2, 3]


@pytest.mark.complete
def test_code_that_changes_during_an_experiment_is_noted_for_good(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(METHOD, rounds=2)
    plan: Plan = federation.plan
    assert noted(federation.run()) == []
    for rounds, code in ((3, "a" * 16), (4, "a" * 16), (5, "b" * 16)):
        monkeypatch.setattr("suture.federation.plan.code_hash", lambda _, own=code: own)  # at every party
        federation.plan = replace(plan, code=code)
        federation.schedule = replace(federation.schedule, rounds=rounds)
        notes = noted(federation.run())
        assert notes[0].startswith(f"The code changed after round 2, from {plan.code} to {'a' * 16}:")
        assert len(notes) == (2 if code[0] == "b" else 1)
    assert notes[1].startswith(f"The code changed after round 4, from {'a' * 16} to {'b' * 16}:")


STRANGE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"format": FORMAT + 1}, "round-000001.safetensors"),
    ({"format": None}, "round-000001.safetensors"),
    ({"plan": None}, "plan"),
    ({"registry": {}}, "registry.prior"),
    ({"standings": {"best": {"round": 1, "value": "x"}}}, "best.value"),
    ({"standings": {"own": {"alpha": 3}}}, "own.alpha"),
    ({"pending": {"sites": {"alpha": 1}, "validation": {}}}, "pending"),
    ({"codes": [[1]]}, "codes"),
    ({"labels": ["Mass"]}, "head.bias"),
    ({"labels": [{}]}, "labels"),
    ({"label_type": "x"}, "label_type"),
    ({"memory2/x": torch.ones(1)}, "memory2"),
    ({"head/head.bias": torch.ones(1, 2)}, "head.bias"),
    ({"head/head.bias": torch.ones(4, dtype=torch.complex64)}, "head.bias"),
    ({"head/head.bias": None}, "head.bias"),
)
"""What a state says, or a tensor that it has or lacks; and what its refusal names."""


@pytest.mark.complete
def test_a_state_with_strange_facts_or_tensors_is_refused_and_stays(tiny: Any) -> None:
    """Its checksum is right, so it is no damage of the disk."""
    federation = tiny(METHOD, rounds=1)
    states = federation.run().states
    paths = states.path(1), states.best_path(1)
    sound = [load(path) for path in paths]
    for change, named in STRANGE:
        for path, state in zip(paths, sound, strict=True):
            if "/" in next(iter(change)):
                tensors = {name: t for name, t in {**state.tensors, **change}.items() if t is not None}
                save(path, replace(state, tensors=tensors))
            else:
                save(path, replace(state, header={**state.header, **change}))
        before = [path.read_bytes() for path in paths]
        with refused(named, by=ConfigError):
            federation.run()
        assert [path.read_bytes() for path in paths] == before


def test_the_state_of_a_run_is_the_same_after_it_was_written_down() -> None:
    standings = ModelSelection(Best(1, -0.5), {"a": Best(2, -0.5)}, 1, "site_loss")
    codes, holders = ((0, "a" * 16), (3, "b" * 16)), frozenset({"b", "a"})
    state = RunState(standings, None, holders, codes, {"a": 1.5}, 2.0, NormBound(3.0), {"c": "why"}, {"a": 4})
    written = json.loads(json.dumps(state.to_dict()))
    assert written["holders"] == ["a", "b"]
    assert RunState.from_dict(written, "the state") == state


def test_a_run_that_continues_by_another_rule_does_not_compare_its_values_with_those_of_the_former(
    tmp_path: Path,
) -> None:
    """The last round has the value 0, an AUROC is above it, and a loss below: it would never be the best."""
    states = Rounds(tmp_path)
    for number in (1, 2, 4):
        states.save(number, Packed({}, {}), committed=4)
    standings = ModelSelection(by="last", best=Best(2, 0.0)).restore(states, 3, "last")
    assert standings.best == Best(2, 0.0)
    standings = standings.restore(states, 3, "site_loss")
    assert standings.of("a") == 3
    standings = standings.after_losses(Best(4, -0.5)).restore(states, 5, "site_loss")
    assert standings.best == Best(4, -0.5)
    assert not standings.over(5, 2)
