"""Local training put together from roles, and a mean in which sites count by their images.

    at site k:   minimise  L = L_sup + sum_j T_j                                       (roles.py)
    server:      w     = sum_k a_k w_k / sum_k a_k,    a_k = n_k, or 1
                 psi_c = the same over all sites, or over those that annotate class c

The published methods that are FedAvg but for one of these each derive from `Composed` and have what they
change as a field; `weights`, `rows`, `label_view` and `batch_norm` mean the same in all of them.

Class weights against the rarity of positives, from what the sites count before round 1.

    Deng, Luo, Chen. FedLSM, MICCAI 2023, Sec. 3.2: weighted binary cross-entropy, "as in FPSL" (Dong et al.,
    IEEE TMI 2022). Its published program:   w_c = sum_k negatives_kc / sum_k positives_kc

The program also counts every image of a site that does not know a class as a negative of it (`program`);
without these, the counts are of known labels alone (`known`). A positive weighs more in binary
cross-entropies alone: where an image has a single label there are no class weights, and sites send no counts.

The roles that local training is put together from: one loss of known labels, and any further terms.

    at site k:   minimise  L = L_sup + sum_j T_j

A part is a value: its fields are hyperparameters. It says what it needs of the labels, and is refused where
it does not get that. Before each round a site binds it to its data, and gets a function of one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import torch
from pydantic import StrictBool
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.batch import Augmentation, Batch, view_key
from suture.learning.losses import balanced_ce, masked_loss, weighted_bce
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    Loss,
    SiteContext,
    first_view,
    fit,
    reinit_head,
    training_batches,
    view,
)
from suture.methods.averaging import WHY, LocalAveraging, own_rows
from suture.methods.base import (
    SEVERAL,
    ClassFacts,
    LabelStatistics,
    LabelUse,
    LabelView,
    Phase,
    hyperparameters,
)
from suture.methods.retraining import RETRAINED_TYPES, RETRAINING, Retraining, then_retrained
from suture.models import ModelSpec, encoder_of
from suture.models.classifier import Classifier, Layout, frozen_copy
from suture.protocol.egress import CLASSES, NUM_SAMPLES, OWNED_CLASSES, WEIGHT, Channel, Egress
from suture.protocol.messages import TaskData, Update, ones

ClassWeights = Literal["known", "program", "none"]

NAME = "positive_weight"


def countable_types(rule: ClassWeights) -> tuple[LabelType, ...]:
    """The label types for which the sites are asked for counts: see `Egress`."""
    return () if rule == "none" else ("multilabel",)


def why_counted(rule: ClassWeights) -> dict[str, str]:
    """What those counts are for, as `Egress.why` has it."""
    return (
        {"counts": "images with and without each class, for the class weights"}
        if countable_types(rule)
        else {}
    )


def told_weights(rule: ClassWeights) -> tuple[Channel, ...]:
    """The channel by which the sites learn the weights."""
    why = "weight of a positive of the class, from the counts of the sites; with multilabel labels only"
    return (Channel(NAME, "facts", (CLASSES,), why=why),) if countable_types(rule) else ()


def class_weights(statistics: LabelStatistics, rule: ClassWeights) -> ClassFacts:
    """The weight of a positive of each class, and a note on each class that has none to give.

    Args:
        rule: ``known`` counts the sites that know a class; ``program`` counts all images of the others as
            negatives; ``none`` weights every class 1.

    Returns:
        `NAME`, ``[len(labels)]``; nothing where the sites were asked for no counts.
    """
    if statistics.label_type not in countable_types(rule):
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
    if label_type not in countable_types(rule):
        return None
    if NAME not in received.channels:
        raise ConfigError(
            f"the server sent no {NAME} with round {received.round}, but class_weights={rule!r} needs "
            "it. Run the same version of suture on both sides, or set class_weights=none"
        )
    return received.channels[NAME]


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
        class_weights: see `class_weights`.
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


@hyperparameters
class Composed(LocalAveraging):
    """FedAvg put together from roles; see `LocalAveraging` for `local` and `batch_norm`.

    Attributes:
        rows: of the head, the mean of ``all`` sites, or of the ``owners`` of each class: the task-dependent
            aggregation of Dong et al. (FPSL), IEEE TMI 2022, the star in the tables of FedLSM.
        weights: a site counts with its number of training ``images``, or all count ``equal``.
        label_view: a site sees the names of ``all`` classes, or its ``own``; then it sends only their rows.
        unknown: a class that the site does not annotate is taught as absent (``negative``), or left out
            (``masked``); where a site sees its own classes, there is none.
        class_weights: of positives in the binary cross-entropy, from counts of ``known`` labels, or as the
            ``program`` of FedLSM counts, for which a class that a site does not know is absent; or ``none``.
        softmax: of a multiclass task: ``plain``, or ``balanced`` by the site's own counts (Ren et al. 2020).
        keep_local: sites keep the models that they trained in the selected round, and measure them beside the
            global one.
        retrain: the re-training of the head that ends a run, with the plain cross-entropy in place of the
            method's loss and terms; None for none.
    """

    rows: Literal["all", "owners"] = "all"
    weights: Literal["images", "equal"] = "images"
    label_view: Literal["own", "all"] = "all"
    unknown: Literal["negative", "masked"] = "negative"
    class_weights: ClassWeights = "known"
    softmax: Literal["plain", "balanced"] = "plain"
    keep_local: StrictBool = False
    retrain: Retraining | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if isinstance(vars(cls).get("labels"), LabelUse):
            raise ConfigError(
                f"{cls.__name__}.labels: a composed method makes it of its fields and parts; remove it, and "
                "set the defaults of label_view and unknown"
            )

    def __post_init__(self) -> None:
        check_needs(self.parts, self.labels)
        if self.softmax == "balanced" and not any(isinstance(part, BalancedSoftmax) for part in self.parts):
            raise ConfigError(
                f"method.softmax=balanced: {type(self.supervised).__name__} already replaces the loss; "
                "set method.softmax=plain"
            )

    @property
    def supervised(self) -> Supervised:
        """The loss of known labels: the first of the parts."""
        loss, *_ = self.parts
        assert isinstance(loss, Supervised)
        return loss

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """What is added to it: the terms among the parts."""
        return tuple(part for part in self.parts if isinstance(part, LossTerm))

    @property
    def parts(self) -> tuple[Component, ...]:
        """The fields that are parts, the loss first; without a loss the cross-entropy, as `softmax` says."""
        fields_ = (getattr(self, one.name) for one in fields(self))
        parts = [part for part in fields_ if isinstance(part, Component)]
        loss = next((part for part in parts if isinstance(part, Supervised)), None)
        if loss is None:
            loss = BalancedSoftmax() if self.softmax == "balanced" else CrossEntropy(self.class_weights)
        return (loss, *(part for part in parts if part is not loss))

    @property
    def labels(self) -> LabelUse:
        needs = [part.needs for part in self.parts]
        of_run = RETRAINED_TYPES if self.retrain else SEVERAL
        types = tuple(kind for kind in of_run if all(kind in need.label_types for need in needs))
        return LabelUse(self.label_view, self.unknown, types, pseudo=any(need.pseudo for need in needs))

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        return then_retrained(super().phases, self.retrain, rounds)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        for part in self.parts:
            spec = part.adapted(spec)
        if encoder_of(spec).reads != "image":
            for term in self.terms:
                if term.second_view:
                    raise ConfigError(
                        f"{type(term).__name__} needs two views of an image, but the model "
                        f"{spec.name!r} reads {encoder_of(spec).reads}s; choose a model of images, or "
                        "leave it out"
                    )
        return spec

    def egress(self, layout: Layout) -> Egress:
        counts = tuple(kind for kind in countable_types(self.class_weights) if kind in self.labels.types)
        return Egress(
            shared=layout.shared,
            head=layout.head,
            weight=NUM_SAMPLES if self.weights == "images" else (1.0, 1.0),
            class_weight=OWNED_CLASSES if self.rows == "owners" else WEIGHT,
            channels=(
                *(told_weights(self.class_weights) if counts else ()),
                *(channel for term in self.terms for channel in term.channels(layout)),
            ),
            counts=counts,
            why=_WHY
            | {"weight": _WHY_WEIGHT[self.weights]}
            | (why_counted(self.class_weights) if counts else {}),
        )

    def weight(self, site: SiteContext) -> float:
        return float(len(site.samples["train"])) if self.weights == "images" else 1.0

    def row_weights(self, site: SiteContext, received: TaskData) -> Tensor:
        return self.weight(site) * (own_rows(site) if self.rows == "owners" else ones(received.labels))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        supervised, terms = self.supervised, tuple(term for term in self.terms if term.active)
        if round_.phase == RETRAINING:
            supervised, terms = CrossEntropy(), ()
        reinit_head(site, round_)  # before the terms look at the model that the round begins with
        training = _Training(supervised, terms, site, received, round_)
        fitted = fit(site, training.objective, round_, batches=partial(training.batches, round_.local))
        update = self.weigh(site, received, round_, fitted)
        declared = self.egress(self.sharing.layout(site.model)).forms("site")
        kept = {
            name: tensor.detach().cpu().clone()
            for term in terms
            for name, tensor in term.kept(site.model).items()
            if name in declared
        }
        return update, fitted.optimiser_state | kept

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        return class_weights(statistics, self.class_weights)


_WHY = WHY | {
    "head": "rows of the classes that the site sees",
    "class_weights": "the same, or 0 for a class that the site does not annotate: the weight of its row",
}

_WHY_WEIGHT = {
    "images": "n_k, the weight of the site in the mean",
    "equal": "1: every site has the same weight in the mean",
}

SECOND = "second view of the image"
"""Name of the second views among a batch's inputs, ``[m, channels, h, w]`` or features ``[m, d]``."""

