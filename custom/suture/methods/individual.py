"""Individual training: every site by itself; nothing is shared.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.2.1: the model that a site gets from its own data.

    at site k:   minimise  L = 1/|C_k| sum_{c in C_k} BCE_c

A reference for the same training loop, initialisation and budget. Each site keeps its own best round.
"""

from __future__ import annotations

from dataclasses import replace

from suture.methods.base import About, LabelUse, SharingSpec, hyperparameters
from suture.methods.class_weights import WeightedAveraging


@hyperparameters
class Individual(WeightedAveraging):
    """Individual training; see `WeightedAveraging` for the fields."""

    about = About(
        "individual",
        "Individual training",
        "Kulkarni et al. 2024, Sec. 3.2.1",
        question="references",
        mixes_patients="",
        local_only="trains every site by itself and exchanges nothing",
    )
    labels = LabelUse(view="own")

    @property
    def sharing(self) -> SharingSpec:
        return replace(super().sharing, personal="model")
