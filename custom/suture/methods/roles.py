"""The roles that local training is put together from: one loss of known labels, and any further terms.

    at site k:   minimise  L = L_sup + sum_j T_j

A part is a value: its fields are hyperparameters. It says what it needs of the labels, and is refused where
it does not get that. Before each round a site binds it to its data, and gets a function of one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.augmentation import Augmentation
from suture.data.batch import Batch
from suture.learning.losses import balanced_ce, masked_loss, weighted_bce
from suture.learning.training import LocalRound, Loss, SiteContext
from suture.methods.base import SEVERAL, LabelUse, LabelView
from suture.methods.class_weights import ClassWeights, received_weights
from suture.models import ModelSpec
from suture.models.classifier import Classifier, Layout
from suture.protocol.egress import Channel
from suture.protocol.messages import TaskData


@dataclass(frozen=True)
class Requirements:
    """What a part cannot do without.

    Attributes:
        label_types: that it is defined for.
        view: the labels that a site must see; None for either.
        unknown: what training must make of a class that the site does not annotate; None for either.
        why: of view and unknown, the end of a sentence that begins with the part.
        pseudo: whether it makes pseudo-labels; see `LabelUse`.
    """

    label_types: tuple[LabelType, ...] = SEVERAL
    view: LabelView | None = None
    unknown: Literal["masked", "negative"] | None = None
    why: str = ""
    pseudo: bool = False


@dataclass(frozen=True)
class Step:
    """What a term sees of one step.

    Attributes:
        model: in training.
        received: the received model: frozen, in eval mode.
        batch: as the model sees it.
        features, logits: of the model, ``[n, d]`` and ``[n, c]``.
        rows, strong: images of the batch that a term asked to see again, ``[m]``, and the logits ``[m, c]``
            of the second view; None where no term did.
    """

    model: Classifier
    received: Classifier
    batch: Batch
    features: Tensor
    logits: Tensor
    rows: Tensor | None = None
    strong: Tensor | None = None

    @cached_property
    def received_features(self) -> Tensor:
        """The received model's input of its head, ``[n, d]``; no gradient."""
        with torch.no_grad():
            return self.received.features(self.batch.inputs)

    @cached_property
    def received_logits(self) -> Tensor:
        """The received model's logits, ``[n, c]``; no gradient."""
        with torch.no_grad():
            logits: Tensor = self.received.head(self.received_features)
            return logits


Value = Callable[[Step], Tensor]
"""A term of one step, a scalar."""


class Component:
    """A part of local training."""

    needs: ClassVar[Requirements] = Requirements()

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """The model with what the part cannot do without; see `Method.adapted`."""
        return spec


class Supervised(Component, ABC):
    """The loss of known labels."""

    @abstractmethod
    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        """The loss of one round: logits, y and known ``[n, c]`` to a scalar."""


class LossTerm(Component, ABC):
    """What is added to it."""

    @property
    def active(self) -> bool:
        """Whether it adds anything; a term of the weight 0 costs nothing."""
        return True

    @property
    def first_view(self) -> Augmentation | None:
        """How all images are seen, in place of the job's augmentation; None if as the job says."""
        return None

    @property
    def second_view(self) -> Augmentation | None:
        """How it sees some images again, in one forward pass with the first view; None if it does not."""
        return None

    def seen_again(self, batch: Batch, label_type: LabelType) -> Tensor:
        """The images that it sees a second time, ``[m]``; without any, no second view is drawn."""
        return torch.arange(0)

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """Other numbers of images that the labels of a batch decide, by name; see `training_batches`."""
        return {}

    @abstractmethod
    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        """The term in one round."""

    def channels(self, layout: Layout) -> tuple[Channel, ...]:
        """What the site keeps of the trained model; by default nothing. See `Egress.channels`."""
        return ()

    def kept(self, model: Classifier) -> dict[str, Tensor]:
        """The tensors of these channels, for the next round's ``kept``."""
        return {}


@validated(frozen=True, config=STRICT)
class CrossEntropy(Supervised):
    """The cross-entropy of known labels; where an image has several, binary, and positives weigh w_c.

    Attributes:
        class_weights: see `class_weights.py`.
    """

    class_weights: ClassWeights = "none"

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        label_type = site.model.labels.label_type
        weight = received_weights(received, self.class_weights, label_type)
        if weight is not None:
            weight = weight.to(site.device)  # once: in a step a GPU would be waited for

        def loss(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
            if weight is None:
                return masked_loss(logits, y, known, label_type)
            each = weighted_bce(logits, y, weight)
            return torch.where(known, each, 0.0).sum() / known.sum().clamp(min=1)

        return loss


@validated(frozen=True, config=STRICT)
class BalancedSoftmax(Supervised):
    """Balanced softmax by the site's own counts (Ren et al., NeurIPS 2020)."""

    needs: ClassVar[Requirements] = Requirements(label_types=("multiclass",))

    def of(self, site: SiteContext, received: TaskData, round_: LocalRound) -> Loss:
        counts = class_counts(site).to(site.device)
        return lambda logits, y, known: balanced_ce(logits, y, known, counts.to(logits))


def class_counts(site: SiteContext) -> Tensor:
    """n_c: the site's training images of each class, ``[c]``."""
    return torch.nan_to_num(site.samples["train"].y).sum(dim=0)


def all_labelled(site: SiteContext) -> bool:
    """Whether each of the site's training images has a positive label."""
    return bool((torch.nan_to_num(site.samples["train"].y).sum(dim=1) > 0).all())


def check_needs(parts: tuple[Component, ...], use: LabelUse) -> None:
    """Refuse parts that do not get what they need.

    Raises:
        ConfigError: names the part, the reason and the setting to change.
    """
    for part in parts:
        for key, needed, given in (
            ("label_view", part.needs.view, use.view),
            ("unknown", part.needs.unknown, use.unknown),
        ):
            if needed not in (None, given):
                raise ConfigError(
                    f"{type(part).__name__} {part.needs.why}; set method.{key}={needed}, or leave it out"
                )
    views = [type(part).__name__ for part in parts if isinstance(part, LossTerm) and part.second_view]
    if len(views) > 1:
        raise ConfigError(f"{views[0]} and {views[1]} both need a second view of an image; leave one out")