SECOND_OF = "second views of images"
"""Name of the numbers of their images, ``[m]``."""


class _Training:
    """One round of a composed method at a site: its batches, and what a step minimises."""

    def __init__(
        self,
        supervised: Supervised,
        terms: tuple[LossTerm, ...],
        site: SiteContext,
        received: TaskData,
        round_: LocalRound,
    ) -> None:
        self._site = site
        self._loss = supervised.of(site, received, round_)
        self._terms, self._begun = terms, [term.begin(site, round_) for term in terms]
        self._seeing = next((term for term in terms if term.second_view), None)
        if self._seeing and self._seeing.first_view is not None:
            self._site = replace(site, augmentation=self._seeing.first_view)
        # A copy takes memory and time: made only where a term may look at it.
        self._received = frozen_copy(site.model) if self._begun else site.model

    def batches(
        self, local: LocalTraining, shuffle: torch.Generator, noise: torch.Generator
    ) -> Iterator[Batch]:
        """The batches of an epoch, with the second views that a term asks for."""
        seen = self._seen_twice if self._seeing else None
        return training_batches(self._site, local, shuffle, noise, seen, self._rows)

    def _rows(self, batch: Batch) -> dict[str, Tensor]:
        """The numbers of the images that the terms ask for."""
        rows = {name: found for term in self._terms for name, found in term.rows(batch).items()}
        if self._seeing:
            again = self._seeing.seen_again(batch, self._site.model.labels.label_type)
            rows |= {SECOND_OF: again} if len(again) else {}
        return rows

    def _seen_twice(self, batch: Batch, noise: torch.Generator) -> Batch:
        """The first view, and the second one of the images that the term wants to see again."""
        first = first_view(self._site, batch, noise)
        assert self._seeing is not None
        rows = batch.inputs.get(SECOND_OF)
        if rows is None:
            return first
        again = view(self._site, batch, noise, self._seeing.second_view, rows)
        return replace(first, inputs={**first.inputs, SECOND: again})

    def objective(self, model: Classifier, batch: Batch) -> Tensor:
        """L_sup + the terms."""
        rows, strong = batch.inputs.get(SECOND_OF), None
        if rows is None:
            features = model.features(batch.inputs)
            logits = model.head(features)
        else:  # both views in one pass: batch norm sees them together
            name, n = view_key(batch.inputs), len(batch)
            both = torch.cat([batch.inputs[name], batch.inputs[SECOND]])
            features = model.features({name: both})
            logits, strong = model.head(features).split([n, len(rows)])
            features = features[:n]
        total = self._loss(logits, batch.y, batch.known)
        if self._begun:
            step = Step(model, self._received, batch, features, logits, rows, strong)
            for value in self._begun:
                total = total + value(step)
        return total
