"""Vectors of class names: where the rows of a head begin that has its classes' names as anchors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from suture.core.errors import ConfigError, as_word
from suture.core.labels import canonical
from suture.data.embedding import signs
from suture.models.weights import dense
from suture.protocol.packing import read_tensors

_GRAMS = (3, 4, 5)
"""Lengths of the runs of letters that a name is taken apart into."""


def name_vectors(names: Sequence[str], width: int, file: str | None = None) -> Tensor:
    """Return a vector of length 1 for each class name.

    By default the number of times that each run of 3 to 5 characters occurs in the name, in small letters
    with a space before and behind, through a random projection to +-1 (Achlioptas, J. Comput. Syst. Sci.
    66:671, 2003) whose signs are the bits of the run's SHAKE-256: so equal on every machine, under every
    seed. Names that share words are close; meanings are unknown to it.

    Args:
        width: of the vectors.
        file: a safetensors file with a vector ``[width]`` for each name, from an embedding of text.

    Returns:
        float32 ``[len(names), width]``.

    Raises:
        ConfigError: the file cannot be read, or lacks a name, or its vectors have another width.
    """
    found = _hashed(names, width) if file is None else _read(Path(file).expanduser(), names, width)
    return F.normalize(found, dim=1).float()


def _hashed(names: Sequence[str], width: int) -> Tensor:
    rows = np.zeros((len(names), width))
    for row, name in zip(rows, names, strict=True):
        text = f" {name.lower()} "
        for n in _GRAMS:
            for start in range(len(text) - n + 1):
                row += signs(text[start : start + n], width)
    return torch.from_numpy(rows)


def _read(path: Path, names: Sequence[str], width: int) -> Tensor:
    key = "model.name_vectors"
    if not path.exists():
        raise ConfigError(f"{key}: {path} does not exist; name a safetensors file of vectors by class name")
    try:
        tensors = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as safetensors: {as_word(error)}") from error
    vectors = {canonical(name): dense(name, vector, str(path)) for name, vector in tensors.items()}
    for name in names:
        if name not in vectors:
            raise ConfigError(f"{key}: {path} has no vector for the class {name!r}; add it, under that name")
        shape = tuple(vectors[name].shape)
        if shape != (width,):
            raise ConfigError(
                f"{key}: the vector of {name!r} in {path} has the shape {shape}, and a row of the head has "
                f"{width} numbers; set model.neck to the width of the vectors"
            )
        if not bool(torch.isfinite(vectors[name]).all() and vectors[name].any()):
            raise ConfigError(f"{key}: the vector of {name!r} in {path} is 0 or not finite; compute it again")
    return torch.stack([vectors[name].double() for name in names])
