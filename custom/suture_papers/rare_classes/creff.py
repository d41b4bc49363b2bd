"""CReFF: sites send the gradients of a second head, and the server re-trains it on features that match them.

    Shang, Lu, Huang, Wang. Federated Learning on Heterogeneous and Long-Tailed Data via Classifier
    Re-Training with Federated Features. IJCAI 2022.

    at site k:   G_kc = mean over 10 draws of up to 32 images of class c of the gradient of the cross-entropy
                        by the head psi~, on features of the received backbone, one augmentation a draw
                 then as FedAvg from the merged head psi
    server:      w, psi as FedAvg;   G_c = mean of G_kc over the sites that have class c
                 features V_c that match G_c under psi~, and psi~ trained anew on them

The next round starts from psi; what predicts is psi~. A site without images of a class, or with fewer than
its `min_count`, sends zeros for it. A class that nobody sent keeps its features; one that nobody ever sent
has none: it is left out of the re-training, and its row of psi~ is that of psi.

Federated features: vectors on which the head has the gradients that sites measure on their images.

    Shang et al. Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
    Federated Features. IJCAI 2022.

    G_c      = mean over h of  (softmax(W h + b) - e_c) (h, 1)^T         [M, d+1], of features h of class c
    D(A, B)  = sum over the rows m of W of  1 - cos(A_m, B_m),  plus  1 - cos(A_b, B_b)
    V_c     <- V_c - eta grad D(G_c(V_c), mean over sites of G_c)        some steps from where V_c stands
    psi~     = a new head, trained on all V by cross-entropy

Rows of a head are ``[M, d + 1]`` here: the weights of each class and its bias. The server computes in double
precision, in which no finite gradient that a site sends overflows.

One augmentation for all images of a batch, so that what differs between them is not the augmentation.

    Zhao, Bilen. Dataset Condensation with Differentiable Siamese Augmentation. ICML 2021.

The ranges are those of CReFF's published program. What comes into view beyond the border is the border
continued, as in `suture.data.batch`, and black there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for, seed_for
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import resample
from suture.learning.training import LocalRound, SiteContext, ready_inputs
from suture.methods.averaging import WeightedMean
from suture.methods.base import About, GlobalModel, RoundContext, hyperparameters
from suture.methods.class_weights import ClassWeights
from suture.methods.composed import Component, Composed, Requirements, class_counts
from suture.models import ModelSpec
from suture.models.classifier import Layout, head_rows
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update, align_rows

_BRIGHTNESS, _SATURATION, _CONTRAST = 0.5, 1.0, 0.5
"""Brightness moves by up to half a standard deviation; the others are multiplied by 1 plus or minus this."""

_PAD, _HOLE = 0.125, 0.5
"""Shares of the image's side: how far a crop moves, and the side of what is cut out."""

_ZOOM, _ANGLE = 1.2, math.radians(15)


def siamese(images: Tensor, generator: torch.Generator) -> Tensor:
    """Change all images alike: in colour, by a crop, a hole, a mirror, a zoom or a rotation, with equal odds.

    Args:
        images: float ``[n, channels, h, w]``, normalised.
        generator: the only source of randomness, on the CPU.

    Returns:
        the same shape.
    """
    kind = int(torch.randint(len(_KINDS), (), generator=generator))
    u, v, w = torch.rand(3, generator=generator).tolist()
    return _KINDS[kind](images, u, v, w)


def colour(images: Tensor, u: float, v: float, w: float) -> Tensor:
    """Brightness, saturation and contrast; u, v and w in [0, 1]."""
    images = images + _BRIGHTNESS * (2 * u - 1)
    gray = images.mean(dim=1, keepdim=True)
    images = gray + (images - gray) * (1 + _SATURATION * (2 * v - 1))
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (images - mean) * (1 + _CONTRAST * (2 * w - 1))


