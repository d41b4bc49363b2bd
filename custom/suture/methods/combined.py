"""Combined: the parts of several methods in one job, as far as they go together.

The methods of this package each change one thing of FedAvg, and these things have roles: the loss of known
labels, further terms, whose rows count, what batch norm does. Here a job names one of each:

    at site k:   minimise  L = L_sup + sum_j T_j       L_sup: one of the losses; T_j: any of the terms
    server:      FedAvg; psi_c over all sites or over the owners of class c, weighted by images or equally

    suture run JOB --set method=combined --set method.distil.last=1 --set method.weights=equal \
        --set method.batch_norm=frozen

is Surgical Aggregation's rows with ConDist's distillation on FedBN+. Each part says what it needs; what does
not go together is refused with the reason. What each part does is said where its method is.
"""

from __future__ import annotations

from typing import Literal

from suture.core.errors import ConfigError
from suture.methods.base import About, LabelUse, hyperparameters
from suture.methods.composed import Composed
from suture.methods.condist import Distillation
from suture.methods.fedlc import Calibrated
from suture.methods.fedprox import Proximal
from suture.methods.fedrs import Restricted, Restricting
from suture.methods.fixmatch import PseudoLabels
from suture.methods.focal import Focal
from suture.methods.fssl import ReceivedLabels
from suture.methods.ldam import LabelDistributionMargin
from suture.methods.moon import Contrastive
from suture.methods.roles import Part, Supervised, Term


@hyperparameters
class Combined(Composed):
    """Parts of several methods; see `Composed` for the other fields. A part that is None is left out.

    Attributes:
        rows: by default those of the ``owners`` of a class.
        unknown: by default ``masked``: what a site does not annotate is not taught as absent.
        calibrated, focal, margin, restricted: a loss, of FedLC, `FocalFedAvg`, LDAM-FL or FedRS.
        proximal, contrastive, distil, pseudo_labels, received_labels: a term, of FedProx, MOON, ConDist,
            FixMatch or FSSL.

    Raises:
        ConfigError: two losses are named, or a part does not get what it needs.
    """

    about = About("combined", "Combined", "the papers of its parts")
    labels = LabelUse(view="all", unknown="masked")

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"
    calibrated: Calibrated | None = None
    focal: Focal | None = None
    margin: LabelDistributionMargin | None = None
    restricted: Restricted | None = None
    proximal: Proximal | None = None
    contrastive: Contrastive | None = None
    distil: Distillation | None = None
    pseudo_labels: PseudoLabels | None = None
    received_labels: ReceivedLabels | None = None

    def __post_init__(self) -> None:
        losses = (self.calibrated, self.focal, self.margin)
        named = [type(part).__name__ for part in losses if part is not None]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} are both the loss of known labels; leave one out")
        if named and self.restricted:
            raise ConfigError(
                f"Restricted restricts the plain or the balanced softmax, not {named[0]}; leave one out"
            )
        super().__post_init__()

    @property
    def supervised(self) -> Supervised:
        loss = self.calibrated or self.focal or self.margin or super().supervised
        return Restricting(self.restricted, loss) if self.restricted else loss

    @property
    def terms(self) -> tuple[Term, ...]:
        parts = (self.proximal, self.contrastive, self.distil, self.pseudo_labels, self.received_labels)
        return tuple(part for part in parts if part is not None)

    @property
    def _parts(self) -> tuple[Part, ...]:
        restricted = (self.restricted, super().supervised) if self.restricted else (self.supervised,)
        return (*restricted, *self.terms)
