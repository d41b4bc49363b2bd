"""A study on one machine has exact figures; with --limits, those of a federation, which it forecasts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small_hospitals import small_study
from suture.core.errors import ConfigError
from suture.core.privacy import PrivacyConfig
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import read_table
from suture.execution.exact_figures import forecast, without_limits
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import run_job
from suture.execution.study import StudySites
from suture.methods.vanilla import VanillaFL
from suture.protocol.records import read_run
from suture_results.frames import open_results
from world import refused, suture

Runs = tuple[Path, Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A study of three sites with 20 validation images each, 11 of them with a mass at alpha."""
    study = small_study(tmp_path_factory.mktemp("exact") / "study", images=100, least=5)
    return with_settings(load_job(study), ["rounds=1"])


@pytest.fixture(scope="module")
def configs(job: Job) -> dict[str, SiteConfig]:
    assert isinstance(job.simulation, StudySites)
    return job.simulation.configs()


@pytest.fixture(scope="module")
def runs(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run folders without and with the limits."""
    folder = tmp_path_factory.mktemp("runs")
    limited = with_settings(job, ["simulation.limits=true"])
    return run_job(job, "local", folder / "a" / "same"), run_job(limited, "local", folder / "b" / "same")


def limited(configs: dict[str, SiteConfig], **limits: int) -> dict[str, SiteConfig]:
    """The sites with other limits; without any of them where none are given."""

    def privacy(own: PrivacyConfig) -> PrivacyConfig:
        return own.model_copy(update=limits) if limits else own.exact()

    return {site: c.model_copy(update={"privacy": privacy(c.privacy)}) for site, c in configs.items()}


@pytest.mark.complete
def test_figures_are_exact_and_the_model_is_the_same(configs: dict[str, SiteConfig], runs: Runs) -> None:
    models = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]
    exact, rounded = (json.loads((run / "metrics.json").read_text())["auroc"] for run in runs)
    steps = [value * 10 for value in rounded.values() if value is not None]
    assert steps == pytest.approx([round(step) for step in steps]), "on a grid of .1, .2 or .5"
    assert any(abs(10 * v - round(10 * v)) > 0.01 for v in exact.values() if v is not None)
    cards = [(run / "model" / "README.md").read_text() for run in runs]
    assert ["not for release" in card for card in cards] == [True, False]
    data = configs["gamma"].data
    part = read_table(data).table.of("test")
    shown = open_results(runs[0]).model().predict(data.root).rename(index=lambda path: Path(path).name)
    score = np.array([shown.loc[name, "Fibrosis"] for name in part.images])
    y = part.y[:, part.labels.index("Fibrosis")]
    pairs = score[y == 1][:, None] - score[y == 0][None]
    assert exact["Fibrosis"] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-6)


def test_a_rounded_figure_is_shown_with_its_step_and_a_check_forecasts_it(
    configs: dict[str, SiteConfig], runs: Runs
) -> None:
    exact, rounded = (open_results(run) for run in runs)
    assert exact.classes["step"].isna().all()
    assert not exact.sentences.cautions
    found = rounded.metrics
    assert set(found.steps) == {name for name, value in found.auroc.items() if value is not None}
    for site, at in found.site_steps.items():
        [line] = [line for line in forecast(configs[site]) if line.startswith("test: ")]
        for name, step in at.items():
            value = found.sites[site][name]
            assert value is not None
            assert value / step == pytest.approx(round(value / step))
            assert f"AUROC in steps of {step:g} (" in line
        [strict, none] = [limited(configs, min_count=30, min_loss=30)[site], limited(configs)[site]]
        assert all("min_count = 30" in line for line in forecast(strict))
        assert not forecast(none)
    [coarse] = [text for text in rounded.sentences.cautions if "steps" in text]
    assert f"{max(r.validation.auroc_step or 0 for r in rounded._history):g}" in coarse
    name, step = max(found.steps.items(), key=lambda pair: pair[1])
    for page in ("report.html", "model/README.md"):
        assert f"{found.auroc[name]:.3f} in steps of {step:g}" in (runs[1] / page).read_text()


def test_a_patient_with_most_positives_is_a_cause_of_its_own(tmp_path: Path) -> None:
    rows = [
        f"{i}.png,{'p' if i < 6 else i},{int(i < 8)},{'validation' if i < 40 else 'train'}" for i in range(60)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["image,patient,Mass,split", *rows, ""]))
    data = {"dataset": "hospital", "root": tmp_path, "table": tmp_path / "labels.csv"}
    [line] = forecast(SiteConfig.model_validate({"data": data}))
    assert "Mass (one patient has 6 of the 8 positives" in line


def test_one_line_says_what_the_limits_would_do(job: Job, runs: Runs) -> None:
    exact, rounded = (read_run(run).without_limits for run in runs)
    assert rounded == ""
    assert "no loss" not in exact, "20 images are enough"
    for site in ("alpha", "beta", "gamma"):
        assert f"{site} would send of validation: AUROC in steps of" in exact
    printed = suture("report", runs[0])
    assert "--limits" in printed
    assert "would send of" not in printed, "which the page says"
    assert exact in (runs[0] / "report.html").read_text().replace("&#39;", "'")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            {"min_count": 30, "min_loss": 30},
            "of validation: no AUROC of Mass, Nodule; no loss.",
        ),
        ({"min_count": 0, "min_loss": 20, "round_counts": 1}, "alpha would send of test: a rounded loss."),
        ({"min_count": 0, "min_loss": 21, "round_counts": 1}, "alpha would send of test: no loss."),
        ({"min_count": 0, "min_loss": 0, "round_counts": 2}, "counts in multiples of 2."),
        ({}, "would not change any"),
    ],
)
def test_the_sentence_knows_each_limit(
    job: Job, configs: dict[str, SiteConfig], limits: dict[str, int], said: str
) -> None:
    """20 validation and 20 test images at each site."""
    assert said in without_limits(limited(configs, **limits), job)


def test_a_run_is_continued_as_it_was_begun(job: Job, runs: Runs) -> None:
    longer = replace(job, rounds=2)
    for made, run in ((with_settings(longer, ["simulation.limits=true"]), runs[0]), (longer, runs[1])):
        with refused("--limits", by=ConfigError):
            run_job(made, "local", run, resume=True)


def test_what_protects_training_stays(job: Job, tmp_path: Path) -> None:
    """Clipping, noise and ε are no limits of disclosure; what stays here is not counted."""
    study = small_study(tmp_path / "study", least=5)
    config = study / "alpha" / "suture.toml"
    config.write_text(config.read_text().replace('"all"', '"own"') + "clip = 1.0\nmax_answers = 7\n")
    own = load_site_config(config).privacy
    free: dict[str, Any] = dict.fromkeys(("max_answers", "max_figures", "max_experiments"), 10**9)
    free |= {"label_view": "all", "min_count": 0, "min_loss": 0, "round_counts": 1}
    for limits, expected in ((False, own.model_copy(update=free)), (True, own)):
        StudySites(str(study), limits=limits).prepare(tmp_path / "run", tmp_path, 1, job.method)
        assert load_site_config(tmp_path / "run" / "alpha" / "suture.toml").privacy == expected
    sites = StudySites(str(study)).configs()
    assert "alpha would refuse" in without_limits(sites, replace(job, method=VanillaFL()))
    assert "refuse" not in without_limits(sites, job)


def test_a_site_that_cannot_be_read_ends_no_run_by_its_sentence(
    job: Job, configs: dict[str, SiteConfig]
) -> None:
    data = configs["alpha"].data.model_copy(update={"table": Path("nowhere.csv")})
    lost = configs["alpha"].model_copy(update={"data": data})
    said = without_limits({**configs, "alpha": lost}, job)
    assert "alpha would" not in said, "the site reports it"
    assert "beta would" in said
