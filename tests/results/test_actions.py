"""The commands as functions: what a person does with a study and its model."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import suture
from small_hospitals import small_study
from suture.cli import app
from suture.core.errors import ConfigError, DataError
from suture.data.config import load_site_config
from suture.data.readers import read_table
from suture.learning.metrics import auroc
from suture.protocol.decisions import DecisionSettings


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_study(tmp_path_factory.mktemp("actions") / "study", images=60)


@pytest.fixture(scope="module")
def run(study: Path) -> Path:
    return suture.run(study, out=study.parent / "run", rounds=1).folder


@pytest.fixture
def external(study: Path, tmp_path: Path) -> Path:
    """A table as somebody else has it: no splits, two images of each patient."""
    table = read_table(load_site_config(study / "gamma" / "suture.toml").data).table
    path = tmp_path / "external.csv"
    rows = [
        [str(table.root / name), f"q{i // 2}", *("" if np.isnan(v) else int(v) for v in y)]
        for i, (name, y) in enumerate(zip(table.images, table.y, strict=True))
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["image", "patient", *table.labels], *rows])
    return path


@pytest.mark.complete
def test_a_run_ends_with_the_figures_of_its_model(study: Path, run: Path) -> None:
    told = suture.open_results(run).metrics.sites
    for site, figures in told.items():
        own = suture.evaluate(run, study / site / "suture.toml").classes
        assert figures.keys() == own.keys()
        for name, value in figures.items():
            assert value == pytest.approx(own[name].auroc, abs=1e-6)


@pytest.mark.complete
def test_a_table_without_splits_is_used_whole_and_one_with_splits_for_its_test_images(
    study: Path, run: Path, external: Path
) -> None:
    whole = suture.evaluate(run, external)
    assert len(whole.patients) == 60
    assert len(suture.evaluate(run, study / "gamma").patients) == 12
    assert len(suture.evaluate(run, study / "gamma", "all").patients) == 60
    assert suture.compare(run, run, external)["Fibrosis"].difference.difference == 0


@pytest.mark.parametrize("how", ["mean", "max"])
def test_patients_are_scored_by_their_images(run: Path, external: Path, how: str) -> None:
    images = suture.evaluate(run, external)
    column = images.labels.index("Fibrosis")
    frame = pd.DataFrame({"p": images.scores[:, column], "y": images.y[:, column], "who": images.patients})
    by = frame.groupby("who").agg({"p": how, "y": "max"})
    found = suture.evaluate(run, external, per_patient=how)  # type: ignore[arg-type]
    assert len(found.patients) == 30
    assert found.classes["Fibrosis"].auroc == pytest.approx(auroc(by["y"], by["p"]), abs=1e-6)
    assert found.classes["Fibrosis"].positives == int(by["y"].sum())


def test_scores_and_predictions_name_images_and_patients_alike(
    run: Path, external: Path, tmp_path: Path
) -> None:
    words = ["evaluate", str(run), str(external), "--scores", str(tmp_path / "scores.csv")]
    assert CliRunner().invoke(app, words).exit_code == 0
    words = ["predict", str(run / "model"), str(external), "-o", str(tmp_path / "predicted.csv")]
    assert CliRunner().invoke(app, words).exit_code == 0
    scores, predicted = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("scores", "predicted"))
    both = scores.merge(predicted, on=["image", "patient"], validate="one_to_one")
    assert len(both) == 60
    assert np.allclose(both["Fibrosis_x"], both["Fibrosis_y"], atol=2e-6)


@pytest.mark.parametrize(("kind", "left"), [(0, 0), (0, 9), (1, 9)])
def test_a_class_of_few_images_of_a_kind_gets_no_threshold(
    run: Path, external: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: int, left: int
) -> None:
    frame = pd.read_csv(external)
    frame.loc[frame.index[frame["Fibrosis"] == kind][left:], "Fibrosis"] = np.nan
    frame.to_csv(external, index=False)
    points = suture.decide(shutil.copytree(run, tmp_path / "run"), external)
    assert points
    assert "Fibrosis" not in points
    told = next(message for message in caplog.messages if "Fibrosis" in message)
    assert f"{left} {('negatives', 'positives')[kind]}" in told
    printed = CliRunner().invoke(app, ["evaluate", str(run), str(external)]).output
    assert ("(few)" in next(line for line in printed.splitlines() if "Fibrosis" in line)) is (left > 0)
    assert math.isnan(suture.compare(run, run, external)["Fibrosis"].difference.p)
    frame.drop(columns=points).to_csv(external, index=False)
    with pytest.raises(DataError, match="no class of the model has 10 positive and 10 negative"):
        suture.decide(shutil.copytree(run, tmp_path / "other"), external)


@pytest.mark.complete
def test_thresholds_are_fitted_after_training(study: Path, external: Path, tmp_path: Path) -> None:
    run = suture.run(study, out=tmp_path / "run", rounds=1).folder
    weights = (run / "model" / "model.safetensors").read_bytes()
    points = suture.decide(run, external, settings=DecisionSettings(sensitivity=0.8))
    done = suture.evaluate(run, external)
    for name, point in points.items():
        y, p = done.y[:, done.labels.index(name)], done.scores[:, done.labels.index(name)]
        assert point.sensitivity == pytest.approx((p[y == 1] >= point.threshold).mean())
        assert point.positives == (y == 1).sum()
        assert 0.8 <= point.sensitivity < 0.8 + 1 / point.positives
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    frame = run / "predicted.csv"
    words = ["predict", str(run / "model"), str(external), "-o", str(frame), "--decide", "all"]
    assert CliRunner().invoke(app, words).exit_code == 0
    found = pd.read_csv(frame)
    name, point = next(iter(points.items()))
    assert ((found[name] >= point.threshold) == (found[f"{name} decision"] == "above")).mean() > 0.99
    with pytest.raises(ConfigError, match="--overwrite"):
        suture.decide(run, external)
    words = ["decide", str(run), str(external), "--specificity", "0.7", "--overwrite"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    described = json.loads((run / "model" / "model.json").read_text())["decisions"]
    assert described["settings"]["rule"] == "specificity"


def test_a_notebook_shows_results_jobs_and_models(study: Path, run: Path) -> None:
    results = suture.open_results(run)
    assert "Fibrosis" in results._repr_html_()
    assert "Fibrosis" in results.model()._repr_html_()
    assert "method.local.lr" in suture.load_job(study)._repr_html_()


def test_a_study_is_begun_and_checked_from_python(study: Path, tmp_path: Path, external: Path) -> None:
    new = tmp_path / "new"
    files = suture.init(new, {"gamma": external})
    assert {path.name for path in files} >= {"suture.toml", "job.toml"}
    done = suture.check(new)
    assert done.problems == []
    assert done.page.is_file()