def crop(images: Tensor, u: float, v: float, _: float) -> Tensor:
    """A crop of the images with a frame of zeros, as large as they are."""
    sides = images.shape[-2:]
    frame = [int(_PAD * side + 0.5) for side in sides]
    wide = F.pad(images, (frame[1], frame[1], frame[0], frame[0]))
    y, x = (min(int(s * (2 * f + 1)), 2 * f) for s, f in zip((u, v), frame, strict=True))
    return wide[..., y : y + sides[0], x : x + sides[1]]


def cut(images: Tensor, u: float, v: float, _: float) -> Tensor:
    """A hole of zeros, centred anywhere in the image."""
    out = images.clone()
    spans = []
    for s, side in zip((u, v), images.shape[-2:], strict=True):
        start = int(s * side) - int(_HOLE * side + 0.5) // 2
        spans.append(slice(max(start, 0), start + int(_HOLE * side + 0.5)))
    out[..., spans[0], spans[1]] = 0
    return out


def flip(images: Tensor, u: float, *_: float) -> Tensor:
    """A mirror image left to right, in half of the draws."""
    return images.flip(-1) if u < 0.5 else images


def zoom(images: Tensor, u: float, v: float, _: float) -> Tensor:
    """A change of the extent that is seen, from 1 / `_ZOOM` to `_ZOOM` along each axis."""
    x, y = (1 / _ZOOM + s * (_ZOOM - 1 / _ZOOM) for s in (u, v))
    return _move(images, [[x, 0.0, 0.0], [0.0, y, 0.0]])


def rotate(images: Tensor, u: float, *_: float) -> Tensor:
    """A rotation of up to `_ANGLE`."""
    cos, sin = math.cos(_ANGLE * (2 * u - 1)), math.sin(_ANGLE * (2 * u - 1))
    return _move(images, [[cos, -sin, 0.0], [sin, cos, 0.0]])


def _move(images: Tensor, theta: list[list[float]]) -> Tensor:
    return resample(images, images.new_tensor(theta).expand(len(images), 2, 3))


_KINDS: tuple[Callable[[Tensor, float, float, float], Tensor], ...] = (colour, crop, cut, flip, zoom, rotate)


BATCH = 32
"""Features a step of SGD on the new head."""

TINY = 1e-6
"""In the divisor of a cosine."""

STEPS, RATE = 100, 0.1
"""Of SGD on the features, in each round."""

HEAD_EPOCHS, HEAD_RATE = 300, 0.01
"""Of SGD on the new head, in each round."""


@validated(frozen=True, config=STRICT)
class FederatedFeatures:
    """How the server makes features of the gradients, and a head of these.

    Attributes:
        per_class: number of features of each class.
    """

    per_class: Annotated[int, Field(ge=1, le=LIMIT)] = 100

    def match(self, features: Tensor, classes: Tensor, rows: Tensor, target: Tensor) -> Tensor:
        """The features after the steps toward the gradients of the sites.

        Args:
            features: V_c ``[s, n, d]`` of the classes ``[s]``.
            rows: the head that the sites used, ``[M, d + 1]``.
            target: the mean of their gradients, ``[s, M, d + 1]``.
        """
        y = F.one_hot(classes, len(rows)).to(rows).unsqueeze(1)
        for _ in range(STEPS):
            features = features.detach().requires_grad_()
            away = distance(head_gradient(features, y, rows), target).sum()
            (slope,) = torch.autograd.grad(away, features)
            features = features - RATE * slope
        return features.detach()

    def retrain(self, features: Tensor, rows: Tensor, order: torch.Generator) -> Tensor:
        """A head of the classes that have features, trained from `rows`.

        Args:
            features: ``[s, n, d]``, of each of its classes.
            rows: where it begins, ``[s, d + 1]``.
            order: draws the batches.
        """
        s, n, d = features.shape
        x, y = features.reshape(s * n, d), torch.eye(s).to(features).repeat_interleave(n, dim=0)
        for _ in range(HEAD_EPOCHS):
            for batch in torch.split(torch.randperm(s * n, generator=order), BATCH):
                rows = rows - HEAD_RATE * head_gradient(x[batch], y[batch], rows)
        return rows


