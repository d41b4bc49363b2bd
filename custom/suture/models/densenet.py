"""MONAI's DenseNet121 as a backbone, with ImageNet weights in torchvision's checkpoint format."""

from __future__ import annotations

import re

from torch import Tensor, nn

from suture.models.weights import fill, read_weights

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
        from torchvision.models import DenseNet121_Weights

        source = read_weights(weights, DenseNet121_Weights.IMAGENET1K_V1)
        renamed = {_monai_name(name): tensor for name, tensor in source.items()}
        fill(backbone.features.state_dict(), renamed, weights, "DenseNet121 of torchvision")
    return backbone, FEATURES


def _monai_name(name: str) -> str:
    """torchvision's name of a tensor in MONAI's words; old checkpoints write ``norm.1`` for ``norm1``."""
    name = re.sub(r"\.(norm|relu|conv)\.(\d)\.", r".\1\2.", name.removeprefix("features."))
    return re.sub(r"(denselayer\d+)\.(norm|relu|conv)(\d)", r"\1.layers.\2\3", name)
