"""The small network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from suture.core.errors import ConfigError
from suture.models.encoders import small_cnn, small_resnet

Make = Callable[..., tuple[nn.Module, int]]


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


@pytest.mark.parametrize("make", [small_cnn, small_resnet])
def test_the_weights_of_a_pretraining_replace_the_initial_ones(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrained, _ = make(1)
    x = torch.rand(4, 1, 32, 32)
    pretrained(x)  # its running statistics are no longer those of the start
    save_file(pretrained.state_dict(), tmp_path / "prior.safetensors")
    torch.manual_seed(1)
    loaded, _ = make(1, str(tmp_path))
    assert torch.equal(loaded.eval()(x), pretrained.eval()(x))


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file(small_cnn(1)[0].state_dict(), tmp_path / "prior.safetensors")
    with pytest.raises(ConfigError, match=r"a small ResNet: 0\.weight is missing"):
        small_resnet(1, str(tmp_path))
    with pytest.raises(ConfigError, match="do not exist"):
        small_cnn(1, str(tmp_path / "elsewhere"))
    save_file(
        small_resnet(1)[0].state_dict() | {"fc.weight": torch.zeros(2, 128)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"fc\.weight"):
        small_resnet(1, str(tmp_path))
