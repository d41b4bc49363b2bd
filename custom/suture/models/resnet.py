"""Residual networks (He et al., CVPR 2016): a small one for small images, and torchvision's ResNet-18."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from suture.models.memory import channels_last
from suture.models.weights import fill, read_weights

WIDTHS = (16, 32, 64, 128)


class Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[n, before, h, w]`` to ``[n, width, h / stride, w / stride]``."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def small_resnet(channels: int) -> tuple[nn.Module, int]:
    """A stem and four blocks, each of which halves the image: 0.3 million parameters, for 64 px images.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.
    """
    stem = [nn.Conv2d(channels, WIDTHS[0], 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    blocks = [
        Block(before, width, stride=2) for before, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
    ]
    network = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return channels_last(network), WIDTHS[-1]


def resnet18(weights: str | None) -> tuple[nn.Module, int]:
    """torchvision's ResNet-18 without its classifier: images ``[n, 3, h, w]`` to ``[n, 512]``.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as official

    network = official()
    features: int = network.fc.in_features
    network.fc = nn.Identity()
    if weights:
        source = read_weights(weights, ResNet18_Weights.IMAGENET1K_V1)
        fill(network.state_dict(), source, weights, "ResNet-18 of torchvision")
    return network, features
