"""Fed-MAS: a frozen public network tells each site how much its classes need rescue; that weights the merge.

    Elbatel, Wang, Marti, Fu, Li. Federated Model Aggregation via Self-Supervised Priors for Highly Imbalanced
    Medical Image Classification. MICCAI 2023 (DeCaF). arXiv:2307.14959.

g is the backbone, MLP the projector beside the head, f the frozen prior, which no message carries.

    distance:    L_f(x) = 2 - 2 <y, y'>,  y = MLP(g(x)) and y' = f(x), each divided by its norm    (Eq. 1)
    at site c:   w_k  = mean of L_f over the local images of class k, under the received model     (Eq. 2)
                 E epochs of  L = L_sup + lambda_f L_f,  L_sup balanced softmax                    (Eq. 4)
                 v_k  = sum over the epochs of the mean of L_f over class k, before each step
                 RF_c = sum_k w_k v_k                                                              (Eq. 3)
    server:      theta = sum_c RF_c theta_c / sum_c RF_c, every tensor                             (Eq. 5)

A site sends one number more than in FedAvg. The published program divides w and v by their sums before the
product (`rescue="normalised"`), which reverses who gains weight where classes are equally hard: RF then
falls with the number of classes that a site holds, rather than rising with it. It also trains a second head,
on the projection y, with a loss L_sup of its own, and clips the gradient (`supervision="program"`). Where an
image may have several labels, class k is every image that has it, and L_sup the binary cross-entropy of what
is known. While the head is re-trained (`retrain`), backbone and projector rest, so that the distance before
every step is w, and v = E w.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, StrictBool
from torch import Tensor

from suture.core.errors import ConfigError, RescueFactorError
from suture.data.batch import Batch, Samples
from suture.learning.steps import balanced_ce, masked_ce, masked_loss
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    SiteContext,
    evaluation_batch,
    fit,
    on_known,
    ready_inputs,
    training_batches,
)
from suture.methods.averaging import WHY, LocalAveraging, train_update
from suture.methods.base import SEVERAL, About, LabelUse, Phase, hyperparameters
from suture.methods.retraining import RETRAINED_TYPES, RETRAINING, Retraining, then_retrained
from suture.models import ModelSpec
from suture.models.classifier import Classifier, Layout
from suture.models.priors import PRIORS, Prior, PriorSpec, cached_features, check_width
from suture.protocol.egress import NUM_SAMPLES, WEIGHT, Egress
from suture.protocol.messages import TaskData, Update, ones

Rescue = Literal["paper", "normalised"]

_FARTHEST = 4.0
"""The largest distance, of opposite directions."""

LEAST = 1e-12
"""The smallest rescue factor that can weight a mean."""

CLIP = 5.0
"""Largest norm of a step's gradient in the published program."""

_PRIOR = "prior"
"""Name of the prior's features among a batch's inputs, ``[n, d]``."""


