"""Secure aggregation in a whole federation: the model of the plain run, drop-outs, restarts and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from masked import BOTH, FOUR, SAME, accepted, furthest, plain, secured
from parties import METHOD, Change, events, history, honest, record, run

from between import Between
from noted import noted
from suture.core.errors import ConfigError, FederationError
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.federation.loop import federate
from suture.methods import METHODS
from suture.protocol.messages import Labels, Masking, TaskData, Update
from suture.protocol.packing import Packed, load, unpack
from suture_results.report import write_report
from world import refused

ONE_ROUND = {"rounds": 1, "selection": "last"}


@pytest.mark.complete
def test_the_model_is_that_of_the_plain_run(tiny: Any) -> None:
    """And the server holds integers: no tensor of an update is near the plain one."""
    seen = {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        if isinstance(update := unpack(answer), Update):
            seen[site] = update
        return answer

    federation = secured(tiny(METHOD, FOUR))
    masked, other = run(federation, "masked", look), run(plain(federation), "plain")
    assert furthest(other, masked) < 1e-6
    assert other.round == masked.round == 2
    for update in seen.values():
        for tensor in (*update.shared.values(), *update.head.values()):
            assert tensor.dtype == torch.int64
            assert (tensor.abs() > 2**48).double().mean() > 0.9 or tensor.numel() < 8
    lines = history(masked)[0]["sites"]
    assert all(line["norm"] is None and line["status"] == "accepted" for line in lines.values())
    assert any("Secure aggregation" in note for note in noted(masked))
    write_report(masked.record.folder)
    assert "Secure aggregation" in (masked.record.folder / "report.html").read_text()


@pytest.mark.complete
@pytest.mark.parametrize("name", ["fedavg", "vanilla", "condist"])
def test_weights_of_sites_and_rows(name: str, tiny: Any) -> None:
    """By numbers of images, by owners."""
    federation = secured(tiny(METHODS[name](local=METHOD.local), FOUR, **ONE_ROUND))
    masked, other = run(federation, "masked"), run(plain(federation), "plain")
    assert furthest(other, masked) < 1e-6
    assert other.model.labels == masked.model.labels == BOTH


# Drop-outs


Lost = Callable[[str, str, int, int], bool]
"""Of a site, a step, a round and an attempt."""

EIGHT = dict.fromkeys("abcdefgh", ("Mass",))
THREE = dict.fromkeys(["alpha", "beta", "gamma"], BOTH)
LOSSES: dict[str, tuple[dict[str, Labels], int, Lost, list[str]]] = {
    # Before its update arrives a site is left out of the sum; afterwards it is part of it.
    "an update": (FOUR, 1, lambda s, step, *_: (s, step) == ("delta", "update"), ["abg"]),
    "a signature": (FOUR, 1, lambda s, step, *_: (s, step) == ("delta", "survivors"), ["abdg"]),
    "shares": (FOUR, 1, lambda s, step, *_: (s, step) == ("delta", "reveal"), ["abdg"]),
    "shares of three": (THREE, 1, lambda s, step, *_: (s, step) == ("gamma", "reveal"), ["abg"]),
    # A row that loses an owner cannot be unmasked with two left; in the next attempt it stays as it was.
    "an owner": (FOUR, 1, lambda s, step, _, at: s == "gamma" and (at > 1 or step == "update"), ["", "abd"]),
    # Two would train its class: they train their other one, and both from the next round on.
    "a late owner": (FOUR, 2, lambda s, _, __, at: (s, at) == ("gamma", 1), ["abd", "abdg"]),
    "its updates": (FOUR, 2, lambda s, step, *_: (s, step) == ("gamma", "update"), ["", "abd", "", "abd"]),
    # Of two that were lost none is left out by its name: alpha is lost once, and delta always.
    "two": (
        SAME,
        2,
        lambda s, step, _, at: step == "update" and (s == "delta" or (s, at) == ("alpha", 1)),
        ["", "abg", "abg"],
    ),
    # That delta is an owner of a row costs one attempt more.
    "two, of which one is an owner": (
        {**SAME, "beta": ("Mass",)},
        2,
        lambda s, step, _, at: step == "update" and (s == "delta" or (s, at) == ("alpha", 1)),
        ["", "", "abg", "", "abg"],
    ),
    # Nobody is left out who was not asked for an update.
    "two before": (
        SAME,
        1,
        lambda s, step, _, at: s in ("delta", "gamma") and (step, at) == ("shares", 1),
        ["", "abdg"],
    ),
    # delta cannot take part in the round any more: gamma, once lost, is needed.
    "one late": (
        SAME,
        1,
        lambda s, step, _, at: at == 1 and (s, step) in [("delta", "keys"), ("gamma", "update")],
        ["", "abg"],
    ),
    # The four others are enough for `min_sites`, and too few to vote.
    "half": (EIGHT, 1, lambda s, step, _, at: s < "e" and (step, at) == ("update", 1), ["", "abcdefgh"]),
}


def losing(lost: Lost) -> Change:
    attempts: list[str] = []

    def change(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if task.mask is None:
            return answer
        if task.mask.attempt not in attempts:
            attempts.append(task.mask.attempt)
        return None if lost(site, task.mask.step, task.round, len(attempts)) else answer

    return change


@pytest.mark.complete
@pytest.mark.parametrize("name", LOSSES)
def test_who_drops_out_costs_attempts_and_no_other_ones_update(name: str, tiny: Any) -> None:
    sites, rounds, lost, expected = LOSSES[name]
    schedule = {"rounds": rounds, "selection": "last", "min_sites": 3, "max_failed_rounds": 3}
    federation = secured(tiny(METHOD, sites, **schedule))
    masked = run(federation, "masked", losing(lost))
    assert accepted(masked) == expected
    if len(expected) > 1:  # a row that loses its owners is not trained, which the plain run does not know
        return

    def without(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if task.task == "train" and site[0] not in expected[0] else answer

    assert furthest(run(plain(federation), "plain", without), masked) < 1e-6


def test_an_attempt_with_too_few_sites_says_who_is_missing(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND, min_sites=3, max_failed_rounds=1))
    with refused("alpha: lost on the way", "beta: lost on the way", by=FederationError):
        run(federation, "out", losing(lambda site, *_: site in ("alpha", "beta")))


@pytest.mark.complete
def test_a_row_that_loses_an_owner_for_good_leaves_no_site(tiny: Any) -> None:
    """From round 2 on two sites are left of those that train it: they do not, and the report says so."""
    federation = secured(tiny(METHOD, FOUR, rounds=3, selection="last", min_sites=3))
    trained: dict[int, list[str]] = {1: [], 2: [], 3: []}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        update = unpack(answer)
        if isinstance(update, Update) and "Nodule" in update.labels:
            trained[task.round].append(site)
        return None if site == "gamma" and task.round > 1 else answer

    server = run(federation, "out", lose)
    assert accepted(server) == ["abdg", "abd", "abd"]
    assert trained == {1: ["alpha", "beta", "gamma"], 2: [], 3: []}
    notes = [note for note in noted(server) if "Nodule" in note]
    assert len(notes) == 1
    assert "round 2: the row of Nodule stayed as it was, because fewer than 3 sites sent it" in notes[0]
    models = [server.states.folder / f"round-{number:06d}.safetensors" for number in (1, 3)]
    heads = [{n: t for n, t in load(path).tensors.items() if n.startswith("head/")} for path in models]
    row = list(server.model.labels).index("Nodule")
    for name, tensor in heads[0].items():
        assert torch.equal(tensor[row], heads[1][name][row])
        assert not torch.equal(tensor[1 - row], heads[1][name][1 - row])


@pytest.mark.complete
def test_who_missed_a_round_begins_afresh(tiny: Any) -> None:
    """Its state is nobody else's; the others go on from theirs."""
    federation = secured(tiny(METHOD, SAME, rounds=3, selection="last", min_sites=3))
    states: dict[tuple[int, str], tuple[str, ...]] = {}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        step = unpack(answer)
        if isinstance(step, Masking) and step.keys:
            states[task.round, site] = step.keys.histories
        return None if (site, task.round, task.task) == ("delta", 2, "mask") else answer

    assert accepted(run(federation, "out", lose)) == ["abdg", "abg", "abdg"]
    assert {states[1, site] for site in SAME} == {()}
    assert len({states[2, site] for site in SAME} - {()}) == 1
    assert states[3, "alpha"] == states[3, "beta"] == states[3, "gamma"] != states[3, "delta"]


