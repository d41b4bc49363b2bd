"""The local round that the methods of weight averaging share."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from suture.messages import Payload, Update, ones
from suture.methods.contract import Context, Egress
from suture.models.classifier import Layout, split_state
from suture.models.norm import NormPolicy, shared_names
from suture.packing import Packed
from suture.training import LocalTraining, Loss, Workbench, fit

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
    site: Workbench,
    received: Payload,
    state: Packed,
    ctx: Context,
    *,
    loss: Loss,
    local: LocalTraining,
    policy: NormPolicy,
) -> tuple[Update, dict[str, Tensor]]:
    """E epochs of Adam from the received model; the moments stay at the site.

    Returns:
        the trained weights with every class of the head counting once, and the moments to keep.
    """
    fitted = fit(
        site,
        loss,
        local if ctx.phase.lr is None else replace(local, lr=ctx.phase.lr),
        policy=policy,
        moments=state.tensors,
        head_only=ctx.phase.trainable == "head",
        seed=ctx.seed,
        round_=ctx.round,
    )
    shared, head = split_state(site.model.state_dict())
    update = Update(
        round=ctx.round,
        labels=received.labels,
        shared={name: shared[name].detach().cpu() for name in shared_names(site.model, policy)},
        head={name: rows.detach().cpu() for name, rows in head.items()},
        class_weights=ones(received.labels),
        train_loss=fitted.loss,
    )
    return update, fitted.moments
