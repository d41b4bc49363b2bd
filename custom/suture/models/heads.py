"""The head of a classifier: what its logits are made of, and where its rows begin.

Vectors of class names: where the rows of a head begin that has its classes' names as anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from suture.core.errors import ConfigError, as_word
from suture.core.labels import LabelSet, canonical
from suture.core.seeds import generator_for
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


HeadKind = Literal["linear", "dot", "cosine", "anchors"]
"""linear: h . w_c + b_c. dot: h . w_c, without a bias. cosine: `SCALE` times the cosine of h and w_c.
anchors: h . w_c, and h . w_c / |w_c| where an image has one label (FedAlign)."""

RowInit = Literal["random", "named"]
"""random: from a seed of the class name. named: the vector of the class name, see `names.py`."""

SCALE = 30.0
"""The factor of a cosine head (Cao et al., LDAM, NeurIPS 2019): a softmax of numbers within 1 is too flat."""


class _CosineHead(nn.Linear):
    """Logits ``[n, c]`` are the scaled cosines of features ``[n, d]`` and rows ``[c, d]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return SCALE * F.linear(F.normalize(input, dim=1), F.normalize(self.weight, dim=1))


class _UnitRows(nn.Linear):
    """Logits ``[n, c]`` are features ``[n, d]`` times rows ``[c, d]`` that are scaled to the length 1."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return F.linear(input, F.normalize(self.weight, dim=1))


def make_head(kind: HeadKind, features: int, labels: LabelSet) -> nn.Linear:
    """Return a head with one row for each class."""
    made: type[nn.Linear] = nn.Linear
    if kind == "cosine":
        made = _CosineHead
    elif kind == "anchors" and labels.label_type == "multiclass":
        made = _UnitRows
    return made(features, len(labels), bias=kind == "linear")


def head_rows(
    labels: LabelSet,
    features: int,
    seed: int,
    head: str = "head",
    start: RowInit = "random",
    vectors: str | None = None,
) -> dict[str, Tensor]:
    """Return the initial rows of a head, each from its class name.

    So the row of a class does not depend on the other classes, nor on their order.

    Args:
        start: of the rows of the head that predicts; others are random, as is every bias.
        vectors: see `name_vectors`.

    Returns:
        ``head.weight`` [c, features] and ``head.bias`` [c], or those of another head by its name: uniform in
        +-1/sqrt(features) as in `nn.Linear`, or named.

    Raises:
        ConfigError: see `name_vectors`.
    """
    bound = features**-0.5
    rows = [
        torch.empty(features + 1).uniform_(-bound, bound, generator=generator_for(seed, head, name))
        for name in labels.names
    ]
    stacked = torch.stack(rows)
    weight = stacked[:, :-1].contiguous()
    if start == "named" and head == "head":
        weight = name_vectors(labels.names, features, vectors)
    return {f"{head}.weight": weight, f"{head}.bias": stacked[:, -1].contiguous()}
