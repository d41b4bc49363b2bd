"""The head of a classifier: what its logits are made of, and where its rows begin."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.core.seeds import generator_for
from suture.models.names import name_vectors

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
