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

from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.methods.base import About, hyperparameters
from suture.methods.composed import BalancedSoftmax, Composed, CrossEntropy, Supervised
from suture_papers.drift.fedprox import Proximal
from suture_papers.drift.moon import Contrastive
from suture_papers.missing_labels.condist import Distillation
from suture_papers.missing_labels.confident import OverAllClasses, of_no_other_class
from suture_papers.missing_labels.fedpu import PositiveUnlabelled
from suture_papers.missing_labels.fedrs import Restricted, Restricting
from suture_papers.missing_labels.fedvls import LogitSuppression, VacantDistillation
from suture_papers.missing_labels.fixmatch import PseudoLabels
from suture_papers.missing_labels.fssl import ReceivedLabels
from suture_papers.rare_classes.fedlc import Calibrated
from suture_papers.rare_classes.focal import Focal
from suture_papers.rare_classes.ldam import LabelDistributionMargin


@hyperparameters
class Combined(Composed):
    """Parts of several methods; see `Composed` for the other fields. A part that is None is left out.

    Attributes:
        rows: by default those of the ``owners`` of a class.
        unknown: by default ``masked``: what a site does not annotate is not taught as absent.
        calibrated, focal, margin, suppression, restricted: a loss, of FedLC, `FocalFedAvg`, LDAM-FL, FedVLS
            or FedRS.
        proximal, contrastive, distil, vacant, positive_unlabelled: a term, of FedProx, MOON, ConDist, FedVLS
            or FedPU.
        pseudo_labels, received_labels: a term, of FixMatch or FSSL; as there, with one label an image the
            loss is then a softmax over all classes.

    Raises:
        ConfigError: two losses are named, or a part does not get what it needs.
    """

    about = About(
        "combined",
        "Combined",
        "the papers of its parts",
        mixes_patients="weighs sites by their numbers of images",
    )

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"
    calibrated: Calibrated | None = None
    focal: Focal | None = None
    margin: LabelDistributionMargin | None = None
    suppression: LogitSuppression | None = None
    restricted: Restricted | None = None
    proximal: Proximal | None = None
    contrastive: Contrastive | None = None
    distil: Distillation | None = None
    vacant: VacantDistillation | None = None
    positive_unlabelled: PositiveUnlabelled | None = None
    pseudo_labels: PseudoLabels | None = None
    received_labels: ReceivedLabels | None = None

    def __post_init__(self) -> None:
        named = [type(part).__name__ for part in self.parts if isinstance(part, Supervised)]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} both replace the loss of known labels; leave one out")
        if self.restricted and not isinstance(self.parts[0], CrossEntropy | BalancedSoftmax):
            raise ConfigError(
                f"Restricted restricts the plain or the balanced softmax, not {named[0]}; leave one out"
            )
        super().__post_init__()

    @property
    def supervised(self) -> Supervised:
        loss = super().supervised
        loss = Restricting(self.restricted, loss) if self.restricted else loss
        return OverAllClasses(loss) if self._confident and self.softmax == "plain" else loss

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        if self._confident:
            y, known = of_no_other_class(y, known, label_type)
        return super().loss(logits, y, known, label_type)

    @property
    def _confident(self) -> bool:
        return self.pseudo_labels is not None or self.received_labels is not None
