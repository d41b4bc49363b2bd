"""The conformance check of readers finds what a stranger's reader does wrong."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from suture.core.labels import LabelSet
from suture.data.dataset import DatasetConfig
from suture.data.readers import DataSet
from suture.data.reading import Reading, read_sheet, restrict
from suture.data.table import Table
from suture.testing import check_dataset


class PondConfig(DatasetConfig):
    """Images of ponds."""

    dataset: Literal["ponds"] = "ponds"


class Undescribed(PondConfig):
    """Its key has no meaning."""

    depth: int = 1


class Loose(PondConfig, extra="ignore"):
    """It takes any key."""


def read_ponds(config: DatasetConfig) -> Reading:
    """A correct reader."""
    sheet = read_sheet(config.table)
    columns = [sheet.column(name, "table") for name in ("image", "patient", "Fish", "Frog")]
    y = np.array([columns[2], columns[3]], dtype=np.float32).T
    split = tuple("test" if patient == "P1" else "train" for patient in columns[1])
    labels = LabelSet(("Fish", "Frog"))
    table = Table(labels, tuple(columns[0]), tuple(columns[1]), y, split, config.root)
    return Reading(restrict(table, config))


def changed(**columns: object) -> Callable[[DatasetConfig], Reading]:
    return lambda config: Reading(replace(read_ponds(config).table, **columns))


_TURNS = itertools.count()


def unsteady(config: DatasetConfig) -> Reading:
    return changed(images=tuple(f"{next(_TURNS)}.png" for _ in range(3)))(config)


def deaf(config: DatasetConfig) -> Reading:
    return read_ponds(config.model_copy(update={"labels": None}))


def swapped(config: DatasetConfig) -> Reading:
    """Its columns stay where they are when the classes are named in another order."""
    table = deaf(config).table
    return Reading(replace(table, labels=LabelSet(config.labels or ("Fish", "Frog"))))


def careless(config: DatasetConfig) -> Reading:
    return read_ponds(config) if config.table.exists() else Reading(None)  # type: ignore[arg-type]


def faulty(config: DatasetConfig) -> Reading:
    return replace(read_ponds(config), faults=("row 2: what is 'x'?",))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, object]:
    table = tmp_path / "ponds.csv"
    table.write_text("image,patient,Fish,Frog\na.png,P0,1,0\nb.png,P1,0,1\nc.png,P0,1,1\n")
    return {"root": tmp_path, "table": table}


def test_a_correct_reader_passes(values: dict[str, object]) -> None:
    assert len(check_dataset(DataSet(PondConfig, read_ponds, "ponds"), values)) == 3


def test_the_reader_of_the_documentation_passes(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding_a_method.md").read_text()
    [text] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "PONDS" in block]
    (tmp_path / "ponds.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("ponds")
    rows = "".join(f"{i}.png,P{i // 2},{i % 2},{i % 3 // 2}\n" for i in range(40))
    (tmp_path / "ponds.csv").write_text("image,pond,Fish,Frog\n" + rows)
    assert set(check_dataset(made.PONDS, values).split) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("config", "read", "names"),
    [
        (Undescribed, read_ponds, "depth"),
        (Loose, read_ponds, "does not exist"),
        (PondConfig, faulty, "row 2"),
        (PondConfig, changed(split=("train", "test", "test")), "patients"),
        (PondConfig, changed(split=("train", "test", "learn")), "'learn'"),
        (PondConfig, changed(images=("../a.png", "b.png", "c.png")), r"'\.\./a\.png'"),
        (PondConfig, changed(images=("/a.png", "b.png", "c.png")), "'/a.png'"),
        (PondConfig, changed(y=np.full((3, 2), 0.5, dtype=np.float32)), r"0\.5"),
        (PondConfig, changed(y=np.ones((3, 2))), "float64"),
        (PondConfig, unsteady, "images"),
        (PondConfig, deaf, r"\['Frog', 'Fish'\]"),
        (PondConfig, swapped, "another order"),
        (PondConfig, careless, r"not-there|does not exist"),
    ],
)
def test_what_is_wrong_is_named(
    values: dict[str, object],
    config: type[DatasetConfig],
    read: Callable[[DatasetConfig], Reading],
    names: str,
) -> None:
    with pytest.raises(AssertionError, match=names):
        check_dataset(DataSet(config, read, "ponds"), values)
