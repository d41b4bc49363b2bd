"""The order of an image's values changes nothing but speed."""

from __future__ import annotations

import copy

import torch
from torch import nn

from suture.models.backbones import channels_last


def test_the_network_is_given_its_images_channels_last_and_computes_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    seen: list[torch.Tensor] = []
    ordered = channels_last(copy.deepcopy(plain))
    ordered[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(ordered(images), plain(images))
    assert seen[0].stride() == (64, 1, 8, 1)
    assert all(tensor.is_contiguous() for tensor in ordered.state_dict().values())
    assert ordered.state_dict().keys() == plain.state_dict().keys()
