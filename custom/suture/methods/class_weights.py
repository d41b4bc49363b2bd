"""Class weights against the rarity of positives, from what the sites count before round 1.

    Deng, Luo, Chen. FedLSM, MICCAI 2023, Sec. 3.2: weighted binary cross-entropy, "as in FPSL" (Dong et al.,
    IEEE TMI 2022). Its published program:   w_c = sum_k negatives_kc / sum_k positives_kc

The program also counts every image of a site that does not know a class as a negative of it (`program`);
without these, the counts are of known labels alone (`known`). A positive weighs more in binary
cross-entropies alone: where an image has a single label there are no class weights, and sites send no counts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.methods.base import ClassFacts, LabelStatistics
from suture.protocol.egress import CLASSES, Channel
from suture.protocol.messages import TaskData

ClassWeights = Literal["known", "program", "none"]

NAME = "positive_weight"


def counted(rule: ClassWeights) -> tuple[LabelType, ...]:
    """The label types for which the sites are asked for counts: see `Egress`."""
    return () if rule == "none" else ("multilabel",)


def why_counted(rule: ClassWeights) -> dict[str, str]:
    """What those counts are for, as `Egress.why` has it."""
    return {"counts": "images with and without each class, for the class weights"} if counted(rule) else {}


def told_weights(rule: ClassWeights) -> tuple[Channel, ...]:
    """The channel by which the sites learn the weights."""
    why = "weight of a positive of the class, from the counts of the sites; with multilabel labels only"
    return (Channel(NAME, "facts", (CLASSES,), why=why),) if counted(rule) else ()


def class_weights(statistics: LabelStatistics, rule: ClassWeights) -> ClassFacts:
    """The weight of a positive of each class, and a note on each class that has none to give.

    Args:
        rule: ``known`` counts the sites that know a class; ``program`` counts all images of the others as
            negatives; ``none`` weights every class 1.

    Returns:
        `NAME`, ``[len(labels)]``; nothing where the sites were asked for no counts.
    """
    if statistics.label_type not in counted(rule):
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
    if label_type not in counted(rule):
        return None
    if NAME not in received.channels:
        raise ConfigError(
            f"the server sent no {NAME} with round {received.round}, but class_weights={rule!r} needs "
            "it; run the same version of suture on both sides, or set class_weights=none"
        )
    return received.channels[NAME]
