"""Vanilla FL: FedAvg over the union of all classes; what a site does not annotate counts as absent.

    McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017;
    as the baseline of Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.2.

    at site k:   minimise  L = 1/|C| sum_{c in C} BCE_c,  with y_c = 0 for c not in C_k
    server:      w = 1/K sum_k w_k, every row included

This is the harm that the other methods undo: a finding that one site annotates is taught as absent by all
the others. Every site sees the names of all classes.
"""

from __future__ import annotations

from suture.methods.base import About, LabelUse, hyperparameters
from suture.methods.class_weights import WeightedAveraging


@hyperparameters
class VanillaFL(WeightedAveraging):
    """Vanilla FL; see `WeightedAveraging` for the fields."""

    about = About(
        "vanilla", "Vanilla FL", "McMahan et al. 2017; Kulkarni et al. 2024, Sec. 3.3.2", mixes_patients=""
    )
    labels = LabelUse(view="all", unknown="negative")
