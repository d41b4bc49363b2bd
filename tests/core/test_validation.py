"""Errors of a wrong key or value name its place, wherever that is, and the nearest right one."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rounds import conformant
from suture.core.errors import ConfigError, nearest
from suture.core.validation import flat, parse
from suture.execution.job import load_job, with_settings
from suture.methods import METHODS
from suture_papers.tables.spec import TableSpec
from world import refused

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
    ("old", "new", "named"),
    [
        ("reference", "refrence", ["'refrence'", "'reference'"]),
        ('name = "Ours"', 'nmae = "Ours"', ["'rows.ours.nmae'", "'name'"]),
        ("metric", "metrik", ["'columns.0.metrik'", "'metric'"]),
        ('key = "rounds"\nvalues', 'kye = "rounds"\nvalues', ["'series.kye'", "'key'"]),
        ("note", "noet", ["'presets.tiny.noet'", "'note'"]),
        ("{ key", "{ kee", ["'presets.tiny.tune.kee'", "'key'"]),
        ('source = "s"', "", ["source"]),
        ('source = "s"', "set = { a = 1979-05-27 }", []),
        # Truth is no number.
        ("seeds = [1]", "seeds = [2, true]", ["seeds"]),
        ("values = [1, 2] }", "values = [1, 2], seed = true }", ["seed"]),
    ],
)
def test_a_wrong_key_or_value_has_its_place_and_the_nearest(old: str, new: str, named: list[str]) -> None:
    assert parse(TableSpec, tomllib.loads(TEXT), "file").title == "t"
    with refused("file: ", *named, by=ConfigError):
        parse(TableSpec, tomllib.loads(TEXT.replace(old, new)), "file")


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


@pytest.mark.parametrize("key", ["rounds", "min_sites", "max_update", "simulation.clients"])
def test_nor_of_a_setting_or_a_job(key: str, tmp_path: Path) -> None:
    with refused(f"--set {key}", "true", by=ConfigError):
        with_settings(load_job("surgical_nih"), [f"{key}=true"])
    values = tomllib.loads((JOBS / "surgical_nih" / "job.toml").read_text())
    section, _, name = key.rpartition(".")
    for wrong in (True, float("nan")):
        (values[section] if section else values)[name] = wrong
        (tmp_path / "job.toml").write_text(tomli_w.dumps(values))
        with refused(name, str(wrong).lower(), by=ConfigError):
            load_job(str(tmp_path / "job.toml"))


def test_true_stays_true_where_it_may_be() -> None:
    again = TEXT.replace("values = [1, 2]", "values = [true, 2]") + "[rows.b]\nname = 'b'\nsteady = true\n"
    spec = parse(TableSpec, tomllib.loads(again), "file")
    assert spec.rows["b"].steady is True
    assert spec.presets["tiny"].tune is not None
    assert spec.presets["tiny"].tune.values == (True, 2)


def test_a_value_of_another_type_is_refused_by_its_key() -> None:
    for key, value in (
        ("secure_aggregation", "true"),
        ("robust", "median"),
        ("model.adapters", "[1]"),
        ("accept_labels", "some"),
        ("min_sites", "some"),
    ):
        with refused(f"--set {key}: ", value, by=ConfigError):
            with_settings(load_job("demo"), [f"{key}={value}"])


def test_of_many_names_the_nearest_are_shown() -> None:
    """1,000 names of six letters are more than fit; the first in the alphabet would help nobody."""
    many = [f"net{i:03}" for i in range(1000)]
    assert nearest("net123x", many) == "did you mean 'net123'?"
    said = nearest("zz9-zz99-zz999", many)
    assert said.startswith("the nearest of 1,000: ")
    assert said.count(",") == 1 + 19
    assert "net000" not in said


def test_of_few_all_are_shown() -> None:
    assert nearest("q", ["b", "a"]) == "known: a, b"
