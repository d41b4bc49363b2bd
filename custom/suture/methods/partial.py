"""FL with partial loss: the loss covers the known classes, the mean still covers every site.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.3 (Eq. 8), after Jin and Ghahramani, Learning with
    Multiple Labels, NeurIPS 2002. "Naive FedAvg" of the MIDL 2023 version.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c                              (Eq. 8)
    server:      backbone  w^F     = 1/K sum_k w_k^F
                 head      (w^G)_c = 1/K sum_k (w_k^G)_c over all sites

A site that does not know class c gets no gradient for its row and would return it as it came. So it need not
be told of the row at all: the server supplies it. With m owners of class c,

                 (w^G)_c = (sum over owners of (w_k^G)_c + (K - m) * previous (w^G)_c) / K
"""

from __future__ import annotations

from collections.abc import Iterable

from suture.methods.averaging import weighted_mean
from suture.methods.base import About, GlobalModel, LabelUse, RoundContext, hyperparameters
from suture.methods.class_weights import WeightedAveraging
from suture.protocol.messages import Update


@hyperparameters
class PartialLoss(WeightedAveraging):
    """FL with partial loss; see `WeightedAveraging` for the fields."""

    about = About("partial", "FL with partial loss", "Kulkarni et al. 2024, Sec. 3.3.3", mixes_patients="")
    labels = LabelUse(view="own")

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = weighted_mean(previous, updates)
        stale = mean.weight - mean.class_weights  # K - m: the sites that would return the row as it came
        mean.add_rows(previous.labels, previous.head, stale)
        return mean.applied_to(previous)
