"""Maps of networks of which one can say by hand where they look."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, Preprocessing
from suture.models.saved import save_model
from suture_results.model_export.explanation import MAPS, explain, feature_layer
from suture_results.prediction import Model, open_model

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


def test_a_map_depends_on_the_row_of_its_class(model: Path) -> None:
    """The first sanity check of Adebayo et al. (NeurIPS 2018): other weights, another map."""
    opened = open_model(model)
    pixels = np.random.default_rng(2).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    before = explain(opened, pixels, ("Mass",)).maps["Mass"]
    with torch.no_grad():
        drawn = torch.randn(opened.network.head.in_features, generator=torch.Generator().manual_seed(3))
        opened.network.head.weight[1] = drawn
    assert np.abs(explain(opened, pixels, ("Mass",)).maps["Mass"] - before).max() > 0.1


SIDE = 48
LESION, DECOY = (slice(6, 14), slice(30, 38)), (slice(30, 38), slice(8, 16))


def of_colours() -> Model:
    """Red speaks for Mass and green for Edema, each by how much of the image has it; blue for neither."""
    conv = nn.Conv2d(3, 2, 3, padding=1, bias=False)
    network = Classifier(nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 2, LABELS)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0, 1, 1] = conv.weight[1, 1, 1, 1] = 1
        network.head.weight.copy_(torch.tensor([[0.0, 20.0], [20.0, 0.0]]))
        network.head.bias.fill_(-1)
    prepare = Preprocessing(size=SIDE, color=True, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    return Model(network.eval(), ModelSpec("cnn", size=SIDE, color=True), prepare)


def with_lesions() -> np.ndarray:
    """A red lesion, a green one, and a blue square that is larger and brighter than both."""
    pixels = np.random.default_rng(4).integers(0, 20, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels[*LESION, 0] = pixels[*DECOY, 1] = 200
    pixels[28:46, 26:46, 2] = 255
    return pixels


@pytest.mark.parametrize("kind", list(MAPS))
def test_each_map_peaks_where_a_planted_lesion_decides(kind: str) -> None:
    found = explain(of_colours(), with_lesions(), ("Mass", "Edema"), kind=kind)
    assert found.kind == kind
    for name, at in (("Mass", LESION), ("Edema", DECOY)):
        map_ = found.maps[name]
        assert map_.shape == (SIDE, SIDE)
        assert map_.max() == pytest.approx(1)
        assert map_.min() >= 0
        inside = np.zeros_like(map_, dtype=bool)
        inside[at] = True
        assert inside[np.unravel_index(map_.argmax(), map_.shape)], name
        assert map_[inside].mean() > 5 * map_[~inside].mean()


def test_an_occlusion_that_moves_no_logit_has_an_empty_map() -> None:
    blue = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    blue[10:20, 10:20, 2] = 255
    assert explain(of_colours(), blue, ("Mass",), kind="occlusion").maps["Mass"].max() == 0


@pytest.mark.complete
def test_an_occlusion_of_another_class_is_no_matter() -> None:
    """The maps of two classes together are those of each alone."""
    both = explain(of_colours(), with_lesions(), ("Edema", "Mass"), kind="occlusion")
    for name in LABELS.names:
        alone = explain(of_colours(), with_lesions(), (name,), kind="occlusion")
        assert np.array_equal(alone.maps[name], both.maps[name])


def test_an_unknown_map_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown map 'gradcam'; did you mean 'grad-cam'") as caught:
        explain(of_colours(), with_lesions(), kind="gradcam")
    assert "\n" not in str(caught.value)
