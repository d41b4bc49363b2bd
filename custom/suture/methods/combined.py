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
from suture.methods.fedprox import Proximal
from suture.methods.roles import Supervised, Term


@hyperparameters
class Combined(Composed):
    """Parts of several methods; see `Composed` for the other fields. A part that is None is left out.

    Attributes:
        rows: by default those of the ``owners`` of a class.
        unknown: by default ``masked``: what a site does not annotate is not taught as absent.
        proximal: of FedProx.
        distil: of ConDist.

    Raises:
        ConfigError: two losses are named, or a part does not get what it needs.
    """

    about = About("combined", "Combined", "the papers of its parts")
    labels = LabelUse(view="all", unknown="masked")

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"
    proximal: Proximal | None = None
    distil: Distillation | None = None

    def __post_init__(self) -> None:
        named = [name for name, part in self._losses.items() if part is not None]
        if self.softmax == "balanced":
            named.append("softmax=balanced")
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} are both the loss of known labels; leave one out")
        super().__post_init__()

    @property
    def _losses(self) -> dict[str, Supervised | None]:
        return {}

    @property
    def supervised(self) -> Supervised:
        return next((part for part in self._losses.values() if part is not None), super().supervised)

    @property
    def terms(self) -> tuple[Term, ...]:
        parts: tuple[Term | None, ...] = (self.proximal, self.distil)
        return tuple(part for part in parts if part is not None)
