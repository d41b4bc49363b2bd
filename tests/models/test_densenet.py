"""torchvision's ImageNet checkpoint format on MONAI's DenseNet121."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build

LABELS = LabelSet(("Edema",))


@pytest.fixture(scope="module")
def theirs() -> torchvision.models.DenseNet:
    torch.manual_seed(0)
    model = torchvision.models.densenet121(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # else mean 0 and variance 1 would hide a mix-up
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def old_spelling(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {re.sub(r"(denselayer\d+\.)(norm|conv)(\d)", r"\1\2.\3", k): t for k, t in state.items()}


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_same_outputs_as_torchvision(
    theirs: torchvision.models.DenseNet, spelling: str, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    state = theirs.state_dict()
    torch.save(state if spelling == "new" else old_spelling(state), path)
    ours = build(ModelSpec("densenet121", size=64, weights=str(path)), LABELS, 1, pretrained=True).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = torch.nn.functional.adaptive_avg_pool2d(torch.relu(theirs.features(x)), 1).flatten(1)
        torch.testing.assert_close(ours.backbone(x), features, rtol=0, atol=1e-5)
    blank = build(ModelSpec("densenet121", size=64, weights="/nowhere"), LABELS, 1, pretrained=False).eval()
    assert not torch.allclose(blank.backbone(x), features, atol=1e-3)


def test_weights_that_do_not_fit_name_file_and_tensor(tmp_path: Path) -> None:
    def load(path: Path) -> None:
        build(ModelSpec("densenet121", weights=str(path)), LABELS, 1, pretrained=True)

    with pytest.raises(ConfigError, match=r"nothing\.pth do not exist"):
        load(tmp_path / "nothing.pth")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"junk\.pth cannot be read"):
        load(tmp_path / "junk.pth")
    torch.save({"fc.weight": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=r"other\.pth .*DenseNet121.*conv0\.weight"):
        load(tmp_path / "other.pth")
    torch.save([torch.ones(1)], tmp_path / "list.pth")
    with pytest.raises(ConfigError, match=r"list\.pth contains a list"):
        load(tmp_path / "list.pth")


def test_a_download_without_a_network_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    with pytest.raises(ConfigError, match=r"densenet121-\w+\.pth cannot be downloaded.*name the file"):
        build(ModelSpec("densenet121", weights="download"), LABELS, 1, pretrained=True)
