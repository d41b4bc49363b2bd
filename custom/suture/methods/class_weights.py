"""Class weights against the rarity of positives, from what the sites count before round 1.

    Deng, Luo, Chen. FedLSM, MICCAI 2023, Sec. 3.2: weighted binary cross-entropy, "as in FPSL" (Dong et al.,
    IEEE TMI 2022). Its published program:   w_c = sum_k negatives_kc / sum_k positives_kc

The program also counts every image of a site that does not know a class as a negative of it (`program`);
without these, the counts are of known labels alone (`known`). A positive weighs more in binary
cross-entropies alone: where an image has a single label there are no class weights, and sites send no counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.learning.steps import masked_loss, weighted_bce
from suture.learning.training import LocalRound, Loss, SiteContext, fit
from suture.methods.averaging import LocalAveraging
from suture.methods.base import ClassFacts, LabelStatistics, hyperparameters
from suture.models.classifier import Layout
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update

ClassWeights = Literal["known", "program", "none"]

NAME = "positive_weight"


def _countable(rule: ClassWeights) -> tuple[LabelType, ...]:
    """The label types for which the sites are asked for counts."""
    return () if rule == "none" else ("multilabel",)


def with_counts(egress: Egress, rule: ClassWeights, types: Collection[LabelType]) -> Egress:
    """What leaves a site, with its counts and the channel by which it learns the weights.

    Args:
        types: of labels, that the method is defined for; where none of them has weights, nothing is added.
    """
    counts = tuple(kind for kind in _countable(rule) if kind in types)
    if not counts:
        return egress
    why = "weight of a positive of the class, from the counts of the sites; with multilabel labels only"
    return replace(
        egress,
        channels=(Channel(NAME, "facts", (CLASSES,), why=why), *egress.channels),
        counts=counts,
        why={**egress.why, "counts": "images with and without each class, for the class weights"},
    )


def class_weights(statistics: LabelStatistics, rule: ClassWeights) -> ClassFacts:
    """The weight of a positive of each class, and a note on each class that has none to give.

    Args:
        rule: ``known`` counts the sites that know a class; ``program`` counts all images of the others as
            negatives; ``none`` weights every class 1.

    Returns:
        `NAME`, ``[len(labels)]``; nothing where the sites were asked for no counts.
    """
    if statistics.label_type not in _countable(rule):
        return ClassFacts()
    weights, notes = [], []
    for name in statistics.labels:
        positives = negatives = 0
        for site, counts in statistics.counts.items():
            reported = counts.get(name)
            if reported is not None:
                positives, negatives = positives + reported[0], negatives + reported[1]
            elif rule == "program" and name not in counts:
                negatives += statistics.images[site]
        weights.append(negatives / positives if positives and negatives else 1.0)
        if not positives or not negatives:
            withheld = [
                site for site, counts in statistics.counts.items() if name in counts and not counts[name]
            ]
            why = (
                f"withheld by {', '.join(withheld)}" if withheld else "no site has a positive and a negative"
            )
            notes.append(f"{name} has the class weight 1: {why}.")
    return ClassFacts({NAME: torch.tensor(weights, dtype=torch.float32)}, tuple(notes))


def received_weights(received: TaskData, rule: ClassWeights, label_type: LabelType) -> Tensor | None:
    """The weights that the server sent, ``[c]``; None where the rule and the label type have none.

    Raises:
        ConfigError: the payload has none although the rule asks for them; to train on would weight every
            class 1 unseen.
    """
    if label_type not in _countable(rule):
        return None
    if NAME not in received.channels:
        raise ConfigError(
            f"the server sent no {NAME} with round {received.round}, but class_weights={rule!r} needs "
            "it. Run the same version of suture on both sides, or set class_weights=none"
        )
    return received.channels[NAME]


def cross_entropy(site: SiteContext, received: TaskData, rule: ClassWeights) -> Loss:
    """The cross-entropy of known labels; where an image has several, binary, and positives weigh w_c.

    Raises:
        ConfigError: see `received_weights`.
    """
    label_type = site.model.labels.label_type
    weight = received_weights(received, rule, label_type)
    if weight is not None:
        weight = weight.to(site.device)  # once: in a step a GPU would be waited for

    def loss(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
        if weight is None:
            return masked_loss(logits, y, known, label_type)
        each = weighted_bce(logits, y, weight)
        return torch.where(known, each, 0.0).sum() / known.sum().clamp(min=1)

    return loss


@hyperparameters
class WeightedAveraging(LocalAveraging):
    """Local training and a weighted mean; see `LocalAveraging` for the other fields.

    Attributes:
        class_weights: of positives in the binary cross-entropy, from the sites' counts of ``known`` labels,
            which they then send; or ``none``.
    """

    class_weights: Literal["known", "none"] = "none"

    def egress(self, layout: Layout) -> Egress:
        return with_counts(super().egress(layout), self.class_weights, self.labels.types)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        if self.class_weights == "none":
            return super().train(site, received, round_)
        loss = cross_entropy(site, received, self.class_weights)
        fitted = fit(site, lambda model, batch: loss(model(batch.inputs), batch.y, batch.known), round_)
        return self.weigh(site, received, round_, fitted), fitted.optimiser_state

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        return class_weights(statistics, self.class_weights)
