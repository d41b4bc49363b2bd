"""The small network of the demo and the tests."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from suture.models.memory import channels_last

WIDTHS = (16, 32, 64, 128)


def small_cnn(channels: int) -> tuple[nn.Module, int]:
    """Four blocks of convolution, batch norm and ReLU, each halving the image, then the mean over pixels.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, width in enumerate(WIDTHS, 1):
        blocks[f"conv{i}"] = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
        blocks[f"norm{i}"] = nn.BatchNorm2d(width)
        blocks[f"relu{i}"] = nn.ReLU(inplace=True)
        before = width
    blocks["pool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flat"] = nn.Flatten()
    return channels_last(nn.Sequential(blocks)), before
