"""MoCo v2: a backbone learns, without labels, to distinguish the views of an image from other images.

He et al. Momentum Contrast for Unsupervised Visual Representation Learning. CVPR 2020.
Chen et al. Improved Baselines with Momentum Contrastive Learning. arXiv:2003.04297.
Views are crops with other colours and blur (Sec. 3): the augmentation of MoCo v1 with the blur of SimCLR
(Chen et al. ICML 2020, App. A).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from suture.core.errors import ConfigError, DataError, check_known
from suture.core.runtime import generator_for, repeatable, seed_for, seed_torch
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import Preprocessing, Share, by_channel, choose, moved, pad, resample, spread
from suture.learning.steps import SGD, StepLosses
from suture.models import MODELS, ModelSpec
from suture.models.priors import LUMA

_BACKBONES = ("cnn", "resnet_small", "resnet18")

GROUP = 32
"""Images over which batch norm computes its statistics; MoCo's 256 a step were on 8 GPUs."""

Report = Callable[[int, float], None]
"""A function that is called with the number of an epoch (from 1) and its mean loss."""

_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""Maps red, green and blue to brightness and two axes of colour, where a change of hue is a rotation."""

TONE_CHANCE, GRAY_CHANCE, BLUR_CHANCE = 0.8, 0.2, 0.5
"""Probability that tone and hue of an image change at all, that it becomes gray, and that it is blurred."""

_HUE = 0.1
"""Largest change of hue, as a share of the whole circle."""

_BLUR = (0.1, 2.0)
"""Range of the Gaussian filter's standard deviation, in pixels of an image of `_WIDEST`."""

_WIDEST = 224
"""Pixels."""

KEYS, WEIGHT_DECAY = 128, 1e-4
"""Width of the keys; L2 penalty."""


@validated(frozen=True, config=STRICT)
class Views:
    """How views differ; the defaults are MoCo v2's.

    Attributes:
        crop: the smallest share of the image's area in a crop; the ratio of its sides is at most 4 to 3.
        flip: probability of a left-right mirror image.
        tone: largest relative change of brightness and of contrast, and of saturation in colour.
    """

    crop: Annotated[float, Field(gt=0, le=1)] = 0.2
    flip: Share = 0.5
    tone: Share = 0.4


@validated(frozen=True, config=STRICT)
class Pretraining:
    """What is trained, and how; the defaults are MoCo v2's except for backbone, epochs, batch and queue.

    Attributes:
        backbone: ``cnn``, ``resnet_small`` or ``resnet18``.
        size: side of the images.
        color: whether they are in colour.
        epochs: passes over the images.
        batch_size: images a step.
        lr: learning rate of SGD (momentum 0.9) for 256 images a step, scaled in proportion to `batch_size`;
            it falls to 0 along half a cosine.
        momentum: m of MoCo, Eq. 2; a run of few steps needs a smaller one.
        queue: number of negative keys; at most the number of images.
        temperature: divisor of the similarities.
        views: the augmentation.
    """

    backbone: str = "cnn"
    size: Annotated[int, Field(ge=16, le=4096)] = 64
    color: StrictBool = False
    epochs: Annotated[int, Field(ge=1, le=LIMIT)] = 20
    batch_size: Annotated[int, Field(ge=2, le=LIMIT)] = 128
    lr: Annotated[float, Field(gt=0)] = 0.03
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.999
    queue: Annotated[int, Field(ge=2, le=LIMIT)] = 4096
    temperature: Annotated[float, Field(gt=0)] = 0.2
    views: Views = Views()

    def __post_init__(self) -> None:
        check_known("backbone", self.backbone, _BACKBONES)
        smallest = MODELS[self.backbone].smallest
        if self.size < smallest:
            raise ConfigError(f"{self.size} px is too small for {self.backbone}; {smallest} or more")

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the backbone's images."""
        return ModelSpec(self.backbone, self.size, self.color).preprocessing


@dataclass(frozen=True)
class Pretrained:
    """The result of pretraining.

    Attributes:
        network: the query encoder's backbone.
        width: number of its features.
        losses: mean loss of each epoch.
    """

    network: nn.Module
    width: int
    losses: tuple[float, ...]


