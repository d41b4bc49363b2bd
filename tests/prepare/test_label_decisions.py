"""`suture labels`: the lists of a study's sites, and decisions that its job then follows."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import ConfigError
from suture.execution.job import load_job

RUNNER = CliRunner()

HEADERS = {
    "alpha": "Lung Opacity,Lung Lesion",
    "beta": "Consolidation,Lesion of the Lung",
    "gamma": "Lung Lesion",
}


def suture(*words: str) -> str:
    """Run a command; an error of the user is raised."""
    result = RUNNER.invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of three sites, whose tables alone are read."""
    for site, header in HEADERS.items():
        (tmp_path / site).mkdir()
        cells = ",".join("1" for _ in header.split(","))
        (tmp_path / site / "labels.csv").write_text(f"image,patient,split,{header}\na.png,1,train,{cells}\n")
        text = '[data]\ndataset = "hospital"\nroot = "."\ntable = "labels.csv"\n'
        (tmp_path / site / "suture.toml").write_text(text)
    (tmp_path / "job.toml").write_text(
        'name = "x"\nrounds = 1\n[model]\nname = "cnn"\n[method]\nname = "partial"\n'
    )
    return tmp_path


def test_lists_side_by_side_and_a_proposal_that_merges_nothing(study: Path) -> None:
    said = suture("labels", str(study))
    assert "Lung Lesion x x 2" in said
    assert "Lung Opacity: Consolidation, Lung Lesion" in said
    assert "1.00 Lesion Of The Lung the same as Lung Lesion" in said
    words = f"suture labels {shlex.quote(str(study))} --same 'Lesion Of The Lung=Lung Lesion' --by NAME"
    assert words in said
    assert not (study / "labels.toml").exists()
    assert load_job(study).label_map == {}


def test_a_decision_is_recorded_with_who_and_when_and_the_job_follows_it(study: Path) -> None:
    said = suture("labels", str(study), "--same", "lesion of the lung=Lung Lesion", "--by", "M. Ruiz")
    assert "Lung Lesion x x x 3" in said
    assert "the same as" not in said
    assert "decide" not in suture("labels", str(study)), "nothing is left to decide"
    text = (study / "labels.toml").read_text()
    assert 'by = "M. Ruiz"' in text
    assert f"on = {datetime.date.today().isoformat()}" in text
    job = load_job(study)
    assert (job.label_map, job.accept_labels) == ({"Lesion Of The Lung": "Lung Lesion"}, False)

    suture("labels", str(study), "--different", "Lesion of the Lung=Lung Lesion", "--by", "M. Ruiz")
    job = load_job(study)
    assert (job.label_map, job.accept_labels) == ({}, ("Lesion Of The Lung",))
    assert len((study / "labels.toml").read_text().split("[[decisions]]")) == 3, (
        "both decisions stay on record"
    )


def test_what_the_job_says_itself_goes_first(study: Path) -> None:
    suture("labels", str(study), "--same", "Lesion of the Lung=Lung Lesion", "--by", "M. Ruiz")
    job = study / "job.toml"
    job.write_text(
        job.read_text().replace("[method]", '[label_map]\n"Lesion Of The Lung" = "Spot"\n[method]')
    )
    assert load_job(study).label_map == {"Lesion Of The Lung": "Spot"}


def test_a_site_that_names_the_file_learns_a_child_of_its_own_classes(study: Path) -> None:
    from suture.data.config import load_site_config
    from suture.data.readers import read_table

    table = study / "alpha" / "labels.csv"
    table.write_text(table.read_text().replace("train,1,1", "train,,1"))
    suture("labels", str(study), "--child", "Lung Lesion=Lung Opacity", "--by", "M. Ruiz")
    config = study / "alpha" / "suture.toml"
    assert read_table(load_site_config(config).data).table.y.tolist()[0][0] != 1
    config.write_text(config.read_text() + 'atlas = "../labels.toml"\n')
    assert read_table(load_site_config(config).data).table.y.tolist() == [[1, 1]]


