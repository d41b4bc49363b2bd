"""The weighted mean that every aggregation here is made of.

Weights belong to classes, not only to sites: a shared tensor is averaged with one weight per site, a row of
the head with one weight per site and class. FedAvg, surgical aggregation, the proxies of FedLSM and the mean
over owners differ in the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from suture.methods.base import GlobalModel
from suture.protocol.messages import Labels, Update

_BLOCK = 1 << 16


class WeightedMean:
    """A mean that takes one update at a time; its memory does not grow with the number of sites.

    Sums are float64 and updates are added in the order given, so the same updates in the same order give the
    same bytes.

    Args:
        labels: the classes of the head's rows.
        shared: the previous shared tensors; one that gets no weight stays as it was.
        head: the previous rows; a class that gets no weight keeps its row.
    """

    def __init__(self, labels: Labels, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> None:
        self._index = {name: i for i, name in enumerate(labels)}
        self._previous = (shared, head)
        self._shared = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in shared.items()}
        self._head = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in head.items()}
        self.weight = 0.0
        self.class_weights = torch.zeros(len(labels), dtype=torch.float64)

    def add(self, update: Update) -> None:
        """Adds one site: its tensors times `weight`, its rows times `class_weights`."""
        for name, total in self._shared.items():
            # In blocks that stay in the cache: torch adds mixed types of large tensors four times slower.
            values = update.shared[name].reshape(-1)
            for part in range(0, values.numel(), _BLOCK):
                block = slice(part, part + _BLOCK)
                total.view(-1)[block].add_(values[block].double(), alpha=update.weight)
        self.weight += update.weight
        self.add_rows(update.labels, update.head, update.class_weights)

    def add_rows(self, labels: Labels, rows: Mapping[str, Tensor], weights: Tensor) -> None:
        """Adds rows ``[c, ...]`` of the named classes, each times its weight ``[c]``."""
        where = torch.tensor([self._index[name] for name in labels], dtype=torch.long)
        w = weights.to(torch.float64)
        self.class_weights.index_add_(0, where, w)
        for name, total in self._head.items():
            weighted = rows[name].to(torch.float64) * w.view(-1, *[1] * (total.dim() - 1))
            total.index_add_(0, where, weighted)

    def shared(self) -> dict[str, Tensor]:
        """The mean of the shared tensors, in their own type."""
        previous = self._previous[0]
        if self.weight <= 0:
            return dict(previous)
        return {k: total.div(self.weight).to(previous[k].dtype) for k, total in self._shared.items()}

    def head(self) -> dict[str, Tensor]:
        """The mean of the rows; the previous row for a class of no weight, never NaN."""
        sent = self.class_weights > 0
        divisor = torch.where(sent, self.class_weights, torch.ones_like(self.class_weights))
        merged = {}
        for name, total in self._head.items():
            previous = self._previous[1][name]
            shape = (-1, *[1] * (total.dim() - 1))
            mean = (total / divisor.view(shape)).to(previous.dtype)
            merged[name] = torch.where(sent.view(shape), mean, previous)
        return merged

    def applied_to(self, previous: GlobalModel) -> GlobalModel:
        """The model with the means in the place of its tensors; what was not averaged stays."""
        return replace(
            previous,
            shared={**previous.shared, **self.shared()},
            head={**previous.head, **self.head()},
        )


def weighted_mean(previous: GlobalModel, updates: Iterable[Update]) -> WeightedMean:
    """The running mean of all updates, each shared tensor by site weight and each row by class weight."""
    mean = WeightedMean(previous.labels, previous.shared, previous.head)
    for update in updates:
        mean.add(update)
    return mean
