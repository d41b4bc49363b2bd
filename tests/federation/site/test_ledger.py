"""The ledger of a site: it loses no line, counts over experiments, and its ε is never too small."""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import ConfigError
from suture.core.privacy import PrivacyConfig
from suture.federation.site.abstention import BudgetSpent
from suture.federation.site.ledger import Ledger, Release, tally_of
from suture.federation.site.releases import release_of
from suture.federation.state_files import EXPERIMENTS
from suture.protocol.decisions import Decided, DecidedClass, DecidedGroup
from suture.protocol.egress import CLASSES, Channel, Layout
from suture.protocol.messages import (
    ClassScore,
    Evaluation,
    Figures,
    Metrics,
    Reply,
    SiteInfo,
    TaskData,
    Update,
    ones,
)
from suture.protocol.packing import pack
from suture_admin.ledger import budget_lines, read_statement, state_of
from suture_results.notes import describe_spent
from world import refused, site_config

LIMITS = PrivacyConfig(clip=1.0, noise=2.0)


def ledger(folder: Path, limits: PrivacyConfig = LIMITS) -> Ledger:
    opened = Ledger(folder / "ledger.jsonl", limits)
    opened.begin()
    return opened


def release(number: int, experiment: str = "one", noise: float = 2.0, **more: Any) -> Release:
    facts = {"update": True, "clip": 1.0, "noise": noise, "answer": f"{experiment}-{number}-{noise}"}
    return Release("2026-01-01T00:00:00+00:00", experiment, "train", number, **{**facts, **more})


def released(reply: Reply, task: TaskData, *channels: Channel) -> Release:
    return release_of(reply, pack(reply), task, "one", LIMITS, channels)


def test_everything_that_an_answer_says_is_counted() -> None:
    score = ClassScore(0.5, 0.4, 0.6, 3, 4)
    classes = {"A": score, "B": ClassScore(None, None, None, None, None)}
    own = Metrics(0, "test", 9, 0.5, classes, {"accuracy": 0.5}, {"I": Figures(5, 0.5, {"recall": 0.1})})
    found = released(Evaluation(own, own), TaskData("evaluate", 3, split="test"))
    assert found.key == ("one", "evaluate", 3, "test")
    assert (found.figures, found.update) == ({"A": 2}, False)
    assert found.numbers == 2 * (2 + 1 + 2 + 1)
    group = DecidedGroup(9, 9, 0.5, 0.5)
    decided = DecidedClass(
        None, None, Decided(0.5, 0.5), (None, None), (None, None), {"F": group, "M": group}
    )
    grouped = Evaluation(replace(own, decided={"A": decided}), None)
    assert released(grouped, TaskData("evaluate", 3, split="test")).numbers == 2 + 1 + 2 + 1 + 2 * 4
    update = Update(2, ("A",), {}, {}, ones(("A",)), scalars={"x": 1.0}, train_loss=0.1, metrics=own)
    found = released(update, TaskData("train", 2))
    assert (found.figures, found.update, found.numbers) == ({"A": 1}, False, 6 + 1 + 1 + 1 + 1)
    told = {"f1": torch.tensor([0.5, 0.0, 0.1]), "prototypes": torch.tensor([[0.0, 2.0], [0, 0], [0, 0]])}
    told |= {
        "ages": torch.ones(7),
        "control/backbone.weight": torch.ones(5),
        "control/head.bias": torch.ones(3),
    }
    rows = Update(2, ("A", "B", "C"), {}, {}, ones(("A", "B", "C")), channels=told, metrics=own)
    like = Layout({"backbone.weight": ((5,), "torch.float32")}, {"head.bias": ((), "torch.float32")})
    of_classes = Channel("f1", "up", (CLASSES,)), Channel("prototypes", "up", (CLASSES, 2))
    found = released(
        rows, TaskData("train", 2), *of_classes, Channel("ages", "up", (7,)), Channel("control", "up", like)
    )
    assert (found.figures, found.update) == ({"A": 2, "C": 1}, True)
    assert found.numbers == 6 + 1 + 3 + 7  # of metrics, weights, and ages
    lacking = replace(rows, channels={"f1": told["f1"]})  # which the site's filter refuses, with the reason
    assert released(lacking, TaskData("train", 2), *of_classes).figures == {"A": 2, "C": 1}
    info = SiteInfo(("A", "B"), {"train": 3}, 1, "x", counts={"A": (1, 2), "B": None})
    found = released(info, TaskData("handshake"))
    assert (found.figures, found.update, found.numbers) == ({}, False, 3)


