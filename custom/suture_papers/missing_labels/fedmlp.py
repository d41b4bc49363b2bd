"""FedMLP: what a site does not annotate is held to the received model, then tagged by prototypes of owners.

    Sun et al. FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity.
    MICCAI 2024; by its published program.

Site k annotates the classes I_k and not U_k. f(x) are the features of an image, p its probabilities, p' those
of the received model; every view is one of a weak augmentation.

    stage 1:   two views of each image, with the mean over both of
               L    = BCE over I_k + mean over U_k of (p - p')^2
    at its end and from then on, under the trained model, from images as they are:
               P_c0, P_c1 = mean f(x) of the n_kc0 images without class c, the n_kc1 with it     c in I_k
               d_c        = share of the n_k images with p_c < .3 or p_c > .7                    c in U_k
    server:    w    = sum_k n_k w_k / sum_k n_k, every tensor and row
               P_cy = sum_k n_kcy P_kcy / sum_k n_kcy,    d_c = sum_k n_k d_kc / sum_k n_k
    stage 2:   s_c  = cos(f, P_c0) - cos(f, P_c1), under the received model, of images without label or tag;
               where s >= 0, the share `negative` of the largest is tagged absent, for ever;
               where s < 0, the share `positive` of the smallest present
               L    = BCE over labels and tags, one view

The paper sets the shares by d_c; no source at hand says how, so that they are fixed, as in the program. The
program weighs an owner without positives like any other, and tags none present where it finds none absent;
neither is done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import LIMIT, STRICT
from suture.data.batch import Augmentation, Batch, Share
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    Loss,
    Objective,
    SiteContext,
    first_view,
    fit,
    training_batches,
    view_key,
)
from suture.methods.averaging import WeightedMean
from suture.methods.base import (
    About,
    ClassFacts,
    GlobalModel,
    LabelStatistics,
    Phase,
    RoundContext,
    hyperparameters,
    in_two,
)
from suture.methods.class_weights import ClassWeights
from suture.methods.composed import Component, Composed, Requirements
from suture.models.classifier import Classifier, Layout, frozen_copy
from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update
from suture_papers.missing_labels.image_memory import memory, recall, remember
from suture_papers.missing_labels.prototypes import (
    PROTOTYPES,
    Merged,
    declare,
    measure,
    nothing,
    similarity,
)

STAGE_1, STAGE_2 = "stage-1", "stage-2"

ABSENT, PRESENT = -1, 1
"""Tags of an image and a class; 0 where it has none."""


@validated(frozen=True, config=STRICT)
class Tagging(Component):
    """Which images are tagged in a round, class by class.

    Attributes:
        negative, positive: of the images nearer to P_c0 and to P_c1, the share that is tagged absent and
            present, rounded down; 0 tags none.
        minimum: that many of each at least, as far as there are any; the program's is 0, so that a site with
            fewer than 1 / share images without labels of a class tags none.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multilabel",),
        view="all",
        unknown="masked",
        why="labels classes that the site does not annotate",
        pseudo=True,
    )
    negative: Share = 0.005
    positive: Share = 0.01
    minimum: Annotated[int, Field(ge=0, le=LIMIT)] = 0

    def tags(self, s: Tensor, candidates: Tensor) -> Tensor:
        """New tags.

        Args:
            s: ``[n, c]``, cos(f, P_c0) - cos(f, P_c1).
            candidates: ``[n, c]`` bool.

        Returns:
            ``[n, c]`` int8.
        """
        new = torch.zeros(s.shape, dtype=torch.int8)
        for column in range(s.shape[1]):
            for share, tag, side in ((self.negative, ABSENT, s >= 0), (self.positive, PRESENT, s < 0)):
                rows = (candidates & side)[:, column].nonzero().squeeze(1)
                surest = s[rows, column].abs().argsort(descending=True, stable=True)
                new[rows[surest[: self.number(share, len(rows))]], column] = tag
        return new

    def number(self, share: float, candidates: int) -> int:
        """How many of so many images are tagged."""
        # 0.29 x 100 is 28.999...
        return min(candidates, max(self.minimum, int(share * candidates + 1e-9))) if share else 0