class Encoder(nn.Module):
    """A backbone with the projection of MoCo v2, a perceptron of two layers."""

    def __init__(self, backbone: nn.Module, width: int, projection: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, channels, h, w]`` to ``[n, projection]`` of length 1."""
        return F.normalize(self.projector(self.backbone(x)), dim=1)

    def group(self, x: Tensor) -> Tensor:
        """Apply `forward` to groups of about `GROUP` images, so that batch norm uses their statistics."""
        return torch.cat([self(part) for part in x.tensor_split(max(1, len(x) // GROUP))])


@dataclass
class Queue:
    """The latest keys, newest first: ``[k, projection]``, and the image of each, ``[k]``."""

    keys: Tensor
    rows: Tensor

    def push(self, keys: Tensor, rows: Tensor) -> None:
        """Replace the oldest keys by the same number of new ones."""
        length = len(self.keys)
        self.keys = torch.cat([keys, self.keys])[:length]
        self.rows = torch.cat([rows, self.rows])[:length]


def info_nce(queries: Tensor, keys: Tensor, queue: Queue, rows: Tensor, temperature: float) -> Tensor:
    """Return the mean of -log softmax of a query's own key among it and the queue (MoCo, Eq. 1).

    On a small data set the queue reaches back to the previous epoch and holds keys of the query's own image:
    these are left out, because they are not negatives.

    Args:
        queries, keys: ``[n, projection]`` of length 1.
        rows: ``[n]``, the numbers of their images.
    """
    own = (queries * keys).sum(1, keepdim=True)
    others = (queries @ queue.keys.T).masked_fill(rows.view(-1, 1) == queue.rows, -math.inf)
    logits = torch.cat([own, others], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long, device=logits.device))


@torch.no_grad()
def follow(key: Encoder, query: Encoder, momentum: float) -> None:
    """Set key <- momentum key + (1 - momentum) query (MoCo, Eq. 2)."""
    torch._foreach_lerp_(list(key.parameters()), list(query.parameters()), 1 - momentum)


class Trainer:
    """The two encoders, the queue, the optimiser and the generators of random numbers.

    Args:
        images: uint8 ``[n, 1 or 3, size, size]``.
    """

    def __init__(self, images: Tensor, spec: Pretraining, seed: int, device: torch.device | str) -> None:
        self.images, self.spec, self.device = images, spec, torch.device(device)
        self.order = generator_for(seed, "pretrain", "order")
        self.noise = generator_for(seed, "pretrain", "views")
        self.prepare = spec.preprocessing
        with seed_torch(seed_for(seed, "pretrain", "model")):
            backbone, self.width = MODELS[spec.backbone].build(
                ModelSpec(spec.backbone, spec.size, spec.color), None
            )
            query = Encoder(backbone, self.width, KEYS)
        self.query = query.to(self.device)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.lr = spec.lr * spec.batch_size / 256
        self.optimiser = SGD(self.query.parameters(), self.lr, momentum=0.9, weight_decay=WEIGHT_DECAY)
        self.queue = self._fill()

    def batches(self) -> list[Tensor]:
        """Return the rows of each step of an epoch; a single last row is added to the step before it."""
        rows = torch.randperm(len(self.images), generator=self.order)
        parts = list(torch.split(rows, self.spec.batch_size))
        return [*parts[:-2], torch.cat(parts[-2:])] if len(parts) > 1 and len(parts[-1]) == 1 else parts

    def views(self, rows: Tensor) -> Tensor:
        """Return a normalised view of each row: ``[m, channels, size, size]``."""
        images = moved(self.images[rows], self.device).float()
        return self.prepare(view(images, self.noise, self.spec.views))

    @torch.no_grad()
    def keys(self, rows: Tensor) -> Tensor:
        """Return the keys ``[m, projection]`` of a view of each row, in other groups than the queries.

        MoCo shuffles the keys over its GPUs, because batch norm's statistics would reveal which key shares
        them with a query. A single device needs groups in place of GPUs; the keys have other ones.
        """
        x, order = self.views(rows), torch.randperm(len(rows), generator=self.order)
        mixed = order.to(self.device, non_blocking=True)
        return self.key.group(x[mixed])[mixed.argsort()]

    def _fill(self) -> Queue:
        """Return a queue of real keys: random ones are easy negatives, and the loss would rise at first."""
        length = min(self.spec.queue, len(self.images))
        rows = torch.cat(self.batches())[:length]
        parts = rows.tensor_split(max(1, length // self.spec.batch_size))
        return Queue(torch.cat([self.keys(part) for part in parts]), rows.to(self.device))

    def epoch(self, index: int) -> float:
        """Train for one epoch (from 0) and return its mean loss.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        batches = self.batches()
        with StepLosses(partial(_divergence, index + 1)) as losses:
            for i, rows in enumerate(batches):
                done = (index + i / len(batches)) / self.spec.epochs
                self.optimiser.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * done)) / 2
                losses.add(self.step(rows))
        assert losses.mean is not None
        return losses.mean

    def step(self, rows: Tensor) -> Tensor:
        """Update both encoders once and return the loss before the update, a scalar on the device."""
        queries, own = self.query.group(self.views(rows)), rows.to(self.device, non_blocking=True)
        follow(self.key, self.query, self.spec.momentum)
        keys = self.keys(rows)
        loss = info_nce(queries, keys, self.queue, own, self.spec.temperature)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.queue.push(keys, own)
        return loss.detach()


def _divergence(epoch: int, step: int, _: float) -> str:
    return f"the loss of epoch {epoch}, step {step} is not finite; lower lr: --set lr=VALUE"