# Kills


@pytest.mark.complete
def test_a_restarted_site_takes_part_from_the_next_attempt_on(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND))
    sites, server = federation.sites("out"), federation.server("out")
    transport, killed = Between(sites, honest), []

    def kill(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta" and task.mask and task.mask.step == "shares" and not killed:
            killed.append(site)
            sites["beta"].close()
            transport._sites["beta"] = federation.sites("out")["beta"]
        return answer

    transport.change = kill
    federate(server, transport)
    assert accepted(server) == ["", "abdg"]
    assert "beta: masking (MaskingRefused)" in json.dumps(events(server))
    assert furthest(run(plain(federation), "plain"), server) < 1e-6


@pytest.mark.complete
def test_a_server_that_is_killed_goes_on_with_new_keys(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last"))
    attempts = set()

    class Killed(Exception):
        pass

    def kill(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.mask:
            attempts.add((task.round, task.mask.attempt))
            if (site, task.round, task.mask.step, len(attempts)) == ("gamma", 2, "reveal", 2):
                raise Killed  # three sites have revealed their shares
        return answer

    with pytest.raises(Killed):
        run(federation, "out", kill)
    server = run(federation, "out", kill)
    assert [(line["round"], line["status"]) for line in history(server)] == [
        (1, "committed"),
        (2, "committed"),
    ]
    assert len(attempts) == 3
    assert furthest(run(federation, "other"), server) == 0


# Settings


@pytest.mark.parametrize(
    ("sites", "colluders", "named"),
    [
        (FOUR | {"delta": ("Hernia", "Mass")}, 0, ("Hernia (delta)",)),
        (FOUR, 1, ("4 or more", "Nodule (alpha, beta, gamma)")),
        (FOUR, 2, ("5 sites", "4", "colluders")),
    ],
)
def test_a_class_with_too_few_owners_is_refused_before_round_1(
    sites: dict[str, Labels], colluders: int, named: tuple[str, ...], tiny: Any
) -> None:
    federation = secured(tiny(METHOD, sites), colluders)
    with refused(*named, by=FederationError):
        run(federation, "out")
    assert not any((federation.sites("out")["alpha"].folder).glob("round-*"))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("robust.kind=median", "robust"),
        ("transport=float16", "transport"),
        ("method=afl", "weighted sum"),
        ("method=fedmlp", "prototypes"),
        ("method=fedlsm", "weight 0"),
        ("method=fednml", "not trained"),
        ("method=pfl", "heads"),
    ],
)
def test_what_does_not_go_together_is_refused(setting: str, named: str) -> None:
    with refused(named, by=ConfigError):
        with_settings(load_job("demo"), ["secure_aggregation={}", setting]).schedule()


def test_sites_that_share_a_process_of_the_simulator_are_refused(tmp_path: Path) -> None:
    made = with_settings(load_job("demo"), ["method=vanilla", "secure_aggregation={}"])
    with refused("keys", by=ConfigError):
        run_job(made, "sim", tmp_path / "run", workers=2)
    assert not (tmp_path / "run").exists()


def test_a_class_of_few_annotators_that_all_train_is_noted(tiny: Any) -> None:
    """A row with which only positives move anything lets a lying server see them alone."""
    sites, method = FOUR | {"delta": ("Hernia", "Mass")}, METHODS["vanilla"](local=METHOD.local)
    server = run(secured(tiny(method, sites, rounds=1, selection="last")), "out")
    assert [note for note in noted(server) if "fewer than 3 sites annotate Hernia." in note]
    assert len(events(server, "note")) == len(record(server, "run.json")["notes"])  # each told at once


def test_the_setting_is_part_of_the_plan(tiny: Any) -> None:
    plan = secured(tiny(METHOD, FOUR)).plan
    assert plan.to_dict()["secure_aggregation"] == {"colluders": 0}
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
