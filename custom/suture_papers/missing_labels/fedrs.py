"""FedRS: a site restricts what its loss does to the head's rows of classes that it lacks.

    Li, Zhan. FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data. KDD 2021;
    Eq. 8. As a baseline: Deng et al. (FedLSM), MICCAI 2023, Tables 1 and 2.

    at site k:   minimise  CE(softmax(a * z), y),   a_c = 1 if the site has class c, else alpha    (Eq. 8)
                 graded, as in the program:         a_c = alpha + (1 - alpha) n_c / max_j n_j
    server:      as FedAvg, all rows

Without images of c, the softmax only ever pushes row c away from the site's features; alpha < 1 pushes less.
The restriction is of training alone: the model is measured and used without it.

The paper has one label an image. With several, this is a reconstruction: BCE(a_c z_c, y_c), in which a class
that the site does not annotate is taught as absent, and alone has a_c = alpha: the gradient of a label that
may be false is alpha sigma(alpha z_c) in place of sigma(z_c). Positives weigh w_c as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.averaging import own_rows
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Component, Composed, Requirements, Supervised, class_counts
from suture.protocol.messages import TaskData


@validated(frozen=True, config=STRICT)
class Restricted(Component):
    """How logits are restricted: a_c z_c.

    Attributes:
        alpha: of a class that the site lacks. The paper's program tries 0.1 to 0.9.
        graded: whether a_c rises with the number of the class's images, as in that program, so that the rare
            classes of a site are restricted, too.
    """

    needs: ClassVar[Requirements] = Requirements(
        view="all", unknown="negative", why="restricts how a site teaches that classes of others are absent"
    )
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    graded: StrictBool = False

    def factors(self, site: SiteContext) -> Tensor:
        """a, ``[c]`` in double precision."""
        counts = class_counts(site).double()
        if self.graded:
            share = counts / counts.max().clamp(min=1)
        elif site.model.labels.label_type == "multiclass":
            share = (counts > 0).double()
        else:
            share = own_rows(site).double()
        return 1 - (1 - self.alpha) * (1 - share)  # exactly 1 where the share is


@dataclass(frozen=True)
class Restricting(Supervised):
    """Another loss, of restricted logits."""

    restricted: Restricted
    loss: Supervised

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        loss, a = self.loss.of(site, received, round_), self.restricted.factors(site).to(site.device)
        return lambda logits, y, known: loss(a.to(logits) * logits, y, known)


@hyperparameters
class FedRS(Composed):
    """FedRS; see `Composed` for the other fields.

    Attributes:
        restricted: the restriction. Under ``softmax="balanced"`` it comes before the counts.
    """

    about = About(
        "fedrs",
        "FedRS",
        "Li and Zhan, KDD 2021, Eq. 8",
        mixes_patients="weighs sites by their numbers of images",
    )
    restricted: Restricted = field(default_factory=Restricted)

    @property
    def supervised(self) -> Supervised:
        return Restricting(self.restricted, super().supervised)
