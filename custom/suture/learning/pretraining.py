"""MoCo v2: a backbone learns, without labels, to tell an image's views from other images.

He et al. Momentum Contrast for Unsupervised Visual Representation Learning. CVPR 2020.
Chen et al. Improved Baselines with Momentum Contrastive Learning. arXiv:2003.04297.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from suture.core.errors import ConfigError, DataError, unknown
from suture.core.seeds import generator_for, seed_for, seeded
from suture.core.validation import STRICT
from suture.learning.training import NonFiniteLoss
from suture.learning.views import Views, view
from suture.models import MODELS, ModelSpec
from suture.models.classifier import Preprocessing

BACKBONES = ("cnn", "resnet_small", "resnet18")

GROUP = 32
"""Images over which batch norm takes its statistics; MoCo's 256 a step lay on 8 GPUs."""

Report = Callable[[int, float], None]
"""Told of an epoch (from 1) and its mean loss."""


@validated(frozen=True, config=STRICT)
class Pretraining:
    """What is trained, and how; the defaults are MoCo v2's but for backbone, epochs, batch and queue.

    Attributes:
        backbone: one of `BACKBONES`.
        size: side of the images.
        color: whether they are in colour.
        epochs: passes over the images.
        batch_size: images a step.
        lr: learning rate of SGD (momentum 0.9) for 256 images a step, in proportion for others; it falls to 0
            along half a cosine.
        weight_decay: L2 penalty.
        momentum: how much of itself the key encoder keeps at a step; of few steps it should keep less.
        queue: keys to tell from; at most the number of images.
        temperature: that similarities are divided by.
        projection: width of the keys.
        views: the augmentation.
    """

    backbone: str = "cnn"
    size: Annotated[int, Field(ge=16, le=4096)] = 64
    color: bool = False
    epochs: Annotated[int, Field(ge=1)] = 20
    batch_size: Annotated[int, Field(ge=2)] = 128
    lr: Annotated[float, Field(gt=0)] = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.999
    queue: Annotated[int, Field(ge=2)] = 4096
    temperature: Annotated[float, Field(gt=0)] = 0.2
    projection: Annotated[int, Field(ge=2)] = 128
    views: Views = Views()

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES:
            raise unknown("backbone", self.backbone, BACKBONES)
        smallest = MODELS[self.backbone].smallest
        if self.size < smallest:
            raise ConfigError(f"{self.size} px is too small for {self.backbone}; {smallest} or more")

    @property
    def preprocessing(self) -> Preprocessing:
        """How pixels become the backbone's input."""
        return ModelSpec(self.backbone, self.size, self.color).preprocessing


@dataclass(frozen=True)
class Pretrained:
    """What came of it.

    Attributes:
        network: the query encoder's backbone.
        width: number of its features.
        losses: mean of each epoch.
    """

    network: nn.Module
    width: int
    losses: tuple[float, ...]