@hyperparameters
class FedMLP(Composed):
    """FedMLP; see `Composed` for the other fields.

    Attributes:
        local: Adam, learning rate 3e-5, weight decay 5e-4, one epoch a round, batches of 32 (the program's;
            3e-6 for NIH by its help text).
        stage1: share of the rounds that stage 1 takes, at least one round unless it is 0 (50 of 500).
        weak: the augmentation, in place of the job's: both views of stage 1, the one of stage 2.
        tagging: see `Tagging`.
        consistency: whether stage 2, too, holds what has neither label nor tag to the received model.
    """

    about = About(
        "fedmlp",
        "FedMLP",
        "Sun et al., MICCAI 2024",
        images_only=True,
        mixes_patients="sends prototypes of classes, and selects pseudo-labels among all images",
    )

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(lr=3e-5, batch_size=32, weight_decay=5e-4)
    )
    unknown: Literal["negative", "masked"] = "masked"
    class_weights: ClassWeights = "none"
    stage1: Share = 0.1
    weak: Augmentation = field(default_factory=lambda: Augmentation(rotation=10.0, flip=0.5, shift=0.02))
    tagging: Tagging = field(default_factory=Tagging)
    consistency: StrictBool = False

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        """The warm-up, if there is one, and the two stages in the place of the main phase."""
        return in_two(super().phases(rounds), self.stage1, STAGE_1, STAGE_2)

    def egress(self, layout: Layout) -> Egress:
        egress = declare(super().egress(layout), layout)
        return replace(egress, channels=(*egress.channels, *memory(tags="torch.int8")))

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        """The class weights, if there are any, and a note for each site that is too small to be tagged."""
        facts = super().class_facts(statistics)
        notes = []
        for site, n in sorted(statistics.images.items()):
            shares = {"absent": self.tagging.negative, "present": self.tagging.positive}
            none = [tag for tag, share in shares.items() if share and not self.tagging.number(share, n)]
            if none and set(statistics.counts[site]) != set(statistics.labels):
                notes.append(
                    f"{site} has {n} training images, too few to tag any as {' or '.join(none)}; set "
                    "method.tagging.minimum to the number to tag in each round."
                )
        return replace(facts, notes=(*facts.notes, *notes))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        tags, second = recall(site, round_.kept, "tags"), round_.phase == STAGE_2
        if tags is None:
            tags = torch.zeros(site.samples["train"].y.shape, dtype=torch.int8)
        if second:
            tags = self._tag(site, received.channels[PROTOTYPES], tags)
        held = self.consistency or not second
        teacher = frozen_copy(site.model) if held else None
        loss = self.supervised.of(site, received, round_)
        learner = replace(with_tags(site, tags), augmentation=self.weak)
        seen = partial(first_view if second else _two_views, learner)
        fitted = fit(
            learner,
            objective(loss, teacher),
            round_,
            batches=partial(training_batches, learner, round_.local, seen=seen),
        )
        due = second or (round_.phase == STAGE_1 and round_.phase_round == round_.phase_rounds)
        update = replace(
            self.weigh(site, received, round_, fitted),
            channels=measure(site) if due else nothing(site),
        )
        return update, fitted.optimiser_state | (remember(site, tags=tags) if second else {})

    def _tag(self, site: SiteContext, prototypes: Tensor, tags: Tensor) -> Tensor:
        """The tags ``[n, c]`` with those of a new round, under the received model."""
        train = site.samples["train"]
        sent = prototypes.ne(0).any(dim=2).all(dim=1)  # a class without both prototypes is like no image
        candidates = train.y.isnan() & (tags == 0) & sent
        tags = tags + self.tagging.tags(similarity(site, prototypes), candidates)
        if site.observe:
            site.observe(torch.arange(len(train)), tags == PRESENT)
        if site.record:
            site.record(
                {"tagged absent": (tags == ABSENT).sum(0), "tagged present": (tags == PRESENT).sum(0)}
            )
        return tags

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        model = WeightedMean(previous.labels, previous.shared, previous.head)
        prototypes = Merged(previous.labels, previous.channels)
        for update in updates:
            model.add(update)
            prototypes.add(update)
        return replace(model.applied_to(previous), channels=prototypes.tensors())


# Training


def objective(loss: Loss, teacher: Classifier | None) -> Objective:
    """The loss of labels and tags; with a teacher also the mean of (p - p')^2 over all that has neither."""

    def value(model: Classifier, batch: Batch) -> Tensor:
        logits = model(batch.inputs)
        total = loss(logits, batch.y, batch.known)
        if teacher is None:
            return total
        with torch.no_grad():
            target = torch.sigmoid(teacher(batch.inputs))
        unknown = ~batch.known
        each = (torch.sigmoid(logits) - target).square()
        return total + torch.where(unknown, each, 0.0).sum() / unknown.sum().clamp(min=1)

    return value


def _two_views(site: SiteContext, batch: Batch, noise: torch.Generator) -> Batch:
    """Each image twice, ``[2n, ...]``: a mean over the batch is then that of ½ L_a + ½ L_b."""
    a, b = first_view(site, batch, noise), first_view(site, batch, noise)
    name = view_key(batch.inputs)
    image = torch.cat([a.inputs[name], b.inputs[name]])
    return Batch({**batch.inputs, name: image}, batch.y.repeat(2, 1), batch.known.repeat(2, 1))


def with_tags(site: SiteContext, tags: Tensor) -> SiteContext:
    """The site with its tags ``[n, c]`` as labels, where there is no label."""
    train = site.samples["train"]
    y = torch.where(train.y.isnan() & (tags != 0), (tags == PRESENT).to(train.y), train.y)
    return replace(site, samples={**site.samples, "train": replace(train, y=y)})
