"""The small network."""

from __future__ import annotations

import torch
from torch import nn

from suture.models.backbones import small_cnn


def test_size_by_hand() -> None:
    network, features = small_cnn(1)
    convolutions = 9 * (1 * 16 + 16 * 32 + 32 * 64 + 64 * 128)
    norms = 2 * (16 + 32 + 64 + 128)
    assert sum(p.numel() for p in network.parameters()) == convolutions + norms == 97_392
    assert network(torch.zeros(2, 1, 64, 64)).shape == (2, features)


def test_each_block_halves_the_image() -> None:
    network, features = small_cnn(1)
    assert isinstance(network, nn.Sequential)
    assert network[:-2](torch.zeros(2, 1, 64, 64)).shape == (2, features, 4, 4)


def test_smallest_image() -> None:
    network, features = small_cnn(3)
    assert network(torch.zeros(2, 3, 16, 16)).shape == (2, features)
