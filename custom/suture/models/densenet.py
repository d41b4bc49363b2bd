"""MONAI's DenseNet121 as a backbone, with ImageNet weights in torchvision's checkpoint format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from suture.errors import ConfigError

FEATURES = 1024


class DenseNetBackbone(nn.Module):
    """DenseNet121 (Huang et al. 2017) without its classifier: images ``[n, 3, h, w]`` to ``[n, 1024]``."""

    def __init__(self) -> None:
        from monai.networks.nets import DenseNet121  # costs seconds, and only this backbone needs it

        super().__init__()
        network = DenseNet121(spatial_dims=2, in_channels=3, out_channels=1)
        self.features = network.features
        self.pool = nn.Sequential(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.features(x))
        return out


def densenet121(weights: str | None) -> tuple[nn.Module, int]:
    """The backbone and its number of features.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    backbone = DenseNetBackbone()
    if weights:
        load_imagenet(backbone, weights)
    return backbone, FEATURES


def load_imagenet(backbone: DenseNetBackbone, weights: str) -> None:
    """Fills the backbone from torchvision's DenseNet121 weights.

    Raises:
        ConfigError: naming the file, and the first tensor that is missing.
    """
    source = _read(weights)
    renamed = {_monai_name(name): tensor for name, tensor in source.items()}
    target = backbone.features.state_dict()
    for name, tensor in target.items():
        if name.endswith("num_batches_tracked"):
            continue
        found = renamed.get(name)
        if found is None or found.shape != tensor.shape:
            raise ConfigError(f"{weights} is no DenseNet121 of torchvision: no tensor fits features.{name}")
        tensor.copy_(found)


def _read(weights: str) -> Mapping[str, Tensor]:
    if weights == "download":
        from torchvision.models import DenseNet121_Weights

        official = DenseNet121_Weights.IMAGENET1K_V1
        try:
            state: Mapping[str, Tensor] = official.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, or another file under that name
            raise ConfigError(
                f"{official.url} cannot be downloaded: {error}; fetch it elsewhere and name the file"
            ) from error
        return state
    path = Path(weights)
    if not path.is_file():
        raise ConfigError(f"the ImageNet weights {path} do not exist; name a file, or 'download'")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} is no DenseNet121 of torchvision: it holds a {type(loaded).__name__}")
    return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def _monai_name(name: str) -> str:
    """torchvision's name of a tensor in MONAI's words; old checkpoints write ``norm.1`` for ``norm1``."""
    name = re.sub(r"\.(norm|relu|conv)\.(\d)\.", r".\1\2.", name.removeprefix("features."))
    return re.sub(r"(denselayer\d+)\.(norm|relu|conv)(\d)", r"\1.layers.\2\3", name)
