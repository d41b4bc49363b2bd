"""Experiments that continue: what rests on disk, what may not change, and damaged or foreign states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import METHOD, history

from noted import noted
from suture.core.errors import ConfigError
from suture.federation.plan import Plan
from suture.federation.server.norms import NormBound
from suture.federation.server.selection import Best, ModelSelection
from suture.federation.server.state import RunState, check_unchanged, fixed_settings
from suture.federation.state_files import FORMAT, Rounds
from suture.methods.vanilla import VanillaFL
from suture.protocol.packing import Packed, load, save
from world import refused


def state(value: float) -> Packed:
    return Packed({"x": torch.tensor([value])}, {"v": float(value)})


def saved(folder: Path, *numbers: int) -> Rounds:
    rounds = Rounds(folder)
    for number in numbers:
        rounds.save(number, state(number), committed=number - 1)
    return rounds


def test_what_no_round_changes_is_stored_once_and_part_of_every_state(tmp_path: Path) -> None:
    rounds, encoder = Rounds(tmp_path, "fixed/backbone."), torch.arange(1000.0)
    for number in range(5):
        whole = {"fixed/backbone.w": encoder, **state(number).tensors}
        rounds.save(number, Packed(whole, {"v": number}), committed=number)
        rounds.keep(1 if number else 0)
    assert max(path.stat().st_size for path in tmp_path.glob("*-00*")) < 1000 < 4000
    for found in (rounds.newest(), rounds.newest(not_later_than=3), (1, rounds.read_best(1))):
        assert found is not None
        assert found[1].tensors["x"].item() == found[0]
        assert torch.equal(found[1].tensors["fixed/backbone.w"], encoder)


def test_an_experiment_that_begins_anew_has_its_own_constant_tensors(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, "w")
    for value in (1.0, 2.0, 3.0):
        if value > 1:
            rounds.path(0).unlink()
        rounds.save(0, Packed({"w": torch.tensor(value)}, {}), committed=0)
    found = rounds.newest()
    assert found is not None
    assert found[1].tensors["w"].item() == 3.0
    rounds.constant_path.write_bytes(b"x")
    with refused("constant.safetensors"):
        rounds.newest()


def test_an_uncommitted_round_can_be_taken_back(tmp_path: Path) -> None:
    rounds = saved(tmp_path, *range(1, 6))
    assert rounds.rounds() == [2, 3, 4, 5]
    found = rounds.newest(not_later_than=3)
    assert found is not None
    assert found[1].header == {"v": 3}
    rounds.save(5, state(55), committed=4)  # round 5 once more
    assert rounds.rounds() == [2, 3, 4, 5]
    # A state of long ago outlives rounds that never were.
    assert saved(tmp_path / "old", 1, 5, 5, 5).rounds() == [1, 5]
    # A hostile server may count as it likes; the disk of a site must not fill up for it.
    large = range(10**6, 10**6 + 8)
    assert saved(tmp_path / "large", *large).rounds() == list(large[4:])


def test_nothing_there_is_none_and_all_broken_is_an_error(tmp_path: Path) -> None:
    assert Rounds(tmp_path / "none").newest() is None
    saved(tmp_path, 1).path(1).write_bytes(b"x")
    with refused("round-000001.safetensors"):
        Rounds(tmp_path).newest()


def best_rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("best-")) for path in folder.glob("best-*"))


def test_a_former_best_stays_while_a_round_on_disk_may_name_it(tmp_path: Path) -> None:
    """Best 2 until round 6; rounds 4 to 6 were committed when 2 was the best."""
    rounds = Rounds(tmp_path)
    for number in range(1, 11):
        rounds.save(number, state(number), committed=number - 1)
        rounds.keep(min(number, 2) if number < 7 else 6)
        if number == 7:
            assert (rounds.rounds(), best_rounds(tmp_path)) == ([4, 5, 6, 7], [2, 6])
        if number == 9:
            assert (rounds.rounds(), best_rounds(tmp_path)) == ([6, 7, 8, 9], [2, 6])
    assert (rounds.rounds(), best_rounds(tmp_path)) == ([7, 8, 9, 10], [6])
    assert rounds.latest(8) == 8
    assert rounds.latest(6) == 6
    assert rounds.latest(5) is None


def test_a_round_that_is_written_again_is_another_best(tmp_path: Path) -> None:
    rounds = saved(tmp_path, 1)
    rounds.keep(1)
    rounds.save(2, state(2), committed=1)
    rounds.keep(2)
    rounds.save(2, state(22), committed=1)
    assert best_rounds(tmp_path) == [1]
    rounds.keep(2)
    assert rounds.read_best(2).header == {"v": 22}
    rounds.keep(1)
    assert best_rounds(tmp_path) == [1]


@pytest.mark.parametrize("harm", ["cut", "flip in a tensor", "flip in the header"])
def test_a_corrupt_file_is_passed_over_for_the_one_before(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = saved(tmp_path, 1, 2)
    data = bytearray(rounds.path(2).read_bytes())
    if harm == "cut":
        del data[-2:]
    else:
        data[data.index(b"2.0") if "header" in harm else -1] ^= 1
    rounds.path(2).write_bytes(bytes(data))
    found = rounds.newest()
    assert found is not None
    assert (found[0], found[1].header) == (1, {"v": 1})
    assert "round-000002.safetensors" in caplog.text


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
    standings = standings.after_sites(Best(4, -0.5), "site_loss").restore(states, 5, "site_loss")
    assert standings.best == Best(4, -0.5)
    assert not standings.over(5, 2)
