"""FedNML: soft labels for what a site does not annotate, and for what it seems to have annotated wrongly.

    FedNML, 2025, for missing and noisy labels; by its published program, Hmxki/FedNML.

Site k annotates the classes I_k, not U_k, of n images; p are the probabilities of the received model. Of R
rounds the first R_0 minimise the BCE over I_k. Then, r rounds later:

    omega  = .8 exp(-2 (1 - r / (R - R_0))^2)
    every 5th round, of images as they are:
           A_i = mean_c [y p + (1 - y) (1 - p)],  B_i = -mean_c BCE(p, y),   c in I_k the first time, then all
           of two Gaussians fitted to the (A_i, B_i), the one of smaller mean A has the noisy images
           q   = 1 if p > .9, 0 if p < .1, else p
           y  <- q                    for labels of the noisy images
           y  <- .2 q + .8 y          for c in U_k, of all images; y begins as 0
           N_c <- omega sum_i y_ic + (1 - omega) N_c;   N_c begins as the number of the site's positives
    every step, over all classes, pi = N / n:
           a   = z + ln pi_c where y = 1, else z + ln (1 - pi_c)
           L   = omega BCE(sigmoid(a), p) + (1 - omega) BCE(sigmoid(a), y)
    server: the equal mean of all tensors and rows

The program copies the labels that it refines before it blanks those that a site is said not to have, so that
the withheld labels enter with .8 of their weight. Here they begin as 0, and what stands there is never read.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.runtime import seed_for
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import Batch, Share
from suture.learning.training import LocalRound, LocalTraining, Objective, SiteContext, fit, predict
from suture.methods.base import About, Phase, hyperparameters, in_two
from suture.methods.class_weights import ClassWeights
from suture.methods.composed import Component, Composed, Requirements
from suture.models.classifier import Classifier, Layout, frozen_copy
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update
from suture_papers.missing_labels.image_memory import memory, recall, remember

KNOWN, SOFT = "known", "soft"
"""The phases."""

COUNTS = "counts"
"""N ``[c]`` at a site."""

STAY = 0.8
"""How much of the soft label of an unknown class stays in one refinement."""

NEGATIVE, POSITIVE = 0.1, 0.9
"""Below and above which probability a soft label becomes 0 and 1."""

TEACHER = 0.8
"""The largest omega, which it has at the end."""


@validated(frozen=True, config=STRICT)
class SoftLabels(Component):
    """How labels are refined.

    Attributes:
        every: rounds from one refinement to the next.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multilabel",),
        view="all",
        unknown="masked",
        why="guess classes that the site does not annotate",
        pseudo=True,
    )
    every: Annotated[int, Field(ge=1, le=LIMIT)] = 5

    def omega(self, r: int, rounds: int) -> float:
        """The weight of the received model, r rounds after the first of `rounds` with soft labels."""
        return TEACHER * math.exp(-2 * (1 - r / rounds) ** 2)

    def refined(self, y: Tensor, p: Tensor, labelled: Tensor, noisy: Tensor) -> Tensor:
        """The soft labels from those before.

        Args:
            y, p: ``[n, c]``; labelled: ``[n, c]`` bool; noisy: ``[n]`` bool.
        """
        q = torch.where(p > POSITIVE, 1.0, torch.where(p < NEGATIVE, 0.0, p))
        own = torch.where(noisy.unsqueeze(1), q, y)
        return torch.where(labelled, own, (1 - STAY) * q + STAY * y)


