"""Grad-CAM maps of a network whose maps can be computed by hand, and the command that draws them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.export.explanation import explain, explain_files, feature_layer
from suture.learning.prediction import Model, open_model
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, Preprocessing
from suture.models.saved import save_model

LABELS = LabelSet(("Edema", "Mass"))
PREPARE = Preprocessing(size=4, color=False, channels=1, mean=(0.0,), std=(1.0,))


def by_hand() -> Model:
    """Two feature maps, x and 1 - x; Mass is their means with the weights 2 and -1, Edema with -1 and 3."""
    conv = nn.Conv2d(1, 2, 1)
    network = Classifier(nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 2, LABELS)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
        assert conv.bias is not None
        conv.bias.copy_(torch.tensor([0.0, 1.0]))
        network.head.weight.copy_(torch.tensor([[-1.0, 3.0], [2.0, -1.0]]))
        network.head.bias.zero_()
    return Model(network.eval(), ModelSpec("cnn", size=16), PREPARE)


def test_the_map_of_a_class_by_hand() -> None:
    pixels = np.zeros((4, 4), dtype=np.uint8)
    pixels[0, :3] = 255, 204, 51  # x = 1, .8, .2, and 0 elsewhere
    model = by_hand()
    assert feature_layer(model) == "backbone.0"
    found = explain(model, pixels, ("Mass", "Edema"))
    # Mass: the positive part of 2x - (1 - x) = 3x - 1, of which 2 is the most.
    mass = np.zeros((4, 4))
    mass[0, :2] = 1, 0.7
    assert found.maps["Mass"] == pytest.approx(mass, abs=1e-6)
    # Edema: 3(1 - x) - x = 3 - 4x, of which 3 is the most.
    edema = np.ones((4, 4))
    edema[0, :3] = 0, 0, 2.2 / 3
    assert found.maps["Edema"] == pytest.approx(edema, abs=1e-6)
    assert found.probabilities["Mass"] == pytest.approx(
        float(torch.sigmoid(torch.tensor(2 * 0.125 - 0.875))), abs=1e-6
    )
    assert not model.network.training


def test_the_padding_is_no_part_of_a_map() -> None:
    found = explain(by_hand(), np.full((8, 4), 255, dtype=np.uint8))
    assert found.pixels.shape == (4, 2)
    assert {map_.shape for map_ in found.maps.values()} == {(4, 2)}


def test_a_class_that_nothing_speaks_for_has_an_empty_map() -> None:
    found = explain(by_hand(), np.zeros((4, 4), dtype=np.uint8), ("Mass",))
    assert found.maps["Mass"].max() == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    spec = ModelSpec("resnet_small", size=32, color=True)
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "model", {})
    return tmp_path / "model"


def images(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(1)
    for i in range(3):
        pixels = rng.integers(0, 256, (20, 31, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"image{i}$\\foo$.png")
    return folder


def test_a_map_depends_on_the_row_of_its_class(model: Path) -> None:
    """The first sanity check of Adebayo et al. (NeurIPS 2018): other weights, another map."""
    opened = open_model(model)
    pixels = np.random.default_rng(2).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    before = explain(opened, pixels, ("Mass",)).maps["Mass"]
    with torch.no_grad():
        drawn = torch.randn(opened.network.head.in_features, generator=torch.Generator().manual_seed(3))
        opened.network.head.weight[1] = drawn
    assert np.abs(explain(opened, pixels, ("Mass",)).maps["Mass"] - before).max() > 0.1


def test_the_command_draws_and_says_what_it_left_out(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in")
    (folder / "broken.png").write_bytes(b"no image")
    words = ["explain", str(model), str(folder), "-o", str(tmp_path / "out"), "-n", "3", "--class", "Mass"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "2 pictures" in done.output
    assert "broken.png" in done.output
    assert "1 more" in done.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [r"002 image0$\foo$.png", r"003 image1$\foo$.png", "contact sheet.png"]
    assert Image.open(tmp_path / "out" / written[0]).format == "PNG"


def test_what_cannot_be_explained_says_so(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in")
    with pytest.raises(ConfigError, match="unknown class 'Mas'; did you mean 'Mass'"):
        explain_files(model, [folder], tmp_path / "out", ("Mas",))
    spec = ModelSpec("lstm")
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "text", {})
    with pytest.raises(ConfigError, match=r"reads text \(lstm\) looks at no image"):
        explain_files(tmp_path / "text", [folder], tmp_path / "out")
    for path in folder.iterdir():
        path.write_bytes(b"x")
    with pytest.raises(DataError, match="none of the 3 images can be read"):
        explain_files(model, [folder], tmp_path / "out")
