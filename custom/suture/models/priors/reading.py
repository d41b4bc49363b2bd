"""Checkpoints of other people's programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from suture.core.errors import ConfigError


def read_part(path: Path, prefix: str, what: str) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, their names without the prefix.

    Args:
        path: of a safetensors file, or a torch file of tensors by name, at its top or under ``state_dict``.
            Nothing but tensors and plain values is unpickled.
        prefix: of the names that belong to the part.
        what: the checkpoint that is meant, for errors.

    Raises:
        ConfigError: naming the file, and what to do about it.
    """
    if not path.is_file():
        raise ConfigError(f"the prior {path} does not exist; prior.path names the file of {what}")
    try:
        if path.suffix == ".safetensors":
            loaded: object = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; fetch {what} again") from error
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint of {what}: {error}") from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else {}
    tensors = state.items() if isinstance(state, Mapping) else ()
    part = {str(k).removeprefix(prefix): t for k, t in tensors if str(k).startswith(prefix)}
    if not part:
        raise ConfigError(f"{path} has no tensors {prefix}*; prior.path names the file of {what}")
    return {name: tensor for name, tensor in part.items() if isinstance(tensor, Tensor)}
