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
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.augmentation import STRONG, Augmentation
from suture.data.batch import Batch
from suture.learning.losses import probabilities
from suture.learning.training import LocalRound, SiteContext
from suture.methods.base import About, LabelUse, Limits, hyperparameters
from suture.methods.composed import Composed
from suture.methods.confident import (
    LabelledCrossEntropy,
    Thresholds,
    of_no_other_class,
    pseudo_loss,
    unknown_entries,
)
from suture.methods.roles import Needs, Step, Supervised, Term, Value


@validated(frozen=True, config=STRICT)
class ReceivedLabels(Term):
    """Confident pseudo-labels of the received model.

    Attributes:
        weight: lambda.
        thresholds: how sure the received model must be; those of FedLSM and FixMatch.
        strong: the view that the site learns; the weak one is under the job's augmentation.
    """

    needs: ClassVar[Needs] = Needs(
        view="all", unknown="masked", why="gives pseudo-labels for what the site does not annotate"
    )

    weight: Annotated[float, Field(ge=0)] = 1.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    strong: Augmentation = STRONG

    @property
    def active(self) -> bool:
        return self.weight > 0

    @property
    def second_view(self) -> Augmentation:
        return self.strong

    def seen_again(self, batch: Batch, label_type: LabelType) -> Tensor:
        return unknown_entries(batch, label_type).any(dim=1).nonzero().squeeze(1)

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        label_type = site.model.labels.label_type

        def value(step: Step) -> Tensor:
            if step.rows is None or step.strong is None:
                return step.logits.new_zeros(())
            p = probabilities(step.received_logits[step.rows], label_type)
            unknown = unknown_entries(step.batch, label_type)[step.rows]
            return self.weight * pseudo_loss(p, step.strong, unknown, label_type, self.thresholds)

        return value


@hyperparameters
class FSSL(Composed):
    """FSSL; see `Composed` for the other fields.

    Attributes:
        rows: of the head, by default those of the ``owners`` of a class.
        unknown: ``masked``; a class that gets pseudo-labels is not taught as absent, except that an image
            with its one label is of no other class.
        received_labels: the pseudo-labels; with the weight 0 it is FedAvg.
    """

    about = About(
        "fssl", "FSSL (reconstruction)", "Yang et al., Medical Image Analysis 2021; Deng et al., MICCAI 2023"
    )
    labels = LabelUse(view="all", unknown="masked")
    limits = Limits(images_only=True)

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"
    received_labels: ReceivedLabels = field(default_factory=ReceivedLabels)

    @property
    def supervised(self) -> Supervised:
        return super().supervised if self.softmax == "balanced" else LabelledCrossEntropy(self.class_weights)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        return super().loss(logits, *of_no_other_class(y, known, label_type), label_type)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.received_labels,)
