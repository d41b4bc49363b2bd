"""`--json`: one line, with the figures of the Python API; `suture list runs`, and a quiet run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import suture as api
from example_run import metrics_record, run_record, write_run
from suture.cli.common import plain
from suture.core import VERSION
from suture.core.errors import ConfigError
from suture.execution.catalogue import rows, runs_below
from suture_prepare.recommend import advise
from suture_results.saved_models import as_metrics
from world import Trained, exit_of, refused, suture

RETURNED: dict[str, Callable[[Path, Path], Any]] = {
    "evaluate {model} {study}/alpha": lambda model, study: as_metrics(api.evaluate(model, study / "alpha")),
    "compare {model} {model} {study}/alpha": lambda model, study: api.compare(model, model, study / "alpha"),
    "decide {model} {study}/alpha --split train --overwrite": lambda model, study: api.decide(
        model, study / "alpha", "train", overwrite=True
    ),
    "check {study}": lambda _, study: api.check(study),
    "recommend {study}": lambda _, study: advise(str(study), []),
    "list priors": lambda *_: {name: text for kind, name, text in rows() if kind == "prior"},
    "list runs {study}/..": lambda _, study: runs_below(study / ".."),
}


@pytest.mark.complete
@pytest.mark.parametrize("words", RETURNED)
def test_a_command_prints_a_line_with_what_the_function_returns(
    words: str,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(trained.run / "model", tmp_path / "model")
    expected = plain(RETURNED[words](model, trained.study))
    capsys.readouterr()
    given = words.format(model=model, study=trained.study).split()
    assert exit_of(monkeypatch, *given, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"suture": VERSION, "command": given[0], "result": expected}
    assert expected


def test_plain_values_are_those_of_json() -> None:
    assert plain({1: (math.nan, Path("a"), None, True, 0.5)}) == {"1": [None, "a", None, True, 0.5]}


@pytest.mark.complete
def test_a_study_with_a_problem_is_json_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Trained
) -> None:
    study = shutil.copytree(trained.study, tmp_path / "study")
    (study / "alpha" / "labels.csv").unlink()
    assert exit_of(monkeypatch, "check", study, "--json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["result"]["sites"]["alpha"]["problems"]
    assert said.err.startswith("error: ")


def test_runs_are_listed_the_newest_first_and_a_damaged_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "a" / "old", run_record() | {"started": "2020-01-01T00:00:00+00:00"})
    write_run(tmp_path / "new", run_record(), metrics=metrics_record())
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    new, old = runs_below(tmp_path)
    assert (new.folder.name, old.folder.name, old.mean_auroc) == ("new", "old", None)
    assert new.mean_auroc == pytest.approx(api.open_results(tmp_path / "new").mean_auroc)
    assert str(tmp_path / "torn") in caplog.text
    monkeypatch.chdir(tmp_path)
    assert [line.split()[0] for line in suture("list", "runs", ".").splitlines()] == ["run", "new", "a/old"]
    with refused(tmp_path / "nowhere", by=ConfigError):
        suture("list", "runs", tmp_path / "nowhere")


@pytest.mark.complete
def test_a_quiet_run_prints_the_path_of_its_report(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert exit_of(monkeypatch, "run", trained.study, "--rounds", 1, "--out", out, "-q") == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    assert (out / "report.html").is_file()
    assert exit_of(monkeypatch, "run", "demo", "--quiet", "--watch") == 2
