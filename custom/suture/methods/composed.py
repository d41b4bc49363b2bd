"""Local training put together from roles, and a mean in which sites count by their images.

    at site k:   minimise  L = L_sup + sum_j T_j                                       (roles.py)
    server:      w     = sum_k a_k w_k / sum_k a_k,    a_k = n_k, or 1
                 psi_c = the same over all sites, or over those that annotate class c

The published methods that are FedAvg but for one of these each derive from `Composed` and have what they
change as a field; `weights`, `rows`, `label_view` and `batch_norm` mean the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Literal

import torch
from pydantic import StrictBool
from torch import Tensor

from suture.core.errors import ConfigError
from suture.data.batch import Batch, viewed
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    SiteContext,
    first_view,
    fit,
    reinit_head,
    training_batches,
    view,
)
from suture.methods.averaging import WHY, LocalAveraging, owned
from suture.methods.base import (
    SEVERAL,
    ClassFacts,
    LabelStatistics,
    LabelUse,
    Phase,
    hyperparameters,
)
from suture.methods.class_weights import ClassWeights, class_weights, counted, told_weights, why_counted
from suture.methods.retraining import RETRAINED_TYPES, RETRAINING, Retraining, then_retrained
from suture.methods.roles import (
    BalancedSoftmax,
    Component,
    CrossEntropy,
    LossTerm,
    Step,
    Supervised,
    check_needs,
)
from suture.models import ModelSpec, encoder_of
from suture.models.classifier import Classifier, Layout, frozen_copy
from suture.protocol.egress import NUM_SAMPLES, OWNED_CLASSES, WEIGHT, Egress
from suture.protocol.messages import TaskData, Update, ones


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
        counts = tuple(kind for kind in counted(self.class_weights) if kind in self.labels.types)
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
        return self.weight(site) * (owned(site) if self.rows == "owners" else ones(received.labels))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        supervised, terms = self.supervised, tuple(term for term in self.terms if term.active)
        if round_.phase == RETRAINING:
            supervised, terms = CrossEntropy(), ()
        reinit_head(site, round_)  # before the terms look at the model that the round begins with
        training = _Training(supervised, terms, site, received, round_)
        fitted = fit(site, training.objective, round_, batches=partial(training.batches, round_.local))
        update = self.weighted(site, received, round_, fitted)
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
            name, n = viewed(batch.inputs), len(batch)
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
