"""Pretrained weights from a file, or fetched on request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.core.errors import ConfigError


def read_weights(weights: str, official: Any) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint.

    Args:
        weights: a file of tensors by name, or ``download``.
        official: torchvision's entry for the download.

    Raises:
        ConfigError: naming the file and what is wrong with it.
    """
    if weights == "download":
        try:
            state: Mapping[str, Tensor] = official.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, or another file under that name
            raise ConfigError(
                f"{official.url} cannot be downloaded: {error}; fetch it elsewhere and name the file"
            ) from error
        return state
    path = Path(weights)
    if not path.is_file():
        raise ConfigError(f"the pretrained weights {path} do not exist; name a file, or 'download'")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} holds no tensors by name, but a {type(loaded).__name__}")
    return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def fill(target: Mapping[str, Tensor], source: Mapping[str, Tensor], weights: str, what: str) -> None:
    """Copies tensors by name; the counters of batch norm need not be there.

    Raises:
        ConfigError: naming the file, and the first tensor that is missing or has another shape.
    """
    for name, tensor in target.items():
        if name.endswith("num_batches_tracked"):
            continue
        found = source.get(name)
        if found is None or found.shape != tensor.shape:
            raise ConfigError(f"{weights} is no {what}: no tensor fits {name}")
        with torch.no_grad():
            tensor.copy_(found)
