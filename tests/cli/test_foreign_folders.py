"""Folders that somebody else has made are data: nothing of them is run unless the user says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

import suture as api
from small_hospitals import small_study
from suture.cli.app import app
from suture.core.errors import ConfigError
from suture.execution import job_files
from suture.execution.job import load_job
from suture.execution.job_files import known_jobs

PLANTED = """\
from pathlib import Path
Path({mark!r}).write_text("run")
from suture.execution.job import load_job
JOB = load_job("demo")
"""
REFUSED = r"job\.py is code.*--trust.*job\.toml"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What the planted code writes when it is run."""
    return tmp_path / "mark"


@pytest.fixture
def study(tmp_path: Path, mark: Path) -> Path:
    """A study whose job is code."""
    folder = small_study(tmp_path / "study")
    (folder / "job.toml").unlink()
    (folder / "job.py").write_text(PLANTED.format(mark=str(mark)))
    return folder


def suture(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return f"{result.exit_code} {result.output} {result.exception}"


@pytest.mark.parametrize(
    "command",
    [
        ("run", "{study}", "--env", "local", "--out", "{out}"),
        ("run", "{study}/../study/", "--env", "sim", "--out", "{out}"),
        ("run", "{study}", "--set", "method=mine", "--out", "{out}"),
        ("export", "{study}", "--out", "{out}"),
        ("data", "simulate", "{study}", "--out", "{out}"),
        ("poc", "up", "{study}", "--dir", "{out}"),
        ("poc", "data", "{study}", "--dir", "{out}"),
    ],
)
def test_no_command_runs_the_code_of_a_folder(
    command: tuple[str, ...], study: Path, mark: Path, tmp_path: Path
) -> None:
    words = [word.format(study=study, out=tmp_path / "out") for word in command]
    result = CliRunner().invoke(app, words)
    assert result.exit_code
    with pytest.raises(ConfigError, match=REFUSED):
        raise result.exception or AssertionError(result.output)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.complete
def test_a_check_names_the_code_and_goes_on_without_it(study: Path, mark: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(study)])
    assert result.exit_code
    said = " ".join(result.output.split())
    assert "--trust" in said
    assert "all sites" in said, "the data are looked at"
    assert not mark.exists()
    trusted = CliRunner().invoke(app, ["check", str(study), "--trust"])
    assert mark.exists()
    assert "is code" not in trusted.output


def test_a_file_that_the_user_names_and_a_trusted_folder_are_run(study: Path, mark: Path) -> None:
    for job, trust in ((study / "job.py", False), (study, True)):
        assert load_job(job, trust=trust).name == "demo"
        assert mark.exists()
        mark.unlink()
    for refused in (lambda: api.load_job(study), lambda: api.run(study)):
        with pytest.raises(ConfigError, match=REFUSED):
            refused()
    assert not mark.exists()


def test_a_link_to_code_is_code(study: Path, mark: Path) -> None:
    (study / "job.py").rename(study / "notes.py")
    (study / "job.toml").symlink_to(study / "notes.py")
    for job in (study, study / "job.toml"):
        with pytest.raises(ConfigError, match=r"notes\.py is code"):
            load_job(job)
    assert not mark.exists()


@pytest.mark.complete
def test_jobs_of_the_working_directory_are_no_part_of_the_package(
    study: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package without jobs/ beside it finds those of the folder in which it is called."""
    (tmp_path / "jobs" / "demo").mkdir(parents=True)
    (study / "job.py").rename(tmp_path / "jobs" / "demo" / "job.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_files, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "e.py"))
    for word in ("demo", "jobs/demo"):
        with pytest.raises(ConfigError, match=REFUSED):
            load_job(word)
    assert not mark.exists()
    assert suture("list", "jobs").startswith("0")
    assert not mark.exists()


def test_the_jobs_of_the_package_need_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = known_jobs()["demo"]
    for job in ("demo", demo, demo.parent):
        assert load_job(job).name == "demo"
    monkeypatch.chdir(demo.parents[1])
    assert load_job("demo").name == "demo"


def test_what_is_run_is_the_file_and_no_bytecode_beside_it(study: Path, mark: Path) -> None:
    """A job.py that was read and found good must not stand for another program."""
    import py_compile

    job = study / "job.py"
    cached = importlib.util.cache_from_source(str(job))
    py_compile.compile(str(job), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    job.write_text('from suture.execution.job import load_job\nJOB = load_job("demo")\n')
    assert load_job(job).name == "demo"
    assert not mark.exists()


TABLE = """\
title = "t"
source = "s"
job = {job!r}
reference = "a"
[rows.a]
name = "A"
[presets.small]
seeds = [1]
note = "n"
"""


def test_a_table_from_a_colleague_names_no_code(study: Path, mark: Path, tmp_path: Path) -> None:
    for job in (str(study), str(study / "job.py"), "--trust"):
        path = tmp_path / "table.toml"
        path.write_text(TABLE.format(job=job))
        said = suture("table", path, "--work", tmp_path / "work", "--results", tmp_path / "results")
        assert said.startswith("1"), said
        assert ("is code" in said) == (job != "--trust"), said
        assert not mark.exists()
    assert not (tmp_path / "work").exists()
