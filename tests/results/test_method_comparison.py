"""Methods compared on one's own study."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from small_hospitals import small_study
from suture.cli import app
from suture.core.errors import ConfigError
from suture.data.readers import read_table
from suture.execution.job import load_job, with_settings
from suture.execution.study import StudySites
from suture_results.method_comparison import _fold, compare_methods
from suture_results.saved_models import evaluate, models_of


def hide_names(site: Path) -> None:
    """Set the view that `suture init` writes."""
    config = site / "suture.toml"
    config.write_text(config.read_text().replace('label_view = "all"', 'label_view = "own"'))


@pytest.mark.complete
def test_each_site_alone_comes_first_and_figures_are_those_of_the_models(tmp_path: Path) -> None:
    study, out = small_study(tmp_path / "study", images=60), tmp_path / "out"
    hide_names(study / "beta")
    words = ["run", str(study), "--compare", "surgical,vanilla", "--seeds", "2", "--rounds", "1"]
    result = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert result.exit_code == 0, result.output
    [told] = (line for line in result.output.splitlines() if "label_view" in line)
    assert "beta would refuse Vanilla FL" in told
    found = json.loads((out / "comparison.json").read_text())
    assert list(found["methods"]) == ["individual", "surgical", "vanilla"]
    configs = StudySites(str(study)).configs()
    expected = {}
    for name in found["methods"]:
        areas = []
        for seed in (3, 4):
            models = models_of(out / "runs" / f"{name}-all-{seed}")
            done = {s: evaluate(models.get(s) or models["global"], c, "test") for s, c in configs.items()}
            areas.append([done[s].classes[n].auroc for s, of in found["sites"].items() for n in of])
        expected[name] = np.array(areas, dtype=float)
        assert found["methods"][name]["mean"][0] == pytest.approx(expected[name].mean())
        assert found["methods"][name]["seeds"] == pytest.approx(expected[name].mean(axis=1).tolist())
    difference, low, high = found["methods"]["surgical"]["difference"]
    assert difference == pytest.approx((expected["surgical"] - expected["individual"]).mean())
    assert low <= difference <= high
    page = (out / "comparison.html").read_text()
    assert page.index("What each site alone") < page.index("<h2>Methods")
    times = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert CliRunner().invoke(app, [*words, "--out", str(out)]).exit_code == 0
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}, "kept"
    other = CliRunner().invoke(app, [*words, "--set", "method.local.lr=0.1", "--out", str(out)])
    assert isinstance(other.exception, ConfigError)


def test_with_limits_a_view_that_refuses_a_method_is_told_before_any_training(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    hide_names(study / "beta")
    job = with_settings(load_job(study), ["simulation.limits=true"])
    with pytest.raises(ConfigError, match=r'beta: .*label_view = "all"'):
        compare_methods(job, ["surgical", "vanilla"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.complete
def test_folds_test_each_patient_once(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    configs = StudySites(str(study)).configs()
    tested: list[str] = []
    for k in range(5):
        for site, config in _fold(configs, tmp_path / str(k), k, 5).configs().items():
            table = read_table(config.data).table
            parts = {split: set(table.of(split).patients) for split in ("train", "validation", "test")}
            assert all(len(found) >= 5 for found in parts.values())
            assert len(set.union(*parts.values())) == sum(map(len, parts.values())) == 25
            tested += [f"{site} {patient}" for patient in parts["test"]]
    assert len(tested) == len(set(tested)) == 75
    job = with_settings(load_job(study), ["rounds=1"])
    done = compare_methods(job, ["surgical"], tmp_path / "out", folds=3)
    assert done.images == {"alpha": 25, "beta": 25, "gamma": 25}
    with pytest.raises(ConfigError, match="3 or more"):
        compare_methods(job, ["surgical"], tmp_path / "other", folds=2)
