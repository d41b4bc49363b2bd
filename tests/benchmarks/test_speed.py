"""The command of benchmarks/speed.py: what fails, what is compared, and its parts."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import speed
import torch
from figures import Figure, Options, Target
from harness import command
from parts.sites import write_site

from suture.core.files import read_records
from suture.execution.job import check_federated
from suture.methods import method_class
from suture.models import ModelSpec


@pytest.fixture
def speed_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call the command with one part, `rounds`, which has these figures or raises this error."""

    def call(answer: list[Figure] | Exception, *words: str) -> dict[str, Any]:
        def apart(*_: Any) -> tuple[list[Figure], int]:
            if isinstance(answer, Exception):
                raise answer
            return answer, 1

        monkeypatch.setattr(speed, "apart", apart)
        out = tmp_path / "speed.json"
        monkeypatch.setattr(sys, "argv", ["speed.py", "--only", "rounds", "--out", str(out), *words])
        command(speed.main)
        return dict(json.loads(out.read_text()))

    return call


LOOP = Figure("rounds", "a round", "s", (1.0, 2.0, 3.0), "tensors", (1.0,), (Target("figure", "≤", 1.0),))


@pytest.mark.complete
def test_a_target_that_is_not_reached_is_said_and_no_failure(speed_of: Any, tmp_path: Path) -> None:
    found = speed_of([LOOP])
    assert found["parts"]["rounds"]["torch threads"] == 1
    row = next(line for line in (tmp_path / "speed.md").read_text().splitlines() if "a round" in line)
    assert row == (
        "| rounds | a round | s | 3 | 2.00 (1.00-3.00) | tensors | 1.00 | 2.00 (1.00-3.00) | ≤ 1 | no |"
    )


@pytest.mark.complete
def test_a_part_that_fails_is_a_row_and_the_exit_code(speed_of: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        speed_of(OSError("the disk is full"))
    assert ended.value.code == 1
    assert "not measured: OSError: the disk is full" in (tmp_path / "speed.md").read_text()


def test_after_a_part_that_fails_the_others_are_measured_and_it_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(_: Any, part: str, __: Options) -> tuple[list[Figure], int]:
        if part != "scale":
            raise OSError("the disk is full")
        return [Figure(part, "a round", "s", (1.0,))], 1

    monkeypatch.setattr(speed, "apart", apart)
    words = ["--quick", "--only", "rounds", "scale", "poc", "--out", str(tmp_path / "speed.json")]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    with pytest.raises(SystemExit) as ended:
        command(speed.main)
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "not measured, or not whole: rounds, poc"
    assert "| scale | a round | s | 1 | 1.00 |" in (tmp_path / "speed.md").read_text()


@pytest.mark.complete
def test_an_absent_anchor_is_a_row_and_the_exit_code(speed_of: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        speed_of([Figure("rounds", "a round", "s", (1.0,), "flwr", missing="`make flwr` adds it")])
    assert ended.value.code == 1
    assert "not measured: `make flwr` adds it" in (tmp_path / "speed.md").read_text()


@pytest.mark.complete
def test_a_run_is_compared_with_an_earlier_one_of_the_same_settings(speed_of: Any, tmp_path: Path) -> None:
    speed_of([LOOP])
    before = tmp_path / "before.json"
    (tmp_path / "speed.json").rename(before)
    slow = Figure(LOOP.part, LOOP.name, LOOP.unit, (4.0, 4.0, 4.0), LOOP.anchor, LOOP.beside, LOOP.targets)
    speed_of([slow], "--against", str(before))
    assert "| 2.00 slower |" in (tmp_path / "speed.md").read_text()
    with pytest.raises(SystemExit, match="was measured without --quick"):
        speed_of([slow], "--quick", "--against", str(before))
    before.write_text("{}")
    with pytest.raises(SystemExit, match="holds no figures of an earlier run: KeyError"):
        speed_of([slow], "--against", str(before))


@pytest.mark.parametrize("part", speed.PARTS)
def test_each_part_is_a_module_that_has_figures(part: str) -> None:
    assert callable(importlib.import_module(f"parts.{part}").figures)


def test_the_rounds_without_flwr_name_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = importlib.import_module("parts.rounds")
    monkeypatch.setattr(rounds, "FLWR", Path("/no/flwr"))
    monkeypatch.setattr(rounds, "MODELS", {"0.25 MB": rounds.MODELS["0.25 MB"]})
    cost = rounds.Cost([1.0, 1.0, 0.1], [0.1, 0.1, 0.1], 10, {"server": 1.0, "site": 1.0})
    monkeypatch.setattr(rounds, "run", lambda *_: cost)
    found = rounds.figures(Options(True))
    absent = [figure for figure in found if figure.anchor == "flwr's simulation"]
    assert len(absent) == 3
    assert all(figure.missing == "/no/flwr is absent; `make flwr` adds it" for figure in absent)


def test_the_rounds_train_nothing_and_other_processes_find_their_method(tmp_path: Path) -> None:
    rounds, untrained = (importlib.import_module(f"parts.{name}") for name in ("rounds", "untrained"))
    with untrained.installed(tmp_path):
        assert method_class("untrained") is untrained.Untrained
        check_federated(untrained.Untrained())
    for site in (*rounds.SITES, "server"):
        write_site(tmp_path / "run" / "sites" / site)
    rounds.loop(rounds.Idle(rounds.MODELS["0.25 MB"], 2), tmp_path / "run")
    lines = read_records(tmp_path / "run" / "history.jsonl")
    assert [line["status"] for line in lines] == ["committed"] * 2
    assert {site["train_loss"] for line in lines for site in line["sites"].values()} == {None}


def test_the_part_of_a_gpu_measures_any_device_and_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = importlib.import_module("parts.gpu")
    found = gpu.measured(ModelSpec("cnn", size=16), torch.device("cpu"), images=128, repeats=1)
    assert [figure.name for figure in found] == ["cnn, 16 px, training", "cnn, 16 px, evaluation"]
    assert all(ratio > 0 for figure in found for ratio in figure.ratios)
    assert found[0].targets == (Target("ratio", "≥", 0.9),)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in speed.here()
    with pytest.raises(RuntimeError, match="no CUDA device"):
        gpu.figures(Options(True))
