"""The conformance check of an encoder, and an encoder of another package."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suture.core import entry_points
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import MODELS, Backbone, ModelSpec, build, encoder_of, self_contained
from suture.models.saved import load_model, save_model
from suture.testing import check_encoder


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
    times = count(1)

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
    ("fault", "said"),
    [
        ("table", r"backbone\.table: torch\.int64 cannot be averaged"),
        ("unused", r"spare\.\w+ takes no part"),
        ("hidden", r"keeps something outside"),
        ("batch", r"depend on the others of its batch"),
        ("double", r"torch\.float64, not float32"),
        ("infinite", r"not finite"),
        ("seeds", r"the same seed gives other numbers"),
    ],
)
def test_a_fault_is_named(fault: str, said: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=None if fault == "double" else said) as caught:
        check_encoder(entry(fault), 32)
    assert fault == "double" or isinstance(caught.value, AssertionError)


def test_a_width_that_is_not_the_features_and_another_kind_of_thing_are_refused() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_encoder(entry(width=5), 32)
    with pytest.raises(AssertionError, match=r"is not a suture\.models\.Backbone"):
        check_encoder(Net(), 32)  # type: ignore[arg-type]


class Distribution:
    name = "their-nets"

    def __init__(self, version: str) -> None:
        self.version = version


SOUND, WRONG = entry(), "a text"


def register(monkeypatch: pytest.MonkeyPatch, value: str, version: str = "1.0") -> None:
    point = EntryPoint("theirs", value, "suture.encoders")
    vars(point)["dist"] = Distribution(version)

    def points(group: str) -> list[Any]:
        return [point] if group == "suture.encoders" else []

    monkeypatch.setattr(entry_points, "_read_group", points)


def test_an_encoder_of_another_package_is_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, f"{__name__}:SOUND")
    spec = ModelSpec("theirs", size=32)
    model = build(spec, LabelSet(("A",)), 1, pretrained=False).eval()
    assert model({"image": torch.zeros(2, 1, 32, 32)}).shape == (2, 1)
    assert self_contained(spec).encoder_config == "their-nets 1.0"
    save_model(model, spec, tmp_path, {})
    register(monkeypatch, f"{__name__}:SOUND", "2.0")
    with pytest.raises(ConfigError, match=r"made with their-nets 1\.0, and their-nets 2\.0 is installed"):
        load_model(tmp_path)


def test_an_entry_point_of_the_wrong_kind_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, f"{__name__}:WRONG")
    with pytest.raises(
        ConfigError, match=r"'theirs' of their-nets 1\.0 .*must be a suture\.models\.Backbone"
    ):
        encoder_of(ModelSpec("theirs"))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"unknown model 'theirs'"):
        ModelSpec("theirs")
