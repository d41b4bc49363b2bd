"""torchvision's ImageNet checkpoint format on MONAI's DenseNet121."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.encoders import densenet121

LABELS = LabelSet(("Edema",))


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.densenet121(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # else mean 0 and variance 1 would hide a mix-up
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def old_spelling(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {re.sub(r"(denselayer\d+\.)(norm|conv)(\d)", r"\1\2.\3", k): t for k, t in state.items()}


@pytest.mark.complete
@pytest.mark.parametrize("spelling", ["new", "old"])
def test_same_outputs_as_torchvision(theirs: torch.nn.Module, spelling: str, tmp_path: Path) -> None:
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


@pytest.mark.complete
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


@pytest.fixture(scope="module")
def loaded(theirs: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    path = tmp_path_factory.mktemp("plain") / "plain.pth"
    torch.save(theirs.state_dict(), path)
    return densenet121(str(path))[0]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("wrapper", "key"), [("", "state_dict"), ("module.", "model"), ("model.backbone.", "state_dict")]
)
def test_checkpoints_of_a_training_load(
    theirs: torch.nn.Module, loaded: torch.nn.Module, wrapper: str, key: str, tmp_path: Path
) -> None:
    state = {wrapper + name: tensor for name, tensor in theirs.state_dict().items()}
    torch.save({key: {**state, "loss.weight": torch.ones(3)}, "epoch": 3}, tmp_path / "last.ckpt")
    expected = loaded.state_dict()
    for name, tensor in densenet121(str(tmp_path / "last.ckpt"))[0].state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.complete
def test_weights_of_one_channel_see_a_gray_image_as_before(theirs: torch.nn.Module, tmp_path: Path) -> None:
    state = theirs.state_dict()
    gray = state["features.conv0.weight"][:, :1].clone()
    torch.save(state | {"features.conv0.weight": gray}, tmp_path / "gray.pt")
    network, _ = densenet121(str(tmp_path / "gray.pt"))
    x = torch.rand(2, 1, 32, 32)
    want = torch.nn.functional.conv2d(x, gray, stride=2, padding=3)
    torch.testing.assert_close(network.features.conv0(x.expand(-1, 3, -1, -1)), want)


def test_a_whole_pickled_model_is_refused_in_one_line(theirs: torch.nn.Module, tmp_path: Path) -> None:
    torch.save(theirs, tmp_path / "whole.pt")
    with pytest.raises(ConfigError, match=r"^[^\n]*which could run any program[^\n]*$"):
        densenet121(str(tmp_path / "whole.pt"))