def head_gradient(features: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy by the rows of a head.

    Args:
        features: ``[..., n, d]``.
        y: one-hot labels ``[..., n, M]``, or one for all features of a class, ``[..., 1, M]``.
        rows: ``[M, d + 1]``.

    Returns:
        ``[..., M, d + 1]``.
    """
    h = F.pad(features, (0, 1), value=1.0)
    error = torch.softmax(h @ rows.T, dim=-1) - y
    return error.transpose(-2, -1) @ h / features.shape[-2]


def distance(one: Tensor, other: Tensor) -> Tensor:
    """D of gradients ``[..., M, d + 1]``: one minus the cosine, for each row of W and for b; ``[...]``."""
    of_rows = (1 - _cos(one[..., :-1], other[..., :-1])).sum(dim=-1)
    return of_rows + 1 - _cos(one[..., -1], other[..., -1])


def _cos(a: Tensor, b: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(dim=-1) / (norms + TINY)


GRADIENTS, RETRAINED, FEATURES = "class_gradients", "retrained", "features"
"""Names of G, up, of psi~, down, and of V, at the server; zeros for a class that has none."""


@validated(frozen=True, config=STRICT)
class ClassGradients(Component):
    """The gradients of the head that a site measures.

    Attributes:
        draws: of images of each class.
        images: the most images of a draw.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multiclass",), view="all", why="are compared over the classes of all sites"
    )
    draws: Annotated[int, Field(ge=1, le=LIMIT)] = 10
    images: Annotated[int, Field(ge=1, le=LIMIT)] = 32

    @torch.no_grad()
    def of(self, site: SiteContext, rows: Tensor, seed: int) -> Tensor:
        """G_kc of every class, ``[c, c, d + 1]``, by a head ``[c, d + 1]``; zeros where there is none.

        What is drawn of a class depends on the seed and on its name.
        """
        site.model.eval()
        train, size = site.samples["train"], len(rows)
        rows = rows.to(site.device)
        gradients = torch.zeros(size, *rows.shape)
        for c in (class_counts(site) >= max(site.min_count, 1)).nonzero().flatten().tolist():
            having, y = train.y[:, c].eq(1).nonzero().flatten(), F.one_hot(torch.tensor([c]), size).to(rows)
            generator = generator_for(seed, site.model.labels.names[c])
            for _ in range(self.draws):
                drawn = having[torch.randperm(len(having), generator=generator)[: self.images]]
                batch = ready_inputs(site, train.batch(drawn))
                features = site.model.features({"image": siamese(batch.inputs["image"], generator)})
                gradients[c] += head_gradient(features, y, rows).cpu() / self.draws
        return gradients


