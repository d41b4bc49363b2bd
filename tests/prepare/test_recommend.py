"""`suture recommend`: what it says of a study, and that the command that it prints runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from small_hospitals import EVERY, JOB_TOML, LABELS, small_study, write_hospital
from suture.core.errors import ConfigError, DataError
from suture.execution.job import load_job, with_settings
from suture_prepare.recommend import METHODS, SiteFacts, commands, facts_of, reasons
from world import refused, suture


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return small_study(tmp_path / "study")


@pytest.mark.complete
def test_the_command_of_a_study_runs_as_it_is_printed(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study.parent)
    said = suture("recommend", "study")
    assert all(fact in said for fact in ("Start with surgical.\n3 sites, 4 classes", "2 of 4 classes"))
    start, *words = shlex.split(said.splitlines()[-1])
    assert (start, words[:2]) == ("suture", ["run", "study"])
    suture(*words, "--seeds", "1", "--rounds", "1")  # the last of an option holds
    assert (study.parent / "runs" / "study-comparison" / "comparison.html").is_file()


def test_the_sites_of_a_job_that_simulates_them_are_read_too() -> None:
    few = "--set simulation.images=30 --set simulation.held_out=30"
    said = suture("recommend", "demo", *few.split())
    assert "3 sites, 10 classes" in said
    assert said.splitlines()[-1] == f"suture run demo --env local {few} --set method=vanilla"


def test_a_method_that_a_site_refuses_is_not_recommended(study: Path) -> None:
    write_hospital(study / "delta", ("Hernia", "Mass"), 25, 9, view="own")
    said = suture("recommend", study)
    assert 'combined, vanilla ([privacy] label_view = "all" of delta allows it)' in said
    assert "--compare" in said
    assert "vanilla" not in said.splitlines()[-1]


def test_the_control_alone_is_left_where_every_site_annotates_every_class(tmp_path: Path) -> None:
    for seed, name in enumerate(LABELS):
        write_hospital(tmp_path / name, EVERY, 25, seed)
    (tmp_path / "job.toml").write_text(JOB_TOML)
    assert suture("recommend", tmp_path).splitlines()[-1].endswith("--compare vanilla --seeds 3")


def test_without_two_sites_there_is_nothing_to_recommend(study: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refused(tmp_path / "empty", by=ConfigError):
        suture("recommend", tmp_path / "empty")
    with refused("alpha", by=DataError):
        facts_of({"alpha": load_job(study).simulation.configs()["alpha"]})


def test_a_class_of_labels_toml_counts_as_the_one_that_it_is(study: Path) -> None:
    def classes() -> set[str]:
        job = load_job(study)
        facts, _ = facts_of(job.simulation.configs(), job.label_map)
        return {name for site in facts.values() for name in site.positives}

    before = classes()
    suture("labels", study, "--same", f"{EVERY[0]}={EVERY[1]}", "--by", "me")
    assert classes() == before - {EVERY[0]}


def test_reasons_are_in_figures() -> None:
    sites = {"alpha": SiteFacts(50, {"Mass": 5, "Edema": 1}), "beta": SiteFacts(150, {"Mass": 15})}
    _, alone, pairs, median = reasons(sites)
    assert "1 of 2 classes" in alone
    assert "37.5%" in pairs  # 150/400
    assert "10.5" in median  # of 20 and 1


@pytest.mark.parametrize("name", METHODS)
def test_the_settings_of_each_method_are_those_of_a_job(name: str) -> None:
    assert with_settings(load_job("demo"), list(METHODS[name])).method.about.name == name


@pytest.mark.parametrize("own", ["method=vanilla", "method.name=vanilla"])
def test_the_method_that_is_tried_replaces_the_users_own(own: str) -> None:
    lines = [*commands("demo", load_job("demo"), [own, "rounds=3"], ["surgical", "vanilla"])]
    assert lines == [
        f"suture run demo --env local --set rounds=3 --set method={name}" for name in ("surgical", "vanilla")
    ]