@hyperparameters
class FedMAS(LocalAveraging):
    """Fed-MAS.

    Attributes:
        prior: the frozen network. Every site must hold the same one.
        local: Adam, learning rate 3e-4, 10 epochs (ISIC); for HyperKvasir SGD from 0.1, down to 1e-4 in
            the published program.
        batch_norm: ``average`` or ``frozen``.
        distillation: lambda_f; with 0 the projector has no gradient (but from a second head), and only its
            batch norm's running statistics and weight decay move it.
        rescue: the rescue factor as in the ``paper``, or ``normalised`` as in the published program.
        aggregation: by the ``rescue`` factor (MAS), or by numbers of ``images``, as FedAvg does.
        prior_view: what the prior sees while the model trains: the ``same`` augmented image as the model, or
            the ``plain`` one, whose features are computed once and kept in the site's cache.
        supervision: L_sup of the head, as in the ``paper``; or, as in the published ``program``, of the
            model's second head as well, with gradients of norm `CLIP` at most.
        keep_local: sites keep the models that they trained in the selected round, and measure them beside the
            global one (pFL and gFL, Table 8).
        retrain: the re-training of the head that ends a run, as in Table 7; None for none.
    """

    about = About(
        "fedmas",
        "Fed-MAS",
        "Elbatel et al., MICCAI 2023",
        question="classes rare",
        images_only=True,
        pixels="compares features with those that its prior has of the same images",
        mixes_patients="compares the images of a batch, and samples them by classes",
    )
    prior: PriorSpec = field(default_factory=PriorSpec)
    local: LocalTraining = field(default_factory=lambda: LocalTraining(lr=3e-4, epochs=10))
    distillation: Annotated[float, Field(ge=0)] = 3.0
    rescue: Rescue = "paper"
    aggregation: Literal["rescue", "images"] = "rescue"
    prior_view: Literal["same", "plain"] = "same"
    supervision: Literal["paper", "program"] = "paper"
    keep_local: StrictBool = False
    retrain: Retraining | None = None

    @property
    def labels(self) -> LabelUse:
        return LabelUse(view="all", types=RETRAINED_TYPES if self.retrain else SEVERAL)

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        return then_retrained(super().phases, self.retrain, rounds)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        second, width = self.supervision == "program", PRIORS.find(self.prior.name).width
        if spec.second_head != second:
            raise ConfigError(
                f"method.supervision={self.supervision} does not fit the model; set "
                f"model.second_head={str(second).lower()}"
            )
        # Without a projection the width is the backbone's, and a checkpoint's is its folder's to say: a site
        # compares the two when it introduces itself.
        if spec.projection and width and spec.projection != width:
            raise ConfigError(
                f"the prior {self.prior.name!r} has {width} features and the model {spec.projection}; set "
                f"model.projection={width}"
            )
        return spec

    def egress(self, layout: Layout) -> Egress:
        by_images = self.aggregation == "images"
        return Egress(
            layout.shared,
            layout.head,
            weight=NUM_SAMPLES if by_images else (LEAST, self._most),
            class_weight=WEIGHT,
            over_classes=not by_images and self.rescue == "paper",
            why=_WHY,
        )

    @property
    def _most(self) -> float:
        """The largest RF of one class: both distances as large as they can be in every pass over the data.

        Normalised, the products of two lists of shares never add up to more than 1.
        """
        if self.rescue == "normalised":
            return 1.0
        local = self.local
        # Of batches without end an image can be in each one.
        passes = local.iterations * local.batch_size if local.iterations else local.epochs
        return _FARTHEST**2 * max(passes, local.warmup_epochs, self.retrain.epochs if self.retrain else 0)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        if self.supervision == "program":
            round_ = replace(round_, local=replace(round_.local, clip=round_.local.clip or CLIP))
        watch = Divergence(site, self)
        before = watch.under(site.model)
        if site.record:
            site.record({"images": watch.images, "divergence": before})
        if round_.phase == RETRAINING:
            fitted = fit(site, on_known(masked_ce), round_)
            during = round_.local.epochs * before
        else:
            fitted = fit(site, watch.objective, round_, batches=partial(watch.batches, round_.local))
            during = watch.while_training()
        weight = float(len(site.samples["train"]))
        if self.aggregation == "rescue":
            weight = rescue_factor(before, during, self.rescue)
            if not bool((site.samples["train"].y == 1).any()):
                # Eq. 3 gives 0: the other sites decide, and where none has a positive, all count alike.
                weight = LEAST
            check_rescue(weight, site.name, round_.round)
        update = train_update(site, received, round_, fitted)
        return replace(
            update, weight=weight, class_weights=weight * ones(received.labels)
        ), fitted.optimiser_state


_WHY = WHY | {
    "prior": "digest of the frozen prior, once: all sites must have the same",
    "head": "rows of all classes",
    "weight": "RF, the rescue factor: the weight of the site in the mean",
    "class_weights": "the same for every row",
}


