"""The head of a classifier: what its logits are made of, and where its rows begin."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.core.seeds import generator_for

HeadKind = Literal["linear", "dot", "cosine"]
"""linear: h . w_c + b_c. dot: h . w_c, without a bias. cosine: `SCALE` times the cosine of h and w_c."""

SCALE = 30.0
"""The factor of a cosine head (Cao et al., LDAM, NeurIPS 2019): a softmax of numbers within 1 is too flat."""


class CosineHead(nn.Linear):
    """Logits ``[n, c]`` are the scaled cosines of features ``[n, d]`` and rows ``[c, d]``."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return SCALE * F.linear(F.normalize(input, dim=1), F.normalize(self.weight, dim=1))


def make_head(kind: HeadKind, features: int, classes: int) -> nn.Linear:
    """Return a head with one row for each class."""
    return (
        CosineHead(features, classes) if kind == "cosine" else nn.Linear(features, classes, kind == "linear")
    )


def head_rows(labels: LabelSet, features: int, seed: int, head: str = "head") -> dict[str, Tensor]:
    """Return the initial rows of a head, each from a seed of its class name.

    So the row of a class does not depend on the other classes, nor on their order.

    Returns:
        ``head.weight`` [c, features] and ``head.bias`` [c], or those of another head by its name, uniform in
        +-1/sqrt(features) as in `nn.Linear`.
    """
    bound = features**-0.5
    rows = [
        torch.empty(features + 1).uniform_(-bound, bound, generator=generator_for(seed, head, name))
        for name in labels.names
    ]
    stacked = torch.stack(rows)
    return {f"{head}.weight": stacked[:, :-1].contiguous(), f"{head}.bias": stacked[:, -1].contiguous()}
