"""AFL: the head of a frozen encoder in closed form, of Gram matrices that the sites send once.

    He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang. AFL: A Single-Round Analytic Approach for Federated Learning
    with Pre-trained Models. CVPR 2025, arXiv:2405.16240.

    at site k:   G_kc = sum x x^T,  b_kc = sum y_c x      over its images whose label of class c is known
    server:      w_c  = (sum_k G_kc + ridge n_c D)^-1 sum_k b_kc,   k over the sites that sent class c
    head:        4 w_c, and 2 less for the bias

x are the features in float64 with a 1 for the bias, y is 0 or 1, n_c counts the images, and D is the identity
without the bias: the mean squared error is minimised, plus ridge |w|^2. The sums are those of all images in
one place, so the head is that of pooled data, however the images are divided between sites.

AFL sends a site's own solution beside G and removes its regularisation afterwards; sending b is the same.
Three things are not the paper's: a Gram matrix for each class, where there every site knows every label; the
factor n_c; and the bias. A site sends one matrix for each set of classes that are known of the same images: a
single one if it annotates all its images alike.

w_c x estimates the probability p of c, and a head returns logarithmic odds, to which 4 p - 2 is the tangent
at p = 1/2. Ranks and AUROC are those of the ridge regression, while probabilities far from 1/2 are not
calibrated; `suture decide` fits thresholds to the scores.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import field, replace
from itertools import compress
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from suture.core.errors import ConfigError, RejectedUpdate
from suture.learning.training import (
    Fitted,
    LocalRound,
    LocalTraining,
    SiteContext,
    evaluation_batch,
    ready_inputs,
)
from suture.methods.averaging import own_rows, update_of
from suture.methods.base import About, GlobalModel, LabelUse, Method, RoundContext, hyperparameters
from suture.models import ModelSpec
from suture.models.classifier import Layout
from suture.protocol.egress import CLASSES, VARIABLE, Channel, Egress
from suture.protocol.messages import TaskData, Update

LOG = logging.getLogger(__name__)

GRAM, SETS, MOMENTS = "gram", "label_sets", "moments"
"""Names of what goes up: the upper triangles of G ``[k, d (d + 1) / 2]`` of k sets of classes, which set has
which class ``[k, c]``, 1 or 0, and b ``[c, d]``, where d counts the bias."""

_MOST = 1e9
"""The largest number of a sum."""

_WHY = {
    GRAM: (
        "sums of products of the features, over the images whose labels of a set of classes are known: "
        "reveals to the server how many these are, their mean and covariance and, with fewer images than "
        "features, the space that they span"
    ),
    SETS: "the classes of each set",
    MOMENTS: "sum of the features of the images with each class of the site, and their number",
}


@hyperparameters
class AFL(Method):
    """AFL; a second round would only repeat the first, so set ``rounds = 1``.

    Attributes:
        local: nothing of it is used but `batch_size`, the images that are read at a time.
        ridge: weight of the squared length of a row, without its bias, beside the mean squared error. Choose
            it by validation: too little overfits where there are few images for each feature. 30 is the best
            of 1, 10, 30 and 100 on NIH ChestX-ray14 with EfficientNet-Lite0.
    """

    about = About(
        "afl", "AFL", "He et al., CVPR 2025", removable=True, mixes_patients="sends sums over all images"
    )
    labels = LabelUse(view="own")
    local: LocalTraining = field(default_factory=LocalTraining)
    ridge: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0

    def __post_init__(self) -> None:
        if self.local.warmup_epochs:
            raise ConfigError("AFL does not train, so it has no warm-up; remove method.local.warmup_epochs")

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        if spec.train == "adapters":
            raise ConfigError("AFL trains no part of the encoder; set model.train='head'")
        if spec.head != "linear" or spec.hidden or spec.neck or spec.projection:
            raise ConfigError(
                "AFL solves a linear head on the features of a frozen encoder; set model.head=linear, and "
                "remove model.hidden, neck and projection"
            )
        return replace(spec, train="head")

    def egress(self, layout: Layout) -> Egress:
        width = layout.features + 1
        bound, double = (-_MOST, _MOST), "torch.float64"
        channels = (
            Channel(GRAM, "up", (VARIABLE, width * (width + 1) // 2), double, bound, why=_WHY[GRAM]),
            Channel(SETS, "up", (VARIABLE, CLASSES), "torch.uint8", (0, 1), why=_WHY[SETS]),
            Channel(MOMENTS, "up", (CLASSES, width), double, bound, "own", why=_WHY[MOMENTS]),
        )
        why = {
            "class_weights": "1 for each class that is sent, else 0",
            "metrics": "the received global model on the site's validation data; selects the best round",
        }
        return Egress({}, {}, channels, class_weight=(0.0, 1.0), why=why, check=self.check)

    def check(self, update: Update) -> None:
        """Refuse sums that no images have: a sum with them might have no solution.

        With 0 or 1 for y, b G^-1 b is at most the number of images with the class, the last number of b. And
        where each site's G has a solution, so has their sum.

        Raises:
            RejectedUpdate: names the classes.
        """
        grams, sets, moments = (update.channels[name] for name in (GRAM, SETS, MOMENTS))
        told = update.class_weights
        if not sets.sum(dim=0).equal(told.long()) or moments[told != 1].any():
            raise RejectedUpdate("a class is in two sets of classes, or has sums and is in none")
        for gram, of in zip(grams, sets.bool(), strict=True):
            b, names = moments[of], ", ".join(compress(update.labels, of))
            try:
                rows = ridge_rows(gram, b, self.ridge) if names else b
            except ArithmeticError as error:
                raise RejectedUpdate(f"{error} of {names}") from None
            if not ((b * rows).sum(dim=1) <= b[:, -1] * (1 + 1e-6)).all():
                raise RejectedUpdate(f"the moments of {names} exceed their Gram matrix")

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        if site.round_counts > 1:
            raise ConfigError(
                f"{site.name}: round_counts under [privacy] does not cover the sums that AFL sends, which "
                "hold exact numbers of images; remove it, or use another method"
            )
        told = told_classes(site)
        sums = sums_of(site, told)
        update = update_of(received, round_, Fitted(None, {}, 0), {}, {})
        return replace(update, class_weights=told.double(), channels=sums), {}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        head = {name: rows.clone() for name, rows in previous.head.items()}
        parts, moments = _by_class(previous, updates)
        for places, classes in parts.items():
            rows = 4 * ridge_rows(_sum(updates, places), moments[classes], self.ridge)
            head["head.weight"][classes] = rows[:, :-1].float()
            head["head.bias"][classes] = rows[:, -1].float() - 2
        return replace(previous, head=head)


def told_classes(site: SiteContext) -> Tensor:
    """Which of the model's classes a site sends, ``[c]``; see `_spans` and `_apart`.

    It sends nothing of a class with fewer than `min_count` images with it, or without it.
    """
    y, known = site.samples["train"].targets()
    least = torch.stack([(known & (y == value)).sum(dim=0) for value in (0, 1)]).amin(dim=0)
    told = own_rows(site).bool() & known.any(dim=0) & (least >= site.min_count)
    if site.min_count:
        told &= ~_spans(site, known) & _apart(known, told, site)
    return told


def _spans(site: SiteContext, known: Tensor) -> Tensor:
    """Of which classes no more images are known than there are features, ``[c]``.

    Their Gram matrix is singular, and would tell of any image whether it can be among them.
    """
    width = site.model.head.in_features
    few = own_rows(site).bool() & (known.sum(dim=0) <= width)
    if few.any():
        names = [name for name, is_few in zip(site.model.labels.names, few.tolist(), strict=True) if is_few]
        LOG.warning(
            "site %r sends nothing of %s: sums over no more images than the %d features of the encoder tell "
            "of single images; use an encoder of fewer features, or set min_count = 0 under [privacy]",
            site.name,
            ", ".join(names),
            width,
        )
    return few


def _apart(known: Tensor, told: Tensor, site: SiteContext) -> Tensor:
    """Which classes to send so that the images of two sums differ in none or in `min_count` of them, ``[c]``.

    The difference of two sums is a sum over the images in which they differ. Of two that are too near, the
    class of more images is sent.
    """
    kept = torch.zeros_like(told)
    sizes, names = known.sum(dim=0).tolist(), site.model.labels.names
    for c in sorted(told.nonzero().flatten().tolist(), key=lambda c: (-sizes[c], names[c])):
        differ = (known[:, kept] ^ known[:, c : c + 1]).sum(dim=0)
        kept[c] = not bool(((differ > 0) & (differ < site.min_count)).any())
    return kept


@torch.no_grad()
def sums_of(site: SiteContext, told: Tensor) -> dict[str, Tensor]:
    """G and b of the classes that a site sends; one matrix of zeros where it sends none.

    Args:
        told: ``[c]``, the classes.
    """
    known = site.samples["train"].targets()[1]
    which = told.nonzero().flatten()
    # The sets, in an order that does not depend on that of the classes.
    masks, of = torch.unique(known[:, which].T, dim=0, return_inverse=True)
    count, width = max(len(masks), 1), site.model.head.in_features + 1
    sets = torch.zeros(count, len(told), dtype=torch.uint8)
    sets[of, which] = 1
    first = [int(row.nonzero()[0]) for row in sets[: len(masks)]]  # a class of each set
    grams = torch.zeros(count, width, width, dtype=torch.float64, device=site.device)
    moments = torch.zeros(len(told), width, dtype=torch.float64, device=site.device)
    site.model.eval()
    train = site.samples["train"]
    size = site.batch_size or evaluation_batch(train.inputs, site.device)
    for each in train.batches(size) if len(masks) else ():
        batch = ready_inputs(site, each)
        x = F.pad(site.model.features(batch.inputs).double(), (0, 1), value=1.0)
        for k, c in enumerate(first):
            seen = x[batch.known[:, c]]
            grams[k] += seen.T @ seen
        moments += (batch.y * batch.known).double().T @ x
    above = torch.triu_indices(width, width)
    moments = torch.where(told.unsqueeze(1), moments.cpu(), 0.0)
    return {GRAM: grams.cpu()[:, above[0], above[1]], SETS: sets, MOMENTS: moments}


_Places = tuple[tuple[int, int], ...]
"""Where the Gram matrices of a class are: each the position of an update, and of a matrix in it."""


def _by_class(previous: GlobalModel, updates: Iterable[Update]) -> tuple[dict[_Places, list[int]], Tensor]:
    """The classes that have the same Gram matrices, by where these are; and the sums of b, ``[M, d]``."""
    places: dict[int, list[tuple[int, int]]] = {}
    moments = torch.zeros(())
    for position, update in enumerate(updates):
        where, sent = previous.where(update.labels), update.channels[MOMENTS]
        if not position:
            moments = torch.zeros(len(previous.labels), sent.shape[1], dtype=torch.float64)
        moments.index_add_(0, where, sent)
        for k, column in update.channels[SETS].nonzero().tolist():
            places.setdefault(int(where[column]), []).append((position, k))
    parts: dict[_Places, list[int]] = {}
    for c, found in sorted(places.items()):
        parts.setdefault(tuple(found), []).append(c)
    return parts, moments


def _sum(updates: Iterable[Update], places: _Places) -> Tensor:
    """The sum of the Gram matrices of a class, as an upper triangle."""
    found = (u.channels[GRAM][k] for at, u in enumerate(updates) for position, k in places if position == at)
    return torch.stack(list(found)).sum(dim=0)


def ridge_rows(gram: Tensor, moments: Tensor, ridge: float) -> Tensor:
    """w of some classes, ``[s, d]``, float64.

    Args:
        gram: the upper triangle of the sum of their G, ``[d (d + 1) / 2]``.
        moments: the sums of their b, ``[s, d]``.

    Raises:
        ArithmeticError: the sum is that of no features.
    """
    width = moments.shape[1]
    upper = torch.zeros(width, width, dtype=torch.float64)
    upper[tuple(torch.triu_indices(width, width))] = gram
    full = upper + upper.triu(1).T
    full.diagonal()[:-1].add_(ridge * full[-1, -1])  # that is the number of images
    factor, failed = torch.linalg.cholesky_ex(full)
    if failed:
        raise ArithmeticError("no positive definite sum of Gram matrices")
    return torch.cholesky_solve(moments.T, factor).T
