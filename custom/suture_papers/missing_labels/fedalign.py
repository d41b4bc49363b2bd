"""FedAlign: the names of the classes are anchors, to which every site aligns its images.

    Zhang, Zhang, Gao, Hsu, Han et al. Navigating Alignment for Non-identical Client Class Sets: A Label
    Name-Anchored Federated Learning Framework. KDD 2023, arXiv:2301.00489.

The logit of class c is z_c = f(x) . e_c. The anchor e_c is the row of a head without a bias; it begins as the
vector of the class's name (models/classifier.py).

    at site k:   received model:  z of all training images; F1_c on the validation images, c in I_k
                 c not in I_k:    y_c = 1 above max(.5, 99.9th percentile), if F1_c > .75
                                  y_c = 0 below min(.5, 99.9th percentile)
                 each batch:      a step of f while e rests, then a step of e while f rests, of
                                  L = 1/(n M) sum_i sum_c v_c BCE(z_c, y_c),  0 where y_c is unknown
                                  v_c = N-_c / N_c where y_c = 1, N+_c / N_c where y_c = 0
    one label an image, z_c = f(x) . e_c / |e_c|:
                 received model:  s_c = cos(f(x), e_c) of all training images; no F1
                 unlabelled, c not in I_k:  y_c = 1 if s_c is the largest and above its 99th percentile
                 each batch:      L = -1/n sum_i sum_{c known} y_c ln softmax(z)_c, softmax over all M classes
    server:      f    = 1/K sum_k f_k
                 e_c  = mean of e_kc over the sites {k : c in I_k}
                 F1_c = mean over the sites that measured it, sent with the next round

N+_c, N-_c are numbers of labels, pseudo-labels among them, plus 1; N_c is their sum. A pseudo-label trains
the site's copy of a foreign anchor, and earns it no part in the anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from functools import partial
from itertools import cycle
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor
from torch.func import functional_call

from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.data.batch import Batch, Share
from suture.learning.steps import ce_of_rows
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    Loss,
    Objective,
    SiteContext,
    fit,
    predict,
    training_batches,
)
from suture.methods.averaging import WHY, LocalAveraging, WeightedMean, own_rows
from suture.methods.base import About, GlobalModel, LabelUse, RoundContext, hyperparameters
from suture.models import ModelSpec
from suture.models.classifier import Classifier, Layout
from suture.protocol.egress import CLASSES, OWNED_CLASSES, Channel, Egress, largest_share, on_grid
from suture.protocol.messages import TaskData, Update
from suture_papers.missing_labels.confident import of_no_other_class
from suture_papers.missing_labels.prototypes import along

WIDTH = 256
"""Numbers of an anchor, where the job sets no other `model.neck`."""

F1, MEASURED = "f1", "f1_measured"

RELIABLE = 0.75
"""A class whose F1 is not above it gets no positive pseudo-label."""


@validated(frozen=True, config=STRICT)
class Matching:
    """When images are near enough to a name, or far enough from it, for a pseudo-label.

    Attributes:
        compare: what `threshold` is compared with: the ``probability`` sigma(z); or the ``similarity`` z, as
            in the published program.
        threshold: above it positive, below it negative.
        rank: the share of the site's images that must be less similar to the name for a positive one.
        nearest: with one label an image, an unlabelled image is of the class that is most similar if this
            share of the site's images is less so.
    """

    compare: Literal["probability", "similarity"] = "probability"
    threshold: float = 0.5
    rank: Share = 0.999
    nearest: Share = 0.99

    def labels(self, z: Tensor, y: Tensor, foreign: Tensor, f1: Tensor, label_type: LabelType) -> Tensor:
        """The labels with pseudo-labels of classes that the site does not annotate.

        Args:
            z: of the received model, f(x) . e_c; or with one label an image the cosine of both, ``[n, c]``.
            y: ``[n, c]``: 1, 0, or NaN where unknown.
            foreign: boolean ``[c]``, c not in I_k.
            f1: mean over the sites, ``[c]``.
        """
        guess = foreign & y.isnan()
        if label_type == "multiclass":
            unlabelled = torch.nan_to_num(y).sum(dim=1, keepdim=True) == 0
            top = F.one_hot(z.argmax(dim=1), z.shape[1]) > 0
            return y.masked_fill(guess & unlabelled & top & (z > z.quantile(self.nearest, dim=0)), 1.0)
        s = torch.sigmoid(z) if self.compare == "probability" else z
        cut = s.quantile(self.rank, dim=0)
        positive, negative = s > cut.clamp(min=self.threshold), s < cut.clamp(max=self.threshold)
        return y.masked_fill(guess & negative, 0.0).masked_fill(guess & positive & (f1 > RELIABLE), 1.0)


@hyperparameters
class FedAlign(LocalAveraging):
    """FedAlign. The model gets a neck of 256 features, anchors for a head, and named rows.

    Attributes:
        local: Adam, learning rate 1e-3, 5 epochs a round, batches of 128, as in the published program. Each
            batch makes two steps.
        anchor_rate: learning rate of the anchors, relative to that of the rest (5 on MIMIC-III).
        matching: of images and names, which makes pseudo-labels.
    """

    about = About(
        "fedalign",
        "FedAlign",
        "Zhang et al., KDD 2023, arXiv:2301.00489",
        mixes_patients="selects pseudo-labels among all images",
    )
    labels = LabelUse(view="all", pseudo=True)

    local: LocalTraining = field(default_factory=lambda: LocalTraining(lr=1e-3, epochs=5, batch_size=128))
    anchor_rate: Annotated[float, Field(gt=0)] = 1.0
    matching: Matching = field(default_factory=Matching)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, neck=spec.neck or WIDTH, head="anchors", row_init="named")

    def egress(self, layout: Layout) -> Egress:
        up = (
            Channel(name, "up", (CLASSES,), range=(0.0, 1.0), rows="own", why=why)
            for name, why in _WHY_UP.items()
        )
        return Egress(
            shared=layout.shared,
            head=layout.head,
            channels=(*up, Channel(F1, "down", (CLASSES,))),
            class_weight=OWNED_CLASSES,
            why=_WHY,
        )

    def row_weights(self, site: SiteContext, received: TaskData) -> Tensor:
        return own_rows(site)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        f1, measured = validation_f1(site)
        labelled = self._with_pseudo_labels(site, received)
        loss = matching_loss(labelled.samples["train"].y, site.model.labels.label_type, site.device)
        fitted = fit(
            labelled,
            _in_turns(loss),
            replace(round_, head_lr=self.anchor_rate * round_.local.lr),
            batches=partial(_twice, labelled, round_.local),
        )
        update = replace(
            self.weigh(site, received, round_, fitted),
            channels={F1: f1, MEASURED: measured},
        )
        return update, fitted.optimiser_state

    def _with_pseudo_labels(self, site: SiteContext, received: TaskData) -> SiteContext:
        train, foreign, f1 = site.samples["train"], own_rows(site) == 0, received.channels[F1]
        label_type = site.model.labels.label_type
        several = label_type == "multilabel"
        z = predict(site, train) if several else along(site, F.normalize(site.model.head.weight, dim=1))
        y = self.matching.labels(z, train.y, foreign, f1, label_type)
        if site.observe:
            site.observe(torch.arange(len(y)), (y == 1) & foreign & train.y.isnan())
        return replace(site, samples={**site.samples, "train": replace(train, y=y)})

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        mean = WeightedMean(previous.labels, {}, {F1: previous.channels[F1]})
        for update in updates:
            sent = update.channels
            mean.add_rows(update.labels, {F1: sent[F1]}, (sent[MEASURED] > 0).double())
        return replace(merged, channels=mean.head())


def validation_f1(site: SiteContext) -> tuple[Tensor, Tensor]:
    """The F1 of the site's own classes on its validation data, under the model as it is.

    An image is predicted positive above a probability of .5. With one label an image F1 decides nothing, so
    none is measured. A class with fewer positive or negative images than the site's `min_count` is not
    measured; where there is a `min_count`, F1 is rounded to the grid of `disclosure.py`, and a class whose F1
    hangs on one patient is not measured either.

    Returns:
        F1 and whether it was measured, 1 or 0, both float32 ``[c]``; F1 is 0 where it was not.
    """
    f1, measured = torch.zeros(len(own_rows(site))), torch.zeros(len(own_rows(site)))
    part = site.samples.get("validation")
    if part is None or not len(part) or site.model.labels.label_type == "multiclass":
        return f1, measured
    positive = predict(site, part) > 0
    patients = part.patient_numbers
    for c in own_rows(site).nonzero().squeeze(1).tolist():
        y = part.y[:, c]
        value = _f1(positive[:, c], y, patients, site.min_count)
        if value is not None and min(int((y == 1).sum()), int((y == 0).sum())) >= max(site.min_count, 1):
            f1[c], measured[c] = value, 1.0
    return f1, measured


def _f1(positive: Tensor, y: Tensor, patients: NDArray[np.intp], min_count: int) -> float | None:
    """2 TP / (2 TP + FP + FN); None where one patient moves it too far to leave."""
    right = (positive & (y == 1)).double()
    of = 2 * right + (positive & (y == 0)) + (~positive & (y == 1))
    value = float(2 * right.sum() / of.sum().clamp(min=1))
    if not min_count:
        return value
    most = largest_share(patients, of.numpy())  # without the patient, F1 differs by at most s / (1 - s)
    return on_grid(value, most / (1 - most) if most < 1 else float("inf"))


def class_shares(y: Tensor) -> tuple[Tensor, Tensor]:
    """v_c of positive and of negative labels: the share of the other kind, 1 added to both counts, ``[c]``.

    Args:
        y: ``[n, c]``: 1, 0, or NaN where unknown.
    """
    positive, negative = ((y == kind).sum(dim=0).double() + 1 for kind in (1, 0))
    return negative / (positive + negative), positive / (positive + negative)


def matching_loss(y: Tensor, label_type: LabelType, device: torch.device | str = "cpu") -> Loss:
    """L: the mean over all entries of a batch; with one label an image, over all images, labelled or not.

    Args:
        y: labels and pseudo-labels of all training images, ``[n, c]``, NaN where unknown.
        device: of the batches.
    """
    of_positive, of_negative = (v.to(device) for v in class_shares(y))

    def loss(z: Tensor, y: Tensor, known: Tensor) -> Tensor:
        if label_type == "multiclass":
            return ce_of_rows(z, *of_no_other_class(y, known, label_type))[0].mean()
        v = torch.where(y == 1, of_positive.to(z), of_negative.to(z))
        each = F.binary_cross_entropy_with_logits(z, y, reduction="none")
        return torch.where(known, v * each, 0.0).mean()

    return loss


def _in_turns(loss: Loss) -> Objective:
    """The loss as that of f while the anchors rest, at the next step as that of the anchors while f rests.

    One optimiser does for two: a parameter without a gradient keeps its value and its moments.
    """
    of_f = cycle((True, False))

    def objective(model: Classifier, batch: Batch) -> Tensor:
        if next(of_f):
            frozen = {name: rows.detach() for name, rows in model.head.named_parameters()}
            z = functional_call(model.head, frozen, (model.features(batch.inputs),))
        else:
            with torch.no_grad():
                features = model.features(batch.inputs)
            z = model.head(features)
        return loss(z, batch.y, batch.known)

    return objective


def _twice(
    site: SiteContext, local: LocalTraining, shuffle: torch.Generator, noise: torch.Generator
) -> Iterator[Batch]:
    for batch in training_batches(site, local, shuffle, noise):
        yield batch
        yield batch


_WHY = WHY | {
    "head": "anchors of all classes, averaged over the sites that annotate them",
    "class_weights": "1 for each class that the site annotates, else 0: the weight of its anchor",
}

_WHY_UP = {
    F1: "F1 of the site's own classes on its validation data, on a grid; the mean of all sites decides which "
    "classes get positive pseudo-labels",
    MEASURED: "1 where it was measured, 0 for classes of other sites and for too few images",
}
