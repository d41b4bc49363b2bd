"""Augmentation on the batch: every image gets a transform of its own in one resampling."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.messages import STRICT


@dataclass(frozen=True, config=STRICT)
class Augmentation:
    """Random changes of training images; all off by default.

    Attributes:
        rotation: largest angle in degrees, to either side.
        flip: chance of a mirror image left to right.
        zoom: largest relative change of scale, drawn for each axis.
        contrast: largest relative change of contrast around the image's mean.
    """

    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    flip: Annotated[float, Field(ge=0, le=1)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return any((self.rotation, self.flip, self.zoom, self.contrast))


SURGICAL = Augmentation(rotation=72.0, flip=0.5, zoom=0.5, contrast=0.75)
"""Surgical Aggregation 2024, Sec. 3.4.3: rotation, flip, zoom and contrast, with the program's ranges."""

MILD = Augmentation(rotation=10.0, zoom=0.1, contrast=0.3)
"""For chest images whose sides carry meaning."""


def augment(images: Tensor, generator: torch.Generator, spec: Augmentation) -> Tensor:
    """Changes each image of a batch at random.

    Args:
        images: float ``[n, c, h, w]``, normalised.
        generator: the only source of randomness, on the CPU.

    Returns:
        ``[n, c, h, w]``.
    """
    n = images.shape[0]

    def draw(limit: float) -> Tensor:
        return (torch.rand(n, generator=generator) * 2 - 1) * limit

    angle, zoom_y, zoom_x = draw(math.radians(spec.rotation)), 1 + draw(spec.zoom), 1 + draw(spec.zoom)
    mirror = torch.where(torch.rand(n, generator=generator) < spec.flip, -1.0, 1.0)
    contrast = (1 + draw(spec.contrast)).view(-1, 1, 1, 1).to(images.device)
    if spec.rotation or spec.zoom or spec.flip:
        cos, sin = torch.cos(angle), torch.sin(angle)
        zero = torch.zeros(n)
        theta = torch.stack(
            [
                torch.stack([cos * mirror / zoom_x, -sin / zoom_y, zero], dim=1),
                torch.stack([sin * mirror / zoom_x, cos / zoom_y, zero], dim=1),
            ],
            dim=1,
        )
        images = resample(images, theta.to(images.device))
    if spec.contrast:
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        images = (images - mean) * contrast + mean
    return images


def resample(images: Tensor, theta: Tensor) -> Tensor:
    """Each image through its own affine map, bilinear, its border continued outwards.

    The same numbers as MONAI's `AffineTransform`, without the seconds that importing it costs each process.

    Args:
        images: ``[n, c, h, w]``.
        theta: ``[n, 2, 3]``, from output to input in coordinates of -1 to 1.
    """
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