class Divergence:
    """How far a site's model is from the prior, class by class; and what it minimises.

    Attributes:
        images: M_k, training images of each class, ``[c]``.

    Raises:
        ConfigError: the site has no prior, or the model's projection is not as wide as it.
    """

    def __init__(self, site: SiteContext, method: FedMAS) -> None:
        self._site, self._method, self._task = site, method, site.model.labels.label_type
        self._prior = _prior_of(site)
        train = site.samples["train"]
        self._train = replace(train, inputs={**train.inputs, _PRIOR: self._remember(train)})
        self.images = torch.nan_to_num(train.y).sum(dim=0).double()
        self._counts = self.images.to(site.device)
        self._sums = torch.zeros_like(self._counts)

    @torch.no_grad()
    def under(self, model: Classifier) -> Tensor:
        """w_k: the class means of the distance over all training images as they are, ``[c]``."""
        model.eval()
        sums = torch.zeros_like(self._counts)
        site, train = self._site, self._train
        for batch in train.batches(site.batch_size or evaluation_batch(train.inputs, site.device)):
            ready = ready_inputs(site, batch).to(site.device)
            y = model.projector(model.features(ready.inputs))
            sums += by_class(distance(y, ready.inputs[_PRIOR]), ready.y)
        return self._means(sums)

    def while_training(self) -> Tensor:
        """v_k: the class means of the distance before each step, added up over the epochs, ``[c]``."""
        return self._means(self._sums)

    def batches(
        self, local: LocalTraining, shuffle: torch.Generator, noise: torch.Generator
    ) -> Iterator[Batch]:
        """The training batches of an epoch, with the prior's features of what the method lets it see."""
        plain = self._method.prior_view == "plain" or not self._site.augmentation.active
        site = replace(self._site, samples={"train": self._train}) if plain else self._site
        for batch in training_batches(site, local, shuffle, noise):
            if plain:
                yield batch
            else:
                images = site.prepare.undo(batch.inputs["image"])
                seen = self._prior.features(images, site.model.amp_dtype)
                yield replace(batch, inputs={**batch.inputs, _PRIOR: seen})

    def objective(self, model: Classifier, batch: Batch) -> Tensor:
        """L_sup + lambda_f L_f (Eq. 4); as in the program, L_sup of both heads."""
        z = model.features(batch.inputs)
        y = model.projector(z)
        each = distance(y, batch.inputs[_PRIOR])
        self._sums += by_class(each.detach(), batch.y)
        loss = self._supervise(model.head(z), batch) + self._method.distillation * each.mean()
        if model.second_head is not None:
            loss = loss + self._supervise(model.second_head(y), batch)
        return loss

    def _supervise(self, logits: Tensor, batch: Batch) -> Tensor:
        """L_sup."""
        if self._task == "multilabel":
            return masked_loss(logits, batch.y, batch.known, self._task)
        return balanced_ce(logits, batch.y, batch.known, self._counts.to(logits))

    def _means(self, sums: Tensor) -> Tensor:
        return torch.where(self.images > 0, sums.cpu() / self.images.clamp(min=1), 0.0)

    def _remember(self, train: Samples) -> Tensor:
        """The prior's features of the images as they are; in memory, once the site's cache has given them."""
        site = self._site
        if _PRIOR not in site.cache:
            images = train.inputs["image"]
            site.cache[_PRIOR] = cached_features(self._prior, images, site.cache_dir, site.device, site.name)
        return site.cache[_PRIOR]


def _prior_of(site: SiteContext) -> Prior:
    """The site's prior.

    Raises:
        ConfigError: there is none, or the model's projection is not as wide as it.
    """
    if site.prior is None:
        raise ConfigError(f"{site.name} has no prior; name one with method.prior.name")
    check_width(site.prior, site.model, site.name)
    return site.prior


def distance(y: Tensor, target: Tensor) -> Tensor:
    """Eq. 1, image by image: ``[n, d]`` twice to ``[n]`` in [0, `_FARTHEST`]."""
    return 2 - 2 * (F.normalize(y, dim=1) * F.normalize(target, dim=1)).sum(dim=1)


def by_class(each: Tensor, y: Tensor) -> Tensor:
    """The sum of a number of each image ``[n]`` over the images of each class, ``[c]``, where they are."""
    return (each.unsqueeze(1) * (y == 1)).sum(dim=0).double()


def rescue_factor(before: Tensor, during: Tensor, reading: Rescue) -> float:
    """Eq. 3, of w and v ``[c]``; classes without images are 0 in both."""
    if reading == "normalised":
        before, during = (v / v.sum().clamp(min=1e-12) for v in (before, during))
    return float((before * during).sum())


def check_rescue(factor: float, site: str, round_: int) -> None:
    """Refuses a factor that cannot weight a mean.

    Raises:
        RescueFactorError: it is not finite, or not positive; names the site.
    """
    if not LEAST <= factor < math.inf:
        raise RescueFactorError(
            f"{site}: the rescue factor of round {round_} is {factor}, which is not a valid aggregation "
            "weight. It is undefined if a distance is 0; check the site's prior"
        )