@hyperparameters
class CReFF(Composed):
    """CReFF; see `Composed` for the fields of FedAvg.

    Attributes:
        class_gradients: what a site measures before it trains.
        federated_features: what the server makes of it after each round.
    """

    about = About(
        "creff",
        "CReFF",
        "Shang et al., IJCAI 2022",
        question="classes rare",
        images_only=True,
        pixels="draws its own views of the images",
        mixes_patients="sends gradients of the features of classes",
    )
    class_weights: ClassWeights = "none"
    class_gradients: ClassGradients = field(default_factory=ClassGradients)
    federated_features: FederatedFeatures = field(default_factory=FederatedFeatures)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retrain:
            raise ConfigError(
                "CReFF predicts with the head that the server re-trains, so a head re-trained at the "
                "sites would be unused; leave method.retrain out"
            )

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        spec = super().adapted(spec)
        if spec.head != "linear" or spec.second_head:
            raise ConfigError("CReFF re-trains one linear head; set model.head=linear and second_head=false")
        return spec

    def egress(self, layout: Layout) -> Egress:
        egress, d = super().egress(layout), layout.features
        channels = (
            Channel(GRADIENTS, "up", (CLASSES, CLASSES, d + 1), rows="own", why=_WHY),
            Channel(RETRAINED, "down", (CLASSES, d + 1)),
            Channel(FEATURES, "server", (CLASSES, self.federated_features.per_class, d)),
        )
        return replace(egress, channels=(*egress.channels, *channels))

    def predictor(
        self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        rows = retrained_rows(tensors, channels)
        return {"head.weight": rows[:, :-1].contiguous(), "head.bias": rows[:, -1].contiguous()}

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        draws = seed_for(round_.seed, site.name, round_.round, GRADIENTS)
        rows = retrained_rows(received.head, received.channels)
        gradients = self.class_gradients.of(site, rows, draws)
        update, kept = super().train(site, received, round_)
        return replace(update, channels={GRADIENTS: gradients}), kept

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        target, sent = mean_gradients(previous, updates)
        used = retrained_rows(previous.head, previous.channels).double()
        features = previous.channels[FEATURES].clone()
        if len(sent):
            start = torch.stack([self._features(previous, c, ctx.seed) for c in sent.tolist()])
            features[sent] = self.federated_features.match(start, sent, used, target[sent]).float()
        rows = join(merged.head)
        classes = features.flatten(1).any(dim=1).nonzero().flatten().tolist()
        classes.sort(key=previous.labels.__getitem__)  # batches are drawn from them in their order
        if classes:
            rows[classes] = self._retrain(previous, features, classes, ctx)
        return replace(merged, channels={RETRAINED: rows, FEATURES: features})

    def _features(self, previous: GlobalModel, c: int, seed: int) -> Tensor:
        """V_c where the last round left it; at first from N(0, 1)."""
        held = previous.channels[FEATURES][c]
        if held.any():
            return held.double()
        generator = generator_for(seed, f"{FEATURES}/{previous.labels[c]}")
        return torch.randn(held.shape, generator=generator, dtype=torch.float64)

    def _retrain(
        self, previous: GlobalModel, features: Tensor, classes: list[int], ctx: RoundContext
    ) -> Tensor:
        """The rows of psi~ of classes that have features, ``[s, d + 1]``."""
        names = LabelSet(tuple(previous.labels[c] for c in classes), previous.label_type)
        fresh = head_rows(names, features.shape[2], seed_for(ctx.seed, RETRAINED, ctx.round))
        order = generator_for(ctx.seed, RETRAINED, ctx.round)
        having = features[classes].double()
        return self.federated_features.retrain(having, join(fresh).double(), order).float()


_WHY = (
    "mean gradient of the re-trained head on the site's images of each class: reveals to the server "
    "which classes the site has and, approximately, the mean features of their images"
)


def mean_gradients(previous: GlobalModel, updates: Iterable[Update]) -> tuple[Tensor, Tensor]:
    """G_c, the mean over the sites that sent one, ``[M, M, d + 1]``, and the classes that one sent, ``[s]``.

    A gradient that is all zeros is none: it is what a site sends of a class that it does not have.
    """
    labels, rows = previous.labels, join(previous.head).double()
    mean = WeightedMean(labels, {}, {GRADIENTS: rows.new_zeros(len(rows), *rows.shape)})
    for update in updates:
        sent = update.channels[GRADIENTS]
        has = sent.flatten(1).any(dim=1)
        mean.add_rows(update.labels, {GRADIENTS: align_rows(sent, update.labels, labels, axis=1)}, has)
    return mean.head()[GRADIENTS], mean.class_weights.nonzero().flatten()


def retrained_rows(head: Mapping[str, Tensor], channels: Mapping[str, Tensor]) -> Tensor:
    """psi~, ``[c, d + 1]``: before there is one, and for a class that is new, the row of the head itself."""
    rows = channels[RETRAINED]
    return torch.where(rows.any(dim=1, keepdim=True), rows, join(head))


def join(head: Mapping[str, Tensor]) -> Tensor:
    """The rows of a linear head with their biases, ``[c, d + 1]``."""
    return torch.cat([head["head.weight"], head["head.bias"].unsqueeze(1)], dim=1)
