"""Ark: sites train from one student, each with a head of its own, near a teacher that follows slowly.

    Ma, Pang, Gotway, Liang. Foundation Ark: Accruing and Reusing Knowledge for Superior and Robust
    Performance. MICCAI 2023, arXiv:2310.09507. Ma et al. A fully open AI foundation model applied to chest
    radiography (Ark+). Nature 2025.

Its authors have applied for a patent (US 2026/0066123 A1): the method is here as a benchmark. Nothing is
taken from their program, which has no licence.

Ark is central. One student passes through the data sets, with a head for each; after each data set, a moving
average of the student becomes the teacher, and the student's projections stay near the teacher's. In this
federated reading the data sets are sites. They train in parallel, so the teacher moves once a round. w is
backbone and projector, g(x; w) a projection of d numbers, psi_kc the row of class c in the head of site k.

    at site k:   from w, and from the rows psi_k that the site kept (at first the received ones), minimise
                 L = 1/|C_k| sum_{c in C_k} BCE_c + lambda mean |g(x; w_k) - g(x; w^T)|^2 / d
    server:      student  w     = 1/K sum_k w_k
                          psi_c = mean of psi_kc over the sites {k : c in C_k}
                 teacher  w^T   = m w^T + (1 - m) w,  psi^T likewise,  m = .9; it begins as the student

The teacher predicts. The mean of the logits of several linear heads is the logit of their mean row, so one
row stands for the heads of all sites that annotate a class. The server keeps and sends how far the teacher is
from the student, w^T - w: zeros at first, and for the row of a new class.

Ours, where the papers left it open or were not at hand in full: m, the squared distance, and lambda = 1; the
projector is MOON's neck, before the heads; student and teacher see one view of an image; sites count alike.
The authors' own federation (Ark+, Extended Data Fig. 2)
is another one: each site has several data sets, and a teacher of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from suture.data.batch import Batch
from suture.learning.training import LocalRound, SiteContext, fit
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, GlobalModel, LabelUse, RoundContext, hyperparameters
from suture.models import ModelSpec
from suture.models.classifier import Classifier, Layout, frozen_copy, load_tensors
from suture.protocol.egress import Channel, Egress, add_prefix, strip_prefix
from suture.protocol.messages import TaskData, Update

NECK = 256
"""Width of the projections, as in MOON."""

LAG, ROWS = "teacher_lag", "own_rows"
"""Names of what lies between teacher and student, down, and of psi_k, at the site."""


@hyperparameters
class Ark(LocalAveraging):
    """Ark as a federated method; see `LocalAveraging` for the other fields.

    Attributes:
        momentum: m, the share of the teacher that stays in a round.
        consistency: lambda, the weight of the mean squared distance of the projections.
    """

    about = About(
        "ark",
        "Ark, federated (reconstruction)",
        "Ma et al., MICCAI 2023, arXiv:2310.09507",
        mixes_patients="begins each round from rows that stayed at the site",
    )
    labels = LabelUse(view="own")
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    consistency: Annotated[float, Field(ge=0)] = 1.0

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, neck=spec.neck or NECK, projection=0)

    def egress(self, layout: Layout) -> Egress:
        channels = (Channel(LAG, "down", layout), Channel(ROWS, "site", Layout({}, layout.head)))
        return replace(super().egress(layout), channels=channels)

    def predictor(
        self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return {name: tensors[name] + lag for name, lag in strip_prefix(LAG, channels).items()}

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        """L of a batch, a scalar; the reference is the teacher."""
        z = model.features(batch.inputs)
        with torch.no_grad():
            target = reference.features(batch.inputs)
        known = self.loss(model.head(z), batch.y, batch.known, model.labels.label_type)
        return known + self.consistency * F.mse_loss(z, target)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        teacher = frozen_copy(site.model)
        load_tensors(teacher, self.predictor({**received.shared, **received.head}, received.channels))
        load_tensors(site.model, own_rows(received.head, strip_prefix(ROWS, round_.kept)))
        fitted = fit(site, lambda model, batch: self.objective(model, batch, teacher), round_)
        update = self.weigh(site, received, round_, fitted)
        return update, fitted.optimiser_state | add_prefix(ROWS, update.head)

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        before, now = ({**model.shared, **model.head} for model in (previous, merged))
        lag = {  # m w^T + (1 - m) w - w
            name: self.momentum * (before[name] + old - now[name])
            for name, old in strip_prefix(LAG, previous.channels).items()
        }
        return replace(merged, channels=add_prefix(LAG, lag))


def own_rows(received: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows that a site kept, ``[c, ...]``; of a class of which it kept none, zeros, the received ones."""
    known = kept["head.weight"].any(dim=1)
    return {
        name: rows.where(known.view(-1, *[1] * (rows.dim() - 1)), received[name])
        for name, rows in kept.items()
    }
