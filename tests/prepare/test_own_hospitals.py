"""Hospitals as they come go from the folder to a model without an edit; `check` names every planted fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hostile_hospitals import CLASSES, write_hospitals
from planted_faults import FAULTS, Fault, found, sound_study
from suture.cli.common import console
from suture_results.actions import evaluate
from world import exit_of, suture


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sentence is broken within a path."""
    monkeypatch.setattr(console, "width", 500)


def test_hospitals_as_they_come_give_a_model(tmp_path: Path) -> None:
    study, out = tmp_path / "study", tmp_path / "r"
    sites = write_hospitals(tmp_path / "hospitals", 100)
    suture("init", study, *(f"--site={name}={at}" for name, at in sites.items()), "--yes")
    suture("check", study)
    small = ("--rounds", "6", "--set", "size=32", "--set", "lr=3e-3")
    suture("run", study, "--env", "local", "--out", out, *small)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["auroc"].keys() == set(CLASSES)
    assert metrics["mean_auroc"] > 0.7
    assert (out / "report.html").is_file()
    for site, figures in metrics["sites"].items():
        own = evaluate(out, study / site / "suture.toml").classes
        assert figures == pytest.approx({name: own[name].auroc for name in figures}, abs=1e-6)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study without a fault."""
    return sound_study(tmp_path_factory.mktemp("sound") / "study")


@pytest.mark.complete
def test_a_sound_study_has_no_problem_and_none_of_the_faults(sound: Path) -> None:
    said = suture("check", sound)
    assert "problem" not in said
    for fault in FAULTS:
        assert not found(fault, said, int(fault.stops)), f"{fault.name}: its sentence is there without it"


@pytest.mark.complete
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_check_names_a_planted_fault(
    fault: Fault,
    sound: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = shutil.copytree(sound, tmp_path / "study")
    fault.plant(study)
    code = exit_of(monkeypatch, "check", study)
    said = capsys.readouterr().out
    assert found(fault, said, code), said