class Encoder(nn.Module):
    """A backbone under the projection of MoCo v2, a perceptron of two layers."""

    def __init__(self, backbone: nn.Module, width: int, projection: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, channels, h, w]`` to ``[n, projection]`` of length 1."""
        return F.normalize(self.projector(self.backbone(x)), dim=1)

    def grouped(self, x: Tensor) -> Tensor:
        """The same, with statistics of batch norm from about `GROUP` images at a time."""
        return torch.cat([self(part) for part in x.tensor_split(max(1, len(x) // GROUP))])


@dataclass
class Queue:
    """The latest keys, newest first: ``[k, projection]``, and the image of each, ``[k]``."""

    keys: Tensor
    rows: Tensor

    def push(self, keys: Tensor, rows: Tensor) -> None:
        """Takes in new keys for as many of the oldest."""
        length = len(self.keys)
        self.keys = torch.cat([keys, self.keys])[:length]
        self.rows = torch.cat([rows, self.rows])[:length]


def info_nce(queries: Tensor, keys: Tensor, queue: Queue, rows: Tensor, temperature: float) -> Tensor:
    """Mean of -log of the softmax, over a query's own key and the queue, at its own key (MoCo, Eq. 1).

    On a small data set the queue reaches back to the epoch before, where it has keys of the query's own
    image: those are left out, as they are not of another image.

    Args:
        queries, keys: ``[n, projection]`` of length 1.
        rows: ``[n]``, their images.
    """
    own = (queries * keys).sum(1, keepdim=True)
    others = (queries @ queue.keys.T).masked_fill(rows.view(-1, 1) == queue.rows, -math.inf)
    logits = torch.cat([own, others], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long, device=logits.device))


@torch.no_grad()
def follow(key: Encoder, query: Encoder, momentum: float) -> None:
    """key <- momentum key + (1 - momentum) query (MoCo, Eq. 2)."""
    for parameter, new in zip(key.parameters(), query.parameters(), strict=True):
        parameter.lerp_(new, 1 - momentum)


class Trainer:
    """The two encoders, the queue, and where randomness comes from.

    Args:
        images: uint8 ``[n, 1 or 3, size, size]``.
    """

    def __init__(self, images: Tensor, spec: Pretraining, seed: int, device: torch.device | str) -> None:
        self.images, self.spec, self.device = images, spec, torch.device(device)
        self.order = generator_for(seed, "pretrain", "order")
        self.noise = generator_for(seed, "pretrain", "views")
        self.prepare = spec.preprocessing
        with seeded(seed_for(seed, "pretrain", "model")):
            backbone, self.width = MODELS[spec.backbone].build(
                ModelSpec(spec.backbone, spec.size, spec.color), None
            )
            query = Encoder(backbone, self.width, spec.projection)
        self.query = query.to(self.device)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.lr = spec.lr * spec.batch_size / 256
        self.optimiser = torch.optim.SGD(
            self.query.parameters(), self.lr, momentum=0.9, weight_decay=spec.weight_decay
        )
        self.queue = self._filled()

    def batches(self) -> list[Tensor]:
        """The rows of one epoch's steps, each once; a last one of a single row joins the step before it."""
        rows = torch.randperm(len(self.images), generator=self.order)
        parts = list(torch.split(rows, self.spec.batch_size))
        return [*parts[:-2], torch.cat(parts[-2:])] if len(parts) > 1 and len(parts[-1]) == 1 else parts

    def views(self, rows: Tensor) -> Tensor:
        """A view of each row, normalised: ``[m, channels, size, size]``."""
        images = self.images[rows].to(self.device).float()
        return self.prepare(view(images, self.noise, self.spec.views))

    @torch.no_grad()
    def keys(self, rows: Tensor) -> Tensor:
        """``[m, projection]`` of a view of each row, in groups that are not the queries'.

        MoCo shuffles the keys over its GPUs, because a key that shares batch norm's statistics with its query
        can be told by them. One device has a single group, and no order of it changes a statistic: so there
        are groups here too, drawn anew.
        """
        x, mixed = self.views(rows), torch.randperm(len(rows), generator=self.order).to(self.device)
        return self.key.grouped(x[mixed])[mixed.argsort()]

    def _filled(self) -> Queue:
        """A queue of real keys: random ones are easily told apart, and the loss would rise at first."""
        length = min(self.spec.queue, len(self.images))
        rows = torch.cat(self.batches())[:length]
        parts = rows.tensor_split(max(1, length // self.spec.batch_size))
        return Queue(torch.cat([self.keys(part) for part in parts]), rows.to(self.device))

    def epoch(self, index: int) -> float:
        """Trains for one epoch (from 0); returns its mean loss.

        Raises:
            NonFiniteLoss: the loss is no number.
        """
        batches, total = self.batches(), 0.0
        for i, rows in enumerate(batches):
            done = (index + i / len(batches)) / self.spec.epochs
            self.optimiser.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * done)) / 2
            total += self.step(rows)
            if not math.isfinite(total):
                raise NonFiniteLoss(f"the loss of epoch {index + 1}, step {i + 1} is no number; lower --lr")
        return total / len(batches)

    def step(self, rows: Tensor) -> float:
        """One step of both encoders; returns the loss before it."""
        queries, own = self.query.grouped(self.views(rows)), rows.to(self.device)
        follow(self.key, self.query, self.spec.momentum)
        keys = self.keys(rows)
        loss = info_nce(queries, keys, self.queue, own, self.spec.temperature)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.queue.push(keys, own)
        return loss.item()


def pretrain(
    images: Tensor,
    spec: Pretraining,
    seed: int,
    device: torch.device | str = "cpu",
    report: Report = lambda _epoch, _loss: None,
) -> Pretrained:
    """Trains a backbone; on a CPU the same seed and number of threads give the same tensors.

    Args:
        images: uint8 ``[n, 1 or 3, size, size]``, perhaps memory-mapped.

    Raises:
        DataError: there are fewer than two images.
        NonFiniteLoss: the loss is no number.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} training images; an image is told from others, so give two or more")
    trainer = Trainer(images, spec, seed, device)
    losses = []
    for index in range(spec.epochs):
        losses.append(trainer.epoch(index))
        report(index + 1, losses[-1])
    return Pretrained(trainer.query.backbone.cpu(), trainer.width, tuple(losses))
