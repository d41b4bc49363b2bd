"""Decoupling (cRT): FedAvg, and in the last rounds a new head, trained on every class equally often.

    Kang et al. Decoupling Representation and Classifier for Long-Tailed Recognition. ICLR 2020. A row of
    Elbatel et al. (Fed-MAS), MICCAI 2023, Table 7, which adds the re-training to other methods, too.

    rounds 1 .. R - R':   FedAvg, or FedAvg with balanced softmax; see `Composed`
    the last R' rounds:   the backbone is frozen, the head reinitialised; see `retraining.py`
    server:               as in FedAvg throughout

Neither paper says how the head is re-trained in a federation: that it happens in rounds is our reading.
"""

from __future__ import annotations

from dataclasses import field

from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed
from suture.methods.retraining import Retraining


@hyperparameters
class Decoupling(Composed):
    """FedAvg with a re-training of the head that ends the run; the other methods have it as a field."""

    about = About(
        "crt",
        "Decoupling (cRT)",
        "Kang et al., ICLR 2020",
        question="classes rare",
        mixes_patients="samples images by their classes",
    )
    retrain: Retraining | None = field(default_factory=Retraining)
