"""Errors of a wrong key name its place, wherever that is, and the nearest right one."""

from __future__ import annotations

import tomllib

import pytest

from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture_papers.tables.spec import Experiment

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
    assert parse(Experiment, tomllib.loads(TEXT), "file").title == "t"
    with pytest.raises(ConfigError, match=rf"^file: {message}"):
        parse(Experiment, tomllib.loads(TEXT.replace(old, new)), "file")


def test_a_key_in_one_of_several_types_has_no_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^file: "):
        parse(Experiment, {**tomllib.loads(TEXT), "set": {"a": object()}}, "file")
