"""The checks of readers and encoders find what a stranger's does wrong; and an encoder of another package."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_models import built_model
from suture.core import entry_points
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.dataset import DatasetConfig
from suture.data.readers import DataSet
from suture.data.reading import Reading, read_sheet, restrict
from suture.data.table import Table
from suture.models import MODELS, Backbone, ModelSpec, encoder_of, self_contained
from suture.models.saved import load_model, save_model
from suture.testing import check_dataset, check_encoder
from world import refused, write_table


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
    return Reading(replace(deaf(config).table, labels=LabelSet(config.labels or ("Fish", "Frog"))))


def careless(config: DatasetConfig) -> Reading:
    return read_ponds(config) if config.table.exists() else Reading(None)  # type: ignore[arg-type]


def faulty(config: DatasetConfig) -> Reading:
    return replace(read_ponds(config), faults=("row 2: what is 'x'?",))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, object]:
    rows = [["image", "patient", "Fish", "Frog"], ["a.png", "P0", 1, 0], ["b.png", "P1", 0, 1]]
    return {"root": tmp_path, "table": write_table(tmp_path / "ponds.csv", [*rows, ["c.png", "P0", 1, 1]])}


def test_the_reader_of_the_documentation_passes(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(check_dataset(DataSet(PondConfig, read_ponds, "ponds"), values)) == 3
    page = (Path(__file__).parents[2] / "docs" / "adding_a_method.md").read_text()
    [text] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "PONDS" in block]
    (tmp_path / "ponds.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("ponds")
    rows = [[f"{i}.png", f"P{i // 2}", i % 2, i % 3 // 2] for i in range(40)]
    write_table(tmp_path / "ponds.csv", [["image", "pond", "Fish", "Frog"], *rows])
    assert set(check_dataset(made.PONDS, values).split) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("config", "read", "named"),
    [
        (Undescribed, read_ponds, "depth"),
        (Loose, read_ponds, "Loose"),
        (PondConfig, faulty, "row 2"),
        (PondConfig, changed(split=("train", "test", "test")), "patients"),
        (PondConfig, changed(split=("train", "test", "learn")), "'learn'"),
        (PondConfig, changed(images=("../a.png", "b.png", "c.png")), "'../a.png'"),
        (PondConfig, changed(images=("/a.png", "b.png", "c.png")), "'/a.png'"),
        (PondConfig, changed(y=np.full((3, 2), 0.5, dtype=np.float32)), "0.5"),
        (PondConfig, changed(y=np.ones((3, 2))), "float64"),
        (PondConfig, unsteady, "images"),
        (PondConfig, deaf, "['Frog', 'Fish']"),
        (PondConfig, swapped, ""),
        (PondConfig, careless, ""),
    ],
)
def test_what_is_wrong_with_a_reader_is_named(
    config: type[DatasetConfig],
    read: Callable[[DatasetConfig], Reading],
    named: str,
    values: dict[str, object],
) -> None:
    with refused(named, by=AssertionError):
        check_dataset(DataSet(config, read, "ponds"), values)


class Net(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.fault = fault
        if fault == "table":
            self.register_buffer("table", torch.arange(3))
        if fault == "unused":
            self.spare = nn.Linear(2, 2)
        if fault == "hidden":
            self.scale = float(torch.rand(()))

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image).relu().mean((2, 3))
        if self.fault == "batch":
            return x - x.mean(0)
        if self.fault == "double":
            return x.double()
        if self.fault == "infinite":
            return x / 0
        return x * getattr(self, "scale", 1.0)


def entry(fault: str = "", width: int = 4) -> Backbone:
    times = itertools.count(1)

    def made(spec: ModelSpec, weights: str | None) -> tuple[nn.Module, int]:
        if fault == "seeds":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(next(times))
                return Net(), width
        return Net(fault), width

    return Backbone(f"a net {fault}", made)


def test_a_sound_encoder_passes_and_leaves_no_trace() -> None:
    before = set(MODELS)
    check_encoder(entry(), 32)
    check_encoder(MODELS["cnn"], 64, color=True)
    assert set(MODELS) == before


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("table", "backbone.table: torch.int64"),
        ("unused", "spare."),
        ("hidden", ""),
        ("batch", ""),
        ("infinite", ""),
        ("seeds", ""),
    ],
)
def test_what_is_wrong_with_an_encoder_is_named(fault: str, named: str) -> None:
    with refused(named, by=AssertionError):
        check_encoder(entry(fault), 32)


def test_an_encoder_of_another_width_type_or_kind_is_refused() -> None:
    for wrong in (entry("double"), entry(width=5)):
        with pytest.raises((AssertionError, RuntimeError)):
            check_encoder(wrong, 32)
    with refused("suture.models.Backbone", by=AssertionError):
        check_encoder(Net(), 32)  # type: ignore[arg-type]


SOUND, WRONG = entry(), "a text"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an encoder of a package named their-nets in place of all others."""

    def put(value: str, version: str = "1.0") -> None:
        point = EntryPoint("theirs", f"{__name__}:{value}", "suture.encoders")
        vars(point)["dist"] = SimpleNamespace(name="their-nets", version=version)
        of_group = {"suture.encoders": [point]}
        monkeypatch.setattr(entry_points, "_read_group", lambda group: of_group.get(group, []))

    return put


def test_an_encoder_of_another_package_is_a_model(register: Callable[..., None], tmp_path: Path) -> None:
    with refused("'theirs'", by=ConfigError):
        ModelSpec("theirs")
    register("WRONG")
    with refused("'theirs'", "their-nets 1.0", "suture.models.Backbone", by=ConfigError):
        encoder_of(ModelSpec("theirs"))
    register("SOUND")
    spec = ModelSpec("theirs", size=32)
    model = built_model(spec).eval()
    assert model({"image": torch.zeros(2, 1, 32, 32)}).shape == (2, 2)
    assert self_contained(spec).encoder_config == "their-nets 1.0"
    save_model(model, spec, tmp_path, {})
    register("SOUND", "2.0")
    with refused("their-nets 1.0", "their-nets 2.0", by=ConfigError):
        load_model(tmp_path)