def pretrain(
    images: Tensor,
    spec: Pretraining,
    seed: int,
    device: torch.device | str = "cpu",
    report: Report = lambda _epoch, _loss: None,
) -> Pretrained:
    """Train a backbone; on a CPU the same seed and number of threads give the same tensors.

    Args:
        images: uint8 ``[n, 1 or 3, size, size]``, perhaps memory-mapped.

    Raises:
        DataError: there are fewer than two images.
        NonFiniteLoss: the loss is not finite.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} training images; give two or more")
    losses = []
    with repeatable(device):
        trainer = Trainer(images, spec, seed, device)
        for index in range(spec.epochs):
            losses.append(trainer.epoch(index))
            report(index + 1, losses[-1])
    return Pretrained(trainer.query.backbone.cpu(), trainer.width, tuple(losses))


def view(images: Tensor, generator: torch.Generator, spec: Views) -> Tensor:
    """Return a random view of each image.

    Args:
        images: float ``[n, 1 or 3, h, w]`` in [0, 255].
        generator: the only source of randomness, on the CPU; a GPU gets what it draws without being awaited.

    Returns:
        ``[n, 1 or 3, h, w]`` in [0, 255].
    """
    n = len(images)
    images = color_jitter(resample(images, crops(n, generator, spec)), generator, spec)
    if images.shape[1] == 3:
        images = mixed(images, colours(n, generator, spec).to(images, non_blocking=True))
    low, high = (sigma * images.shape[-1] / _WIDEST for sigma in _BLUR)
    rows = choose(n, generator, BLUR_CHANCE).nonzero().flatten()
    sigma = low + (high - low) * torch.rand(len(rows), generator=generator)
    if not len(rows):
        return images
    rows, weights = (
        rows.to(images.device, non_blocking=True),
        gaussian_kernels(sigma, high).to(images, non_blocking=True),
    )
    return images.index_copy(0, rows, blur(images.index_select(0, rows), weights))


def crops(n: int, generator: torch.Generator, spec: Views) -> Tensor:
    """Return the map of each crop, resized and perhaps mirrored: ``[n, 2, 3]`` for `resample`.

    The area is uniform between `spec.crop` and 1. The logarithm of the ratio of sides, between 3/4 and 4/3,
    and the position are uniform among the crops inside the image.
    """
    area = spec.crop + (1 - spec.crop) * torch.rand(n, generator=generator)
    ratio = (spread(n, generator, 1.0) * (-area.log()).clamp(max=math.log(4 / 3))).exp()
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=1)
    # An image is 2 long in the coordinates of `resample`, so the centre moves by 1 - side at most.
    centre = (2 * torch.rand(n, 2, generator=generator) - 1) * (1 - sides)
    mirror = torch.where(choose(n, generator, spec.flip), -1.0, 1.0)
    scale = torch.diag_embed(sides * torch.stack([mirror, torch.ones(n)], dim=1))
    return torch.cat([scale, centre.unsqueeze(2)], dim=2)


def color_jitter(images: Tensor, generator: torch.Generator, spec: Views) -> Tensor:
    """Change the brightness of some images, then their contrast around the mean of their gray image."""
    n = len(images)
    some = choose(n, generator, TONE_CHANCE)
    drawn = [(1 + spread(n, generator, spec.tone) * some).view(-1, 1, 1, 1) for _ in range(2)]
    factors = [factor.to(images, non_blocking=True) for factor in drawn]
    images = (images * factors[0]).clamp_(0, 255)
    weights = by_channel(LUMA if images.shape[1] == 3 else (1.0,), images.device)
    mean = (images * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    return ((images - mean) * factors[1] + mean).clamp_(0, 255)


def colours(n: int, generator: torch.Generator, spec: Views) -> Tensor:
    """Return each image's colour map ``[n, 3, 3]``: hue, then saturation, which is 0 for some."""
    some = choose(n, generator, TONE_CHANCE)
    saturation = 1 + spread(n, generator, spec.tone) * some
    saturation = torch.where(choose(n, generator, GRAY_CHANCE), 0.0, saturation).view(-1, 1, 1)
    angle = spread(n, generator, 2 * math.pi * _HUE) * some
    turn = torch.eye(3).repeat(n, 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    yiq = torch.tensor(_YIQ)
    gray = torch.tensor(LUMA).expand(3, 3)
    turned: Tensor = torch.linalg.inv(yiq) @ turn @ yiq
    return (saturation * torch.eye(3) + (1 - saturation) * gray) @ turned


def mixed(images: Tensor, mixes: Tensor) -> Tensor:
    """Apply the maps ``[n, 3, 3]`` to the colours of every pixel of images ``[n, 3, h, w]``."""
    return (mixes @ images.flatten(2)).clamp_(0, 255).view_as(images)


def gaussian_kernels(sigma: Tensor, widest: float) -> Tensor:
    """Return the weights ``[n, k]`` of Gaussian filters, cut at three of the widest standard deviations."""
    reach = max(1, math.ceil(3 * widest))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma.view(-1, 1)) ** 2)
    return weights / weights.sum(1, keepdim=True)


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Filter each image with its own weights ``[n, k]``, along its columns and then its rows."""
    side = weights.shape[1]
    wide = pad(images, side)
    for axis in (-2, -1):
        length = images.shape[axis]
        wide = torch.stack(
            [wide.narrow(axis, i, length) * weights[:, i].view(-1, 1, 1, 1) for i in range(side)]
        ).sum(0)
    return wide