def test_a_release_is_written_once_and_read_by_another_process(tmp_path: Path) -> None:
    own, other = ledger(tmp_path), ledger(tmp_path)
    for number in (1, 2, 1):
        own.record(release(number))
    assert [r.round for r in other.releases()] == [1, 2]
    other.record(release(3))
    assert [r.round for r in own.releases()] == [1, 2, 3]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("budget", "answers"),
    [({"max_figures": 70}, 70), ({"max_experiments": 2}, 50), ({"max_epsilon": 10.0}, 4)],
)
def test_jobs_at_the_same_time_lose_no_line_and_share_the_budget(
    budget: dict[str, float], answers: int, tmp_path: Path
) -> None:
    ledger(tmp_path)
    limits = LIMITS.model_copy(update=budget)
    children = []
    for job in range(4):
        child = os.fork()
        if not child:
            own, kept = ledger(tmp_path, limits), 0
            for number in range(25):
                try:
                    own.record(release(number, f"job-{job}", figures={"A": 1}))
                    kept += 1
                except BudgetSpent:
                    break
            os._exit(kept)
        children.append(child)
    kept = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert kept == answers
    assert tally_of(ledger(tmp_path).releases()).figures == {"A": answers}


def test_a_line_that_a_killed_process_left_is_none_and_another_damage_is_a_break(tmp_path: Path) -> None:
    own = ledger(tmp_path)
    own.record(release(1))
    path = tmp_path / "ledger.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert len(ledger(tmp_path).releases()) == 1
    ledger(tmp_path).record(release(2))
    assert [r.round for r in own.releases()] == [1, 2]
    first, second = path.read_text().splitlines(keepends=True)
    for damaged in (first[:40] + "\n", first.replace("true", '"maybe"'), first.replace("noise", "nose")):
        path.write_text(damaged + second)
        with refused("ledger.jsonl", "line 1", by=ConfigError):
            ledger(tmp_path).record(release(3))


@pytest.mark.parametrize("trace", ["noise.key", "counts.json", "round-000004.safetensors"])
def test_what_was_released_before_there_was_a_ledger_is_unprotected(trace: str, tmp_path: Path) -> None:
    for experiment, file in (("old", trace), ("failed", "errors.jsonl")):
        write(tmp_path, experiment, file)
    own = ledger(tmp_path)
    own.record(release(1))
    assert own.spent().epsilon is None
    assert (own.spent().updates, own.spent().unprotected) == (2, 1)
    assert [line.experiment for line in state_of(own, LIMITS).lines] == ["old", "one"]


def write(state: Path, experiment: str, file: str = "round-000001.safetensors") -> None:
    (state / EXPERIMENTS / experiment).mkdir(parents=True)
    (state / EXPERIMENTS / experiment / file).touch()


def test_a_ledger_that_is_deleted_while_a_job_runs_makes_epsilon_infinite(tmp_path: Path) -> None:
    own = ledger(tmp_path)
    write(tmp_path, "one")
    assert not ledger(tmp_path).releases(), "the state of the first task is no older experiment"
    own.record(release(1))
    (tmp_path / "ledger.jsonl").unlink()
    own.record(release(2))
    assert [r.task for r in own.releases()] == ["unknown", "train"]
    assert own.spent().epsilon is None


def test_the_ledger_leaves_the_files_of_experiments_alone(tmp_path: Path) -> None:
    """A process of another container writes one: its number means nothing here."""
    writing = tmp_path / "other" / ".round-000002.safetensors.4194000.abcdef01.tmp"
    writing.mkdir(parents=True)
    Ledger(tmp_path / "ledger.jsonl", PrivacyConfig()).record(release(1))
    assert writing.exists()


def test_other_settings_begin_another_line() -> None:
    found = budget_lines([release(1), release(2), release(3, noise=0.0), release(4)])
    assert [(line.noise, line.updates, line.epsilon) for line in found] == [
        (2.0, 2, 6.58),
        (0.0, 1, None),
        (2.0, 1, 4.38),
    ]