@hyperparameters
class FedNML(Composed):
    """FedNML; see `Composed` for the other fields.

    Attributes:
        local: AdamW, learning rate 1e-4, weight decay 1e-4, 3 epochs a round, batches of 32.
        start: share of the rounds that learn known labels alone, at least one unless it is 0 (10 of 100).
        soft_labels: see `SoftLabels`.
    """

    about = About(
        "fednml",
        "FedNML (leak repaired)",
        "Hmxki/FedNML, 2025, a published program",
        mixes_patients="finds noisy labels by the losses of all images",
    )

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(
            lr=1e-4, epochs=3, batch_size=32, optimiser="adamw", weight_decay=1e-4
        )
    )
    weights: Literal["images", "equal"] = "equal"
    unknown: Literal["negative", "masked"] = "masked"
    class_weights: ClassWeights = "none"
    start: Share = 0.1
    soft_labels: SoftLabels = field(default_factory=SoftLabels)

    def egress(self, layout: Layout) -> Egress:
        egress, counts = super().egress(layout), Channel(COUNTS, "site", (CLASSES,))
        kept = memory(soft="torch.float32", labelled="torch.bool")
        return replace(egress, channels=(*egress.channels, *kept, counts))

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        """The warm-up, if there is one, and two phases in the place of the main one."""
        return in_two(super().phases(rounds), self.start, KNOWN, SOFT)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        if round_.phase != SOFT:
            return super().train(site, received, round_)
        labelled, y = current(site, round_)
        before, counts = round_.kept[COUNTS], y.sum(dim=0)
        counts = torch.where(before > 0, before, counts)  # 0 where there is none yet
        omega = self.soft_labels.omega(round_.phase_round - 1, round_.phase_rounds)
        if (round_.phase_round - 1) % self.soft_labels.every == 0:
            y = self._refine(site, round_, labelled, y)
            counts = omega * y.sum(dim=0) + (1 - omega) * counts
        teacher = frozen_copy(site.model)
        prior = (counts / max(len(y), 1)).to(site.device)
        learner = replace(site, samples={**site.samples, "train": replace(site.samples["train"], y=y)})
        fitted = fit(learner, objective(teacher, prior, omega), round_)
        update = self.weigh(site, received, round_, fitted)
        kept = remember(site, soft=y, labelled=labelled) | {COUNTS: counts}
        return update, fitted.optimiser_state | kept

    def _refine(self, site: SiteContext, round_: LocalRound, labelled: Tensor, y: Tensor) -> Tensor:
        """The soft labels ``[n, c]`` under the received model."""
        z = predict(site, site.samples["train"])
        seen = labelled if round_.phase_round == 1 else torch.ones_like(labelled)
        noisy, some = torch.zeros(len(y), dtype=torch.bool), seen.any(dim=1)
        seed = seed_for(round_.seed, site.name, round_.round, "mixture") % 2**32  # as large as one may be
        noisy[some] = noisy_images(*agreement(z[some], y[some], seen[some]), seed)
        y = self.soft_labels.refined(y, torch.sigmoid(z), labelled, noisy)
        if site.observe:
            site.observe(torch.arange(len(y)), ~labelled & (y > 0.5))
        return y


def current(site: SiteContext, round_: LocalRound) -> tuple[Tensor, Tensor]:
    """Which entries have a label, and the labels as they stand: ``[n, c]`` both.

    An unknown label begins as 0, and a new label as it is.
    """
    y = site.samples["train"].y
    labelled, y = ~y.isnan(), torch.nan_to_num(y, nan=0.0)
    soft, before = (recall(site, round_.kept, name) for name in ("soft", "labelled"))
    if soft is None or before is None:
        return labelled, y
    return labelled, torch.where(labelled & ~before, y, soft)


def agreement(z: Tensor, y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of each image, ``[n]``, over the entries ``[n, c]`` that are `seen`."""
    p, of = torch.sigmoid(z), seen.sum(dim=1).clamp(min=1)
    same = torch.where(seen, y * p + (1 - y) * (1 - p), 0.0).sum(dim=1) / of
    bce = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    return same, -torch.where(seen, bce, 0.0).sum(dim=1) / of


def noisy_images(a: Tensor, b: Tensor, seed: int) -> Tensor:
    """The images of the Gaussian of smaller mean A, ``[n]`` bool; none where all images are alike."""
    from sklearn.mixture import GaussianMixture  # a second's import that only this function needs

    points = torch.stack([a, b], dim=1).double().numpy()
    if len(points) < 2 or (points == points[0]).all():
        return torch.zeros(len(points), dtype=torch.bool)
    mixture = GaussianMixture(2, random_state=seed).fit(points)
    return torch.from_numpy(mixture.predict(points) == mixture.means_[:, 0].argmin())


def objective(received: Classifier, prior: Tensor, omega: float) -> Objective:
    """L of a step; pi ``[c]`` is kept off 0 and 1, whose logarithm is infinite."""
    prior = prior.clamp(1e-6, 1 - 1e-6)

    def value(model: Classifier, batch: Batch) -> Tensor:
        with torch.no_grad():
            p = torch.sigmoid(received(batch.inputs))
        a = model(batch.inputs) + torch.where(batch.y == 1, prior.log(), (1 - prior).log())
        # The cross-entropy is linear in its target: one with the mean of both targets is the mean of two.
        return F.binary_cross_entropy_with_logits(a, omega * p + (1 - omega) * batch.y)

    return value