@pytest.mark.complete
def test_a_site_gets_the_part_of_the_file_that_concerns_it(study: Path) -> None:
    suture("labels", str(study), "--same", "Lesion of the Lung=Lung Lesion", "--by", "M. Ruiz")
    suture("labels", str(study), "--child", "Lung Lesion=Chest Finding", "--by", "M. Ruiz")
    file = study / "beta.toml"
    suture("labels", str(study), "--excerpt", f"beta={file}")
    assert file.read_text() == '[parents]\n"Lesion Of The Lung" = [\n    "Chest Finding",\n]\n'
    labels = (study / "labels.toml").read_text()
    for there in (file, study / "labels.toml"):  # the decisions are not written over
        with pytest.raises(ConfigError, match="exists; remove it, or name a new file"):
            suture("labels", str(study), "--excerpt", f"beta={there}")
    assert (study / "labels.toml").read_text() == labels
    for wrong in ("betta=x", "beta", "beta="):
        with pytest.raises(ConfigError, match=r"write SITE=FILE with a site of .*beta"):
            suture("labels", str(study), "--excerpt", wrong)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--same", "Lesion of the Lung=Lung Lesion"], "give --by NAME with a decision"),
        (["--by", "M. Ruiz"], "give --by NAME with a decision"),
        (["--same", "Mass", "--by", "M. Ruiz"], "--same 'Mass' names one class; write NAME=OF"),
        (["--child", "Consolidatoin=Lung Opacity", "--by", "x"], "did you mean 'Consolidation'"),
        (["--same", "Consolidation=", "--by", "x"], "--same Consolidation="),
        (["--child", "Lung Lesion=lung lesion", "--by", "x"], "spellings of one name"),
    ],
)
def test_a_decision_that_is_none(study: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        suture("labels", str(study), *words)
    assert not (study / "labels.toml").exists()


@pytest.mark.complete
def test_a_faulty_file_ends_the_commands_that_read_it(study: Path) -> None:
    (study / "labels.toml").write_text('[parents]\n"A" = ["A"]\n')
    assert "'A' < 'A': a class cannot" in " ".join(RUNNER.invoke(app, ["check", str(study)]).output.split())
    for read in (lambda: suture("labels", str(study)), lambda: load_job(study)):
        with pytest.raises(ConfigError, match=r"labels.toml: 'A' < 'A': a class cannot be its own ancestor"):
            read()


@pytest.mark.complete
def test_a_parent_with_a_typo_is_refused_with_the_nearest_name(study: Path) -> None:
    (study / "labels.toml").write_text('[parents]\nConsolidation = ["Lung Opacitty"]\n')
    with pytest.raises(ConfigError, match=r"labels.toml: no site and no atlas has 'Lung Opacitty'; did you"):
        suture("labels", str(study))
    checked = " ".join(RUNNER.invoke(app, ["check", str(study)]).output.split())
    assert "Lung Opacitty" in checked  # a long path breaks in the middle of a word
    assert "did you mean 'Lung Opacity'?" in checked
    suture("labels", str(study), "--different", "Lung Opacity=Lung Opacitty", "--by", "M. Ruiz")


def test_two_classes_of_one_site_are_not_made_one(study: Path) -> None:
    with pytest.raises(ConfigError, match=r"alpha has both classes, so they are two"):
        suture("labels", str(study), "--same", "Lung Opacity=Lung Lesion", "--by", "M. Ruiz")
    assert not (study / "labels.toml").exists()


def test_a_name_that_nobody_has_is_told_with_the_nearest(study: Path) -> None:
    said = suture("labels", str(study), "--child", "Consolidation=Lung Opacityy", "--by", "M. Ruiz")
    assert "no site and no atlas has 'Lung Opacityy': did you mean 'Lung Opacity'?" in said


def test_the_first_decision_makes_the_file_that_a_site_names_already(study: Path) -> None:
    for site in HEADERS:
        with (study / site / "suture.toml").open("a") as file:
            file.write('atlas = "../labels.toml"\n')
    suture("labels", str(study), "--child", "Consolidation=Lung Opacity", "--by", "M. Ruiz")
    assert (study / "labels.toml").exists()


@pytest.mark.complete
def test_the_check_follows_a_decision_that_two_names_are_one(study: Path) -> None:
    def alike() -> bool:
        return "nearly the same" in " ".join(RUNNER.invoke(app, ["check", str(study)]).output.split())

    for site, name in (("alpha", "Consolidations"), ("beta", "Consolidation")):
        text = (study / site / "labels.csv").read_text()
        (study / site / "labels.csv").write_text(text.replace(HEADERS[site].split(",")[0], name))
    assert alike()
    suture("labels", str(study), "--same", "Consolidations=Consolidation", "--by", "M. Ruiz")
    assert not alike()
