"""Personalised FL: the sites share a backbone, and each keeps a head of its own.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.2.2: the upper bound that leaves K models instead of one.
    After Liang et al. Think Locally, Act Globally. arXiv:2001.01523, 2020.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c;  w_k^G stays at the site
    server:      backbone  w^F = 1/K sum_k w_k^F

With `batch_norm` as FedAvg, FedBN (Li et al. 2021) or FedBN+ (Kulkarni et al. 2023), the three PFL rows of
the paper's tables.
"""

from __future__ import annotations

from dataclasses import replace

from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, SharingSpec, hyperparameters


@hyperparameters
class PersonalisedFL(LocalAveraging):
    """Personalised FL; see `LocalAveraging` for the fields."""

    about = About(
        "pfl",
        "Personalised FL",
        "Kulkarni et al. 2024, Sec. 3.2.2",
        question="sites differ",
        mixes_patients="",
    )
    labels = LabelUse(view="own")

    @property
    def sharing(self) -> SharingSpec:
        return replace(super().sharing, personal="head")
