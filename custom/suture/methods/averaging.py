"""The local round that the methods of weight averaging share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from suture.core.labels import LabelType
from suture.learning.losses import TaskLoss
from suture.learning.training import Fitted, LocalTraining, Loss, SiteContext, fit, on_known, predict
from suture.methods.base import RoundContext
from suture.models.classifier import Layout, load_tensors, split_state
from suture.models.norm import NormPolicy
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update, ones
from suture.protocol.packing import Packed

WHY = {
    "shared": "backbone weights, averaged over sites",
    "head": "rows of the site's classes, averaged over the sites that send them",
    "weight": "how much the site counts in the mean",
    "class_weights": "how much it counts in the mean of each row",
    "train_loss": "progress of local training",
    "metrics": "the received global model on the site's validation data; selects the best round",
}


def weights_egress(layout: Layout) -> Egress:
    """What leaves when weights are averaged with every site counting once."""
    return Egress(shared=layout.shared, head=layout.head, why=WHY)


def train_weights(
    site: SiteContext,
    received: Payload,
    state: Packed,
    ctx: RoundContext,
    *,
    loss: TaskLoss,
    local: LocalTraining,
    policy: NormPolicy,
) -> tuple[Update, dict[str, Tensor]]:
    """E epochs of Adam from the received model; the moments stay at the site, and end with their phase.

    Returns:
        the trained weights with every class of the head counting once, and the moments to keep.
    """
    of_task = loss_of(loss, site.model.labels.label_type)
    best = Best(site, of_task) if ctx.phase.keep_best else None
    fitted = fit(
        site,
        on_known(of_task),
        in_phase(site.own(local), ctx),
        policy=policy,
        optimiser_state=kept_optimiser_state(state, ctx),
        head_only=ctx.phase.trainable == "head",
        seed=ctx.seed,
        round_=ctx.round,
        after_epoch=best,
    )
    if best:
        best.restore()
    return trained(site, received, ctx, fitted), fitted.optimiser_state


def trained(site: SiteContext, received: Payload, ctx: RoundContext, fitted: Fitted) -> Update:
    """The update of a trained model: all that was received, the site and each of its rows counting once."""
    shared, head = split_state(site.model.state_dict())
    return Update(
        round=ctx.round,
        labels=received.labels,
        shared={name: shared[name].detach().cpu() for name in received.shared},
        head={name: head[name].detach().cpu() for name in received.head},
        class_weights=ones(received.labels),
        train_loss=fitted.loss,
    )


def kept_optimiser_state(state: Packed, ctx: RoundContext) -> Mapping[str, Tensor]:
    """The optimiser's, unless another phase has begun."""
    return state.tensors if state.header.get("phase") == ctx.phase.name else {}


def owned(site: SiteContext) -> Tensor:
    """``[c]``: 1 for each class that the site annotates, else 0."""
    if site.identified is None:
        return ones(site.model.labels.names)
    return site.identified.to(torch.float64)


def loss_of(loss: TaskLoss, task: LabelType) -> Loss:
    """A method's loss for one task."""
    return lambda logits, y, known: loss(logits, y, known, task)


def in_phase(local: LocalTraining, ctx: RoundContext) -> LocalTraining:
    """The local training of one round: the epochs and learning rate of its phase, or else the method's."""
    phase = ctx.phase
    lr = local.lr_of(ctx.phase_round, phase.rounds) if phase.lr is None else phase.lr
    if phase.epochs is None:
        return replace(local, lr=lr)
    return replace(local, lr=lr, epochs=phase.epochs, iterations=None)


class Best:
    """Remembers the epoch of the lowest validation loss; without validation data, the last."""

    def __init__(self, site: SiteContext, loss: Loss) -> None:
        self._site, self._loss = site, loss
        self._lowest = math.inf
        self._tensors: dict[str, Tensor] = {}

    def __call__(self) -> None:
        """Measures the model, and keeps it if it is the best so far."""
        value = validation_loss(self._site, self._loss)
        if value is None or value < self._lowest:
            self._lowest = math.inf if value is None else value
            self._tensors = {k: t.detach().clone() for k, t in self._site.model.state_dict().items()}

    def restore(self) -> None:
        """Puts the best model back."""
        load_tensors(self._site.model, self._tensors)


def validation_loss(site: SiteContext, loss: Loss) -> float | None:
    """The loss on the site's validation data, None if it has none."""
    part = site.samples.get("validation")
    if part is None or not len(part):
        return None
    return float(loss(predict(site, part), *part.targets()))
