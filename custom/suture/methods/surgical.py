"""Surgical Aggregation: every site trains its own classes; the server stitches the head, class by class.

    Kulkarni, Kanhere, Yi, Parekh. Surgical Aggregation: Federated Class-Heterogeneous Learning.
    arXiv:2301.06683v5, 2024; Algorithm 1. First published with "Harmonizing Distributed Datasets with
    Diverse Tasks" in the title, MIDL 2023.

The model is a representation block (backbone) F and a task block (head) G. Site k knows the classes C_k.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c                              (Eq. 3)
    server:      backbone  w^F     = 1/K sum_k w_k^F                                      (Eq. 6)
                 head      (w^G)_c = mean of (w_k^G)_c over the sites {k : c in C_k}      (Eq. 7)

A class of a single site keeps that site's row unchanged, and a site only ever sees the rows of C_k: which
classes the others know, it never learns.
"""

from __future__ import annotations

from collections.abc import Iterable

from suture.methods.averaging import weighted_mean
from suture.methods.base import About, GlobalModel, LabelUse, RoundContext, hyperparameters
from suture.methods.class_weights import WeightedAveraging
from suture.protocol.messages import Update


@hyperparameters
class SurgicalAggregation(WeightedAveraging):
    """Surgical Aggregation; see `WeightedAveraging` for the fields."""

    about = About(
        "surgical", "Surgical Aggregation", "Kulkarni et al. 2024, arXiv:2301.06683", mixes_patients=""
    )
    labels = LabelUse(view="own")

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = weighted_mean(previous, updates)  # a site sends the rows of C_k alone, each of weight 1
        return mean.applied_to(previous)
