"""Centralised training: the data of all sites in one place. Two references, no federation.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.1 ("Central"; "Naive" of the MIDL 2023 version), and
    the baseline trained on complete data of the simulations (Sec. 4.2.1).

    central:        minimise  L = 1/|C| sum_{c in C} BCE_c,  with y_c = 0 for c not in C_k
    central_full:   minimise  L = 1/|C| sum_{c in C} BCE_c,  every label known: the upper bound

Hospitals that could pool their images would need no federation; these say what the federation costs.
"""

from __future__ import annotations

from suture.methods.base import About, LabelUse, hyperparameters
from suture.methods.class_weights import WeightedAveraging

_WHY = "pools the images of all sites"


@hyperparameters
class Central(WeightedAveraging):
    """Pooled data; what a site does not annotate is absent. See `WeightedAveraging` for the fields."""

    about = About(
        "central",
        "Centralised training",
        "Kulkarni et al. 2024, Sec. 3.3.1",
        question="references",
        pooled=True,
        mixes_patients=_WHY,
        local_only=_WHY,
    )
    labels = LabelUse(view="own", unknown="negative")


@hyperparameters
class CentralFull(WeightedAveraging):
    """Pooled data of which every label is known. See `WeightedAveraging` for the fields."""

    about = About(
        "central_full",
        "Centralised training on complete labels",
        "Kulkarni et al. 2024, Sec. 4.2.1",
        question="references",
        pooled=True,
        mixes_patients=_WHY,
        local_only=_WHY,
    )
    labels = LabelUse(view="own", complete=True)
