"""Methods that train locally and average weights: what they share, so that each is what its paper changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import field, replace

from torch import Tensor

from suture.data.batch import Batch
from suture.learning.training import Fitted, LocalRound, LocalTraining, Objective, SiteContext, fit
from suture.methods.aggregation import weighted_mean
from suture.methods.base import GlobalModel, Method, RoundContext, hyperparameters
from suture.models.classifier import Classifier, Layout, split_state
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update, ones

WHY = {
    "shared": "backbone weights, averaged over sites",
    "head": "rows of the site's classes, averaged over the sites that send them",
    "weight": "how much the site counts in the mean",
    "class_weights": "how much it counts in the mean of each row",
    "train_loss": "progress of local training",
    "metrics": "the received global model on the site's validation data; selects the best round",
}


@hyperparameters
class LocalAveraging(Method):
    """Local training and a weighted mean; by itself FedAvg over the rows that the sites send.

    A method overrides what its paper changes: the `objective` of a step, the weights of a site and of its
    rows, or `aggregate`.

    Attributes:
        local: Adam, learning rate 5e-5, one epoch a round, batches of 64 (Kulkarni et al. 2024, Sec. 3.4).
        batch_norm: ``average`` (FedAvg); ``frozen`` (FedBN+: a pretrained backbone's batch norm stays as it
            is and is sent once); ``local`` (FedBN), where models stay at the sites.
    """

    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        unused = {"nothing": (), "head": ("head",), "model": tuple(WHY.keys() - {"metrics"})}[self.personal]
        why = {name: text for name, text in WHY.items() if name not in unused}
        return Egress(shared=layout.shared, head=layout.head, why=why)

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        """What a local step minimises, a scalar; by default the loss over known labels.

        Args:
            reference: the received model, frozen, in eval mode.
        """
        return self.loss(model(batch.inputs), batch.y, batch.known, model.labels.label_type)

    def weight(self, site: SiteContext) -> float:
        """How much the site counts in the mean of each shared tensor; `egress` declares its range."""
        return 1.0

    def row_weights(self, site: SiteContext, received: Payload) -> Tensor:
        """How much it counts in the mean of each row, ``[c]``; `egress` declares the range."""
        return self.weight(site) * ones(received.labels)

    def train(
        self, site: SiteContext, received: Payload, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        fitted = fit(site, self._objective(site), round_)
        update = trained(site, received, round_, fitted)
        weight, rows = self.weight(site), self.row_weights(site, received)
        return replace(update, weight=weight, class_weights=rows), fitted.optimiser_state

    def _objective(self, site: SiteContext) -> Objective:
        # A copy of the received model takes memory and time: made only for a method that may look at it.
        custom = type(self).objective is not LocalAveraging.objective
        reference = copy.deepcopy(site.model).eval().requires_grad_(False) if custom else site.model
        return lambda model, batch: self.objective(model, batch, reference)

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        sent = previous if self.personal == "nothing" else replace(previous, head={})
        return weighted_mean(sent, updates).applied_to(previous)


def trained(site: SiteContext, received: Payload, round_: LocalRound, fitted: Fitted) -> Update:
    """The update of a trained model: all that was received, the site and each of its rows counting once."""
    shared, head = split_state(site.model.state_dict())
    return Update(
        round=round_.round,
        labels=received.labels,
        shared={name: shared[name].detach().cpu() for name in received.shared},
        head={name: head[name].detach().cpu() for name in received.head},
        class_weights=ones(received.labels),
        train_loss=fitted.loss,
    )


def owned(site: SiteContext) -> Tensor:
    """``[c]``: 1 for each class that the site annotates, else 0."""
    if site.identified is None:
        return ones(site.model.labels.names)
    return site.identified.to(ones(()).dtype)
