"""Coherent predictions: the probability of a class is at least that of each class below it.

The head has a row for each class, and nothing relates them. With ``max`` a class gets the largest
probability of itself and of all classes below it. With ``noisy-or`` it is absent where it and each class
below it are, independently: P = 1 - prod (1 - p), each class once, also where several paths lead to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.core.relations import Relations

Coherence = Literal["none", "max", "noisy-or"]


def classes_below(labels: LabelSet, relations: Relations) -> dict[str, tuple[str, ...]]:
    """Return the classes below each class that has any, by all paths of the relations."""
    below: dict[str, tuple[str, ...]] = {}
    for name in labels:
        for above in sorted(relations.ancestors.get(name, frozenset()).intersection(labels)):
            below[above] = (*below.get(above, ()), name)
    return below


class Coherent(nn.Module):
    """Logits ``[n, c]`` to coherent ones; the others stay as they are.

    Args:
        below: the classes below each class, as `classes_below` returns them.
    """

    def __init__(self, rule: Coherence, labels: LabelSet, below: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.rule = rule
        # A class has more classes below it than each of them has: fewer first, from the leaves upwards.
        order = sorted(below, key=lambda name: len(below[name]))
        self.groups = [(labels.index(name), [labels.index(child) for child in below[name]]) for name in order]

    def forward(self, logits: Tensor) -> Tensor:
        """In the exported graphs, too: each step is a standard operator."""
        columns = list(logits.unbind(dim=1))
        for at, below in self.groups:
            largest = torch.stack([columns[at], *(columns[child] for child in below)], dim=1).amax(dim=1)
            if self.rule == "noisy-or":
                # -ln prod (1 - p); the logit of 1 - exp(-s) is s + ln(1 - exp(-s)).
                s = F.softplus(logits[:, [at, *below]]).sum(dim=1)
                # Rounding, and s = 0, must not make it smaller than one of them.
                largest = torch.maximum(s + torch.log(-torch.expm1(-s)), largest)
            columns[at] = largest
        return torch.stack(columns, dim=1)
