"""`suture recommend`: what it says of a study, and that the command that it prints runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from small_hospitals import EVERY, LABELS, small_study, write_hospital
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError
from suture.execution.job import load_job, with_settings
from suture_prepare.recommend import METHODS, SiteFacts, commands, facts_of, reasons


def called(*words: str) -> Result:
    """`suture WORDS`."""
    return CliRunner().invoke(app, [*words])


@pytest.mark.complete
def test_the_command_of_a_study_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_study(tmp_path / "study")

    found = called("recommend", "study")

    assert found.exit_code == 0, found.output
    assert "3 sites, 4 classes." in found.output
    assert "2 of 4 classes are annotated at one site only." in found.output
    *_, command = found.output.splitlines()
    start, *words = shlex.split(command)
    assert (start, words[:2]) == ("suture", ["run", "study"])
    ran = called(*words, "--seeds", "1", "--rounds", "1")  # the last of an option holds
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "runs" / "study-comparison" / "comparison.html").is_file()


def test_the_sites_of_a_job_that_simulates_them_are_read_too(tmp_path: Path) -> None:
    found = called("recommend", "demo", "--set", "simulation.images=30", "--set", "simulation.held_out=30")

    assert found.exit_code == 0, found.output
    assert "3 sites, 10 classes." in found.output
    lines = found.output.splitlines()
    assert lines[-1] == (
        "suture run demo --env local --set simulation.images=30 --set simulation.held_out=30 "
        "--set method=vanilla"
    )


def test_a_method_that_a_site_refuses_is_not_recommended(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    write_hospital(study / "delta", ("Hernia", "Mass"), 25, 9, view="own")

    found = called("recommend", str(study))

    assert found.exit_code == 0, found.output
    assert "not possible here: combined: delta" in found.output
    assert "--compare" in found.output
    assert "vanilla" not in found.output.splitlines()[-1]


def test_the_control_alone_is_left_where_every_site_annotates_every_class(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    for seed, name in enumerate(LABELS):
        folder = study / name
        for file in folder.rglob("*"):
            file.unlink() if file.is_file() else None
        (folder / "images").rmdir()
        write_hospital(folder, EVERY, 25, seed)

    found = called("recommend", str(study))

    assert "every site annotates every class" in found.output
    assert found.output.splitlines()[-1].endswith("--compare vanilla --seeds 3")


def test_a_folder_without_sites_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    found = called("recommend", str(tmp_path / "empty"))

    assert found.exit_code
    assert isinstance(found.exception, ConfigError | SystemExit)


def test_one_site_alone_is_refused(tmp_path: Path) -> None:
    configs = load_job(small_study(tmp_path / "study")).simulation.configs()

    with pytest.raises(DataError, match=r"second site.*alpha"):
        facts_of({"alpha": configs["alpha"]})


def test_a_class_of_labels_toml_counts_as_the_one_that_it_is(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    before = len(
        {
            name
            for site in facts_of(load_job(study).simulation.configs())[0].values()
            for name in site.positives
        }
    )
    called("labels", str(study), "--same", f"{EVERY[0]}={EVERY[1]}", "--by", "me")
    job = load_job(study)
    facts, _ = facts_of(job.simulation.configs(), job.label_map)
    assert len({name for site in facts.values() for name in site.positives}) == before - 1


def test_reasons_are_in_the_users_words() -> None:
    sites = {
        "alpha": SiteFacts(50, {"Mass": 5, "Edema": 1}),
        "beta": SiteFacts(150, {"Mass": 15}),
    }

    said = list(reasons(sites))

    assert said[1] == "1 of 2 classes is annotated at one site only."
    assert said[2].startswith("37.5% of the pairs of training image and class are of a class that")  # 150/400
    assert said[3] == "Positive training images of a class (median): 10.5."  # of 20 and 1


@pytest.mark.parametrize("name", METHODS)
def test_the_settings_of_each_method_are_those_of_a_job(name: str) -> None:
    assert with_settings(load_job("demo"), list(METHODS[name])).method.about.name == name


@pytest.mark.parametrize("own", ["method=vanilla", "method.name=vanilla"])
def test_the_method_that_is_tried_replaces_the_users_own(own: str) -> None:
    lines = [*commands("demo", load_job("demo"), [own, "rounds=3"], ["surgical", "vanilla"])]

    assert lines == [
        f"suture run demo --env local --set rounds=3 --set method={name}" for name in ("surgical", "vanilla")
    ]
