"""FSSL: the received model labels a weak view of what a site does not annotate; the site learns a strong one.

    Yang et al. Federated semi-supervised learning for COVID region segmentation in chest CT using
    multi-national data from China, Italy, Japan. Medical Image Analysis 2021; FSSL* in Tables 1 and 2 of Deng
    et al. (FedLSM), MICCAI 2023.

What is published does not suffice to write it for classification: this is a reconstruction. It is FixMatch
(confident.py) with one change: the model that labels rests for a round.

    at site k:   minimise  L = L(labels) + lambda L_u(p', z)
                 p': probabilities of the received model for the weak view; z: logits of the strong one
    server:      FedAvg; psi_c over the sites that annotate class c

The paper gives sites with annotations a larger weight. Here every site has some, so that has no counterpart.
"""

from __future__ import annotations

from dataclasses import field

from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Step
from suture_papers.missing_labels.confident import Confident, ConfidentLabels


@validated(frozen=True, config=STRICT)
class ReceivedLabels(ConfidentLabels):
    """Confident pseudo-labels of the received model; see `ConfidentLabels` for the fields."""

    def labelling(self, step: Step) -> Tensor:
        return step.received_logits


@hyperparameters
class FSSL(Confident):
    """FSSL; see `Confident` and `Composed` for the other fields.

    Attributes:
        received_labels: the pseudo-labels; with the weight 0 it is FedAvg.
    """

    about = About(
        "fssl",
        "FSSL (reconstruction)",
        "Yang et al., Medical Image Analysis 2021; Deng et al., MICCAI 2023",
        images_only=True,
        mixes_patients="weighs sites by their numbers of images",
    )
    received_labels: ReceivedLabels = field(default_factory=ReceivedLabels)
