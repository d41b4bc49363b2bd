"""The command of a report, parsed again as a shell and the command line would, gives an equal job."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from suture.execution.job import Job, command_of, load_job, with_settings
from suture.execution.job_files import known_jobs


def parsed(line: str) -> Job:
    words = shlex.split(line)
    assert words[:2] == ["suture", "run"]
    assert words[3:5] == ["--env", "local"]
    assert words[5::2] == ["--set"] * len(words[5::2])
    return with_settings(load_job(words[2]), words[6::2])


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["rounds=3", "seed=7"],
        ["method=fedavg", "method.local.lr=0.00123", "patience=2"],
        ["method=vanilla", 'accept_labels=["it\'s", "a \\"b\\" $HOME"]'],
        ["label_map.Fluid=Effusion", "label_map.a b=true blue", "grace=0.5"],
        ['title="2"', "model.dropout=0.25", 'simulation.learning_rates={"harbor": 0.01}'],
    ],
)
def test_it_gives_the_same_job(settings: list[str]) -> None:
    job = with_settings(load_job("demo"), settings)
    line = command_of(job, "local")
    assert line is not None
    assert parsed(line) == job


def test_every_job_of_the_repository_has_one() -> None:
    assert known_jobs()
    for name in known_jobs():
        line = command_of(load_job(name), "sim")
        assert line == f"suture run {name} --env sim"


def test_a_study_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "it's" / "study"
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(
        'rounds = 2\n[method]\nname = "surgical"\n[model]\nname = "cnn"\nsize = 32\n', encoding="utf-8"
    )
    job = with_settings(load_job(folder), ["rounds=9"])
    line = command_of(job, "local")
    assert line is not None
    assert shlex.split(line)[2] == str(folder)
    assert parsed(line) == job


def test_a_job_that_no_file_gives_has_none() -> None:
    assert command_of(replace(load_job("demo"), name="of-my-own"), "local") is None
