"""A study on one machine has exact figures; with --limits, those of a federation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from small_hospitals import small_study
from suture.cli import app
from suture.core.errors import ConfigError
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import read_table
from suture.execution.exact_figures import forecast, without_limits
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import run_job
from suture.execution.study import StudySites
from suture.methods.vanilla import VanillaFL
from suture.protocol.records import read_run
from suture_results.frames import open_results


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A study of three sites with 20 validation images each, 11 of them with a mass at alpha."""
    study = small_study(tmp_path_factory.mktemp("exact") / "study", images=100, least=5)
    return with_settings(load_job(study), ["rounds=1"])


@pytest.fixture(scope="module")
def runs(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run folders without and with the limits."""
    folder = tmp_path_factory.mktemp("runs")
    limited = with_settings(job, ["simulation.limits=true"])
    return run_job(job, "local", folder / "a" / "same"), run_job(limited, "local", folder / "b" / "same")


@pytest.mark.complete
def test_figures_are_exact_and_the_model_is_the_same(runs: tuple[Path, Path]) -> None:
    exact, limited = runs
    models = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]
    figures = [json.loads((run / "metrics.json").read_text())["auroc"] for run in (exact, limited)]
    assert figures[0] != figures[1]
    steps = [value * 10 for value in figures[1].values() if value is not None]
    assert steps == pytest.approx([round(step) for step in steps]), "on a grid of .1, .2 or .5"
    assert any(abs(10 * v - round(10 * v)) > 0.01 for v in figures[0].values() if v is not None)


@pytest.mark.complete
def test_an_exact_figure_is_that_of_the_model_on_the_sites_images(job: Job, runs: tuple[Path, Path]) -> None:
    scores = open_results(runs[0]).model()
    found = json.loads((runs[0] / "metrics.json").read_text())
    assert isinstance(job.simulation, StudySites)
    config = job.simulation.configs()["gamma"]
    part = read_table(config.data).table.of("test")
    shown = scores.predict(config.data.root).rename(index=lambda path: Path(path).name)
    column = part.labels.index("Fibrosis")
    score = np.array([shown.loc[name, "Fibrosis"] for name in part.images])
    y = part.y[:, column]
    pairs = score[y == 1][:, None] - score[y == 0][None]
    assert found["auroc"]["Fibrosis"] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-6)


def test_a_rounded_figure_is_shown_with_its_step(runs: tuple[Path, Path]) -> None:
    exact, limited = (open_results(run) for run in runs)
    assert exact.classes["step"].isna().all()
    assert not exact.sentences.cautions
    found = limited.metrics
    assert set(found.steps) == {name for name, value in found.auroc.items() if value is not None}
    for site, at in found.site_steps.items():
        for name, step in at.items():
            value = found.sites[site][name]
            assert value is not None
            assert value / step == pytest.approx(round(value / step))
    [coarse] = [text for text in limited.sentences.cautions if "steps" in text]
    assert f"{max(r.validation.auroc_step or 0 for r in limited._history):g}" in coarse
    name, step = max(found.steps.items(), key=lambda pair: pair[1])
    shown = f"{found.auroc[name]:.3f} in steps of {step:g}"
    assert shown in (runs[1] / "report.html").read_text()
    assert shown in (runs[1] / "model" / "README.md").read_text()


def test_a_card_of_exact_figures_is_not_for_release(runs: tuple[Path, Path]) -> None:
    cards = [(run / "model" / "README.md").read_text() for run in runs]
    assert ["Exact figures, not for release" in card for card in cards] == [True, False]


def test_a_check_forecasts_the_steps_of_a_federation(job: Job, runs: tuple[Path, Path]) -> None:
    assert isinstance(job.simulation, StudySites)
    sent = open_results(runs[1]).metrics.site_steps
    for site, config in job.simulation.configs().items():
        [line] = [line for line in forecast(config) if line.startswith("test: ")]
        for step in {*sent[site].values()}:
            assert f"AUROC in steps of {step:g} (" in line
        strict = config.model_copy(update={"privacy": replace_limits(config.privacy, 30)})
        assert all("fewer than min_count = 30" in line for line in forecast(strict))
        assert not forecast(config.model_copy(update={"privacy": config.privacy.exact()}))


def test_a_patient_with_most_positives_is_a_cause_of_its_own(tmp_path: Path) -> None:
    rows = [
        f"{i}.png,{'p' if i < 6 else i},{int(i < 8)},{'validation' if i < 40 else 'train'}" for i in range(60)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["image,patient,Mass,split", *rows, ""]))
    data = {"dataset": "hospital", "root": tmp_path, "table": tmp_path / "labels.csv"}
    [line] = forecast(SiteConfig.model_validate({"data": data}))
    assert "Mass (one patient has 6 of the 8 positives" in line


def test_one_line_says_what_the_limits_would_do(job: Job, runs: tuple[Path, Path]) -> None:
    exact, limited = (read_run(run) for run in runs)
    assert limited.without_limits == ""
    assert "no loss" not in exact.without_limits, "20 images are enough"
    for site in ("alpha", "beta", "gamma"):
        assert f"{site} would send of validation: AUROC in steps of" in exact.without_limits
    printed = " ".join(CliRunner().invoke(app, ["report", str(runs[0])]).output.split())
    assert "this machine. In a federation (or with --limits) the sites' limits change some" in printed
    assert "would send of" not in printed
    assert exact.without_limits in (runs[0] / "report.html").read_text().replace("&#39;", "'")
    assert isinstance(job.simulation, StudySites)
    configs = job.simulation.configs()
    strict = {
        site: config.model_copy(update={"privacy": replace_limits(config.privacy, 30)})
        for site, config in configs.items()
    }
    said = without_limits(strict, job)
    assert "alpha would send of validation: no AUROC of Mass, Nodule; no loss. " in said
    none = {s: c.model_copy(update={"privacy": c.privacy.exact()}) for s, c in configs.items()}
    assert "would not change any" in without_limits(none, job)


def replace_limits(privacy: object, least: int) -> object:
    """The limits with another min_count and min_loss."""
    return privacy.model_copy(update={"min_count": least, "min_loss": least})  # type: ignore[attr-defined]


def test_a_run_is_continued_as_it_was_begun(job: Job, runs: tuple[Path, Path]) -> None:
    longer = replace(job, rounds=2)
    limited = with_settings(longer, ["simulation.limits=true"])
    with pytest.raises(ConfigError, match="without the sites' limits"):
        run_job(limited, "local", runs[0], resume=True)
    with pytest.raises(ConfigError, match="add --limits"):
        run_job(longer, "local", runs[1], resume=True)


def test_what_protects_training_stays(job: Job, tmp_path: Path) -> None:
    """Clipping, noise and ε are no limits of disclosure; what stays here is not counted."""
    study = small_study(tmp_path / "study", least=5)
    config = study / "alpha" / "suture.toml"
    config.write_text(config.read_text().replace('"all"', '"own"') + "clip = 1.0\nmax_answers = 7\n")
    own = load_site_config(config).privacy
    assert own.min_count == own.min_loss == 5
    free = dict.fromkeys(("max_answers", "max_figures", "max_experiments"), 10**9)
    free |= {"label_view": "all", "min_count": 0, "min_loss": 0, "round_counts": 1}
    for limits, expected in ((False, own.model_copy(update=free)), (True, own)):
        StudySites(str(study), limits=limits).prepare(tmp_path / "run", tmp_path, 1, job.method)
        assert load_site_config(tmp_path / "run" / "alpha" / "suture.toml").privacy == expected
    said = without_limits(StudySites(str(study)).configs(), replace(job, method=VanillaFL()))
    assert "alpha would refuse Vanilla FL" in said
    assert "refuse" not in without_limits(StudySites(str(study)).configs(), job)


def test_a_site_that_cannot_be_read_ends_no_run_by_its_sentence(job: Job) -> None:
    assert isinstance(job.simulation, StudySites)
    configs = job.simulation.configs()
    lost = configs["alpha"].model_copy(
        update={"data": configs["alpha"].data.model_copy(update={"table": Path("nowhere.csv")})}
    )
    said = without_limits({**configs, "alpha": lost}, job)
    assert "alpha would" not in said, "the site reports it"
    assert "beta would" in said


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"min_count": 0, "min_loss": 20, "round_counts": 1}, "a rounded loss"),
        ({"min_count": 0, "min_loss": 21, "round_counts": 1}, "no loss"),
        ({"min_count": 0, "min_loss": 0, "round_counts": 2}, "counts in multiples of 2"),
    ],
)
def test_the_sentence_knows_each_limit(job: Job, limits: dict[str, int], said: str) -> None:
    """20 validation and 20 test images at each site."""
    assert isinstance(job.simulation, StudySites)
    configs = {
        site: config.model_copy(update={"privacy": config.privacy.model_copy(update=limits)})
        for site, config in job.simulation.configs().items()
    }
    assert f"alpha would send of test: {said}." in without_limits(configs, job)