def test_the_administrator_sees_what_is_left(tmp_path: Path) -> None:
    """From the workspace, from the folder of the states, with the budgets of the site's suture.toml."""
    state = tmp_path / "suture"
    state.mkdir()
    own = ledger(state)
    for number in (1, 2, 2):
        own.record(release(number, figures={"A": 2}, answer=str(len(own.releases()))))
    own.record(release(1, "two", noise=0.0, figures={"B": 1}))
    for folder in (tmp_path, state):
        found = read_statement(folder)
        assert (found.answers_left, found.anew_left) == ({"one": 1997, "two": 1999}, {"one": 2, "two": 3})
        assert (found.figures, found.figures_left) == ({"A": 6, "B": 1}, {"A": 9994, "B": 9999})
        assert (found.spent.updates, found.spent.epsilon) == (4, None)
    data = {"dataset": "hospital", "root": "x", "table": "y"}
    budgets = {"max_answers": 2, "reanswers": 0, "max_figures": 6}
    site_config(tmp_path / "local", data=data, privacy=budgets, storage={"state": "../suture"})
    for folder in (tmp_path, state):
        found = read_statement(folder)
        assert (found.answers_left, found.anew_left) == ({"one": 0, "two": 1}, {"one": 0, "two": 0})
        assert found.figures_left == {"A": 0, "B": 5}
    with refused("ledger.jsonl", by=ConfigError):
        read_statement(tmp_path / "local" / "nowhere" / "at all")


# Random histories


@given(
    st.lists(
        st.builds(
            Release,
            st.just("2026-01-01T00:00:00+00:00"),
            st.sampled_from(["one", "two"]),
            st.sampled_from(["handshake", "train", "evaluate", "calibrate"]),
            st.integers(0, 2),
            figures=st.dictionaries(st.sampled_from("AB"), st.integers(1, 3)),
            answer=st.sampled_from("xy"),
        ),
        max_size=12,
    )
)
def test_a_tally_is_what_its_words_say(releases: list[Release]) -> None:
    told = tally_of(releases)
    for name in ("one", "two"):
        own = [r for r in releases if r.experiment == name]
        assert told.answers[name] == len(own)
        keys = [r.key for r in own if r.task != "handshake"]
        assert told.anew[name] == len(keys) - len(set(keys))
    assert told.figures == sum((Counter(r.figures) for r in releases), Counter())
    assert told.keys == {r.key for r in releases}
    assert told.seen == {(r.key, r.answer) for r in releases}


def exact_delta(value: float, multipliers: list[float]) -> Any:
    """δ of an ε over some Gaussian mechanisms, in 50 digits, from the sum of their privacy losses."""
    with mpmath.workdps(50):
        mean = sum(2 / mpmath.mpf(z) ** 2 for z in multipliers)  # of the loss, N(mean, 2 mean)
        e, deviation = mpmath.mpf(value), mpmath.sqrt(2 * mean)
        return mpmath.ncdf((mean - e) / deviation) - mpmath.exp(e) * mpmath.ncdf((-mean - e) / deviation)


def history(draw: random.Random, folder: Path) -> tuple[str, list[float]]:
    """A random site with restarts, kills and repeats: its report, and the noise of each of its updates."""
    limits = PrivacyConfig(clip=1.0, noise=1.0, delta=10 ** draw.uniform(-9, -2))
    levels = [draw.choice([0.5, 1.0, 2.0, 5.0, 20.0, 300.0]) for _ in range(2)]
    levels += [0.0] * (draw.random() < 0.1)
    own, noises = ledger(folder, limits), []
    for number in range(draw.randrange(1, 9)):
        chosen = draw.random()
        if chosen < 0.2:
            own = ledger(folder, limits)
        elif chosen < 0.3:
            path = folder / "ledger.jsonl"
            path.write_text(path.read_text() + '{"time": "cut')
        new = release(number, draw.choice(["one", "two"]), draw.choice(levels), update=draw.random() < 0.8)
        for _ in range(draw.choice([1, 1, 2])):
            own.record(new)
        noises += [new.noise] if new.update else []
    protection = {"a": {"clip": 1.0, "noise": 1.0, "delta": limits.delta}}
    (note,) = describe_spent(protection, {"a": own.spent()})
    return note, noises


@pytest.mark.complete
def test_the_report_is_never_below_an_independent_ledger(tmp_path: Path) -> None:
    infinite = 0
    for number in range(300):
        draw = random.Random(number)
        (folder := tmp_path / str(number)).mkdir()
        note, noises = history(draw, folder)
        delta = float(re.search(r"at δ = (\S+)", note)[1]) if "at δ" in note else math.nan  # type: ignore[index]
        if 0.0 in noises:
            infinite += 1
            assert "ε = ∞" in note
            assert f"{noises.count(0.0)} of its {len(noises)} updates" in note
        elif noises:
            said = float(re.search(r"ε ≤ (\S+)", note)[1])  # type: ignore[index]
            assert exact_delta(said, noises) <= delta * (1 + 1e-5)
            assert f"over all its {len(noises)} updates" in note
        else:
            assert "ε ≤ 0" in note
    assert 3 < infinite < 60
