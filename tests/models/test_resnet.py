"""The small ResNet, and torchvision's ResNet-18 with its checkpoint format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.encoders import Block

LABELS = LabelSet(("Edema", "Mass"))


def test_small_resnet_is_as_large_as_it_says() -> None:
    model = build(ModelSpec("resnet_small", size=64), LABELS, 1, pretrained=True)
    assert sum(p.numel() for p in model.backbone.parameters()) == 307_536
    assert model({"image": torch.zeros(3, 1, 64, 64)}).shape == (3, 2)


def test_a_block_with_zero_convolutions_is_its_shortcut() -> None:
    block = Block(4, 4, stride=1).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(x), torch.relu(x))


@pytest.mark.complete
def test_resnet18_gives_torchvisions_outputs(tmp_path: Path) -> None:
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(weights=None).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    spec = ModelSpec("resnet18", size=64, weights=str(tmp_path / "weights.pth"))
    ours = build(spec, LABELS, 1, pretrained=True).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs.fc(ours.backbone(x)), theirs(x), rtol=0, atol=1e-5)
    torch.save({"conv1.weight": torch.ones(1)}, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match=r"weights\.pth does not contain ResNet-18.*conv1\.weight"):
        build(spec, LABELS, 1, pretrained=True)
