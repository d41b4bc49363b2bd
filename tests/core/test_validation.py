"""Errors of a wrong key name its place, wherever that is, and the nearest right one."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rounds import conformant
from suture.core.errors import ConfigError
from suture.core.validation import flat, parse
from suture.execution.job import load_job, with_settings
from suture.methods import METHODS
from suture_papers.tables.claims import Claims
from suture_papers.tables.spec import TableSpec

JOBS = Path(__file__).resolve().parents[2] / "jobs"

TEXT = """
title = "t"
source = "s"
job = "demo"
reference = "ours"
[rows.ours]
name = "Ours"
[[columns]]
name = "loss"
metric = "loss"
[series]
key = "rounds"
values = [1]
label = "rounds"
[presets.tiny]
note = ""
seeds = [1]
tune = { key = "rounds", values = [1, 2] }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference", "refrence", "unknown key 'refrence'; did you mean 'reference'"),
        ('name = "Ours"', 'nmae = "Ours"', "unknown key 'rows.ours.nmae'; did you mean 'name'"),
        ("metric", "metrik", "unknown key 'columns.0.metrik'; did you mean 'metric'"),
        ('key = "rounds"\nvalues', 'kye = "rounds"\nvalues', "unknown key 'series.kye'; did you mean 'key'"),
        ("note", "noet", "unknown key 'presets.tiny.noet'; did you mean 'note'"),
        ("{ key", "{ kee", "unknown key 'presets.tiny.tune.kee'; did you mean 'key'"),
    ],
)
def test_a_wrong_key_has_its_place_and_the_nearest(old: str, new: str, message: str) -> None:
    assert parse(TableSpec, tomllib.loads(TEXT), "file").title == "t"
    with pytest.raises(ConfigError, match=rf"^file: {message}"):
        parse(TableSpec, tomllib.loads(TEXT.replace(old, new)), "file")


def test_a_key_in_one_of_several_types_has_no_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^file: "):
        parse(TableSpec, {**tomllib.loads(TEXT), "set": {"a": object()}}, "file")


def numbers_of(values: dict[str, Any]) -> list[str]:
    leaves = {k: v for key, value in values.items() for k, v in flat(key, value).items()}
    return [k for k, v in leaves.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_true_and_false_are_no_numbers_of_a_method(name: str) -> None:
    method = conformant(name)
    for key in numbers_of(asdict(method)):
        for truth in (True, False):
            values = asdict(method)
            *path, last = key.split(".")
            inner = values
            for part in path:
                inner = inner[part]
            inner[last] = truth
            with pytest.raises(ConfigError):
                parse(type(method), values, "method")


JOB_NUMBERS = pytest.mark.parametrize(
    "key", ["rounds", "seed", "min_sites", "grace", "max_update", "simulation.clients"]
)


@JOB_NUMBERS
def test_nor_of_a_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set {key}: must be a (whole )?number \(got true\)"):
        with_settings(load_job("surgical_nih"), [f"{key}=true"])


@JOB_NUMBERS
def test_nor_of_a_job(key: str, tmp_path: Path) -> None:
    values = tomllib.loads((JOBS / "surgical_nih" / "job.toml").read_text())
    section, _, name = key.rpartition(".")
    (values[section] if section else values)[name] = True
    (tmp_path / "job.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(ConfigError, match=rf"{name}: must be a (whole )?number \(got true\)"):
        load_job(str(tmp_path / "job.toml"))


def test_nor_of_a_table_while_true_stays_true() -> None:
    for old, new in (
        ("seeds = [1]", "seeds = [2, true]"),
        ("values = [1, 2] }", "values = [1, 2], seed = true }"),
    ):
        with pytest.raises(ConfigError, match=r"must be a whole number \(got true\)"):
            parse(TableSpec, tomllib.loads(TEXT.replace(old, new)), "file")
    again = TEXT.replace("values = [1, 2]", "values = [true, 2]") + "[rows.b]\nname = 'b'\nsteady = true\n"
    spec = parse(TableSpec, tomllib.loads(again), "file")
    assert spec.rows["b"].steady is True
    assert spec.presets["tiny"].tune is not None
    assert spec.presets["tiny"].tune.values == (True, 2)
    claims = {"fixed": "2026-01-02T00:00:00Z", "margins": {"auroc": True}, "claims": {}}
    with pytest.raises(ConfigError, match=r"margins\.auroc: must be a number"):
        parse(Claims, claims, "claims")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("secure_aggregation=true", r"secure_aggregation: must be a table \(got true\)"),
        ("robust=median", r"robust: must be a table \(got 'median'\)"),
        ("model.adapters=[1]", r"model\.adapters: must be a table \(got \[1\]\)"),
        ("accept_labels=some", r"accept_labels: must be true or false or a list \(got 'some'\)"),
        ("min_sites=some", r"min_sites: must be a whole number or a number \(got 'some'\)"),
    ],
)
def test_a_value_of_another_type_is_refused_in_the_words_of_the_file(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set {said}$"):
        with_settings(load_job("demo"), [setting])


def test_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    job = (JOBS / "surgical_nih" / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(f"max_update = nan\n{job}")
    with pytest.raises(ConfigError, match=r"max_update: must be a finite number \(got nan\)$"):
        load_job(str(tmp_path / "job.toml"))


def test_a_missing_key_is_named_without_the_rest_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^file: source is missing; write it$"):
        parse(TableSpec, {"title": "t"}, "file")
