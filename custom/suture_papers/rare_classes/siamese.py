"""One augmentation for all images of a batch, so that what differs between them is not the augmentation.

    Zhao, Bilen. Dataset Condensation with Differentiable Siamese Augmentation. ICML 2021.

The ranges are those of CReFF's published program. What comes into view beyond the border is the border
continued, as in `suture.data.augmentation`, and black there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from suture.data.augmentation import resample

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
    return _moved(images, [[x, 0.0, 0.0], [0.0, y, 0.0]])


def rotate(images: Tensor, u: float, *_: float) -> Tensor:
    """A rotation of up to `_ANGLE`."""
    cos, sin = math.cos(_ANGLE * (2 * u - 1)), math.sin(_ANGLE * (2 * u - 1))
    return _moved(images, [[cos, -sin, 0.0], [sin, cos, 0.0]])


def _moved(images: Tensor, theta: list[list[float]]) -> Tensor:
    return resample(images, images.new_tensor(theta).expand(len(images), 2, 3))


_KINDS: tuple[Callable[[Tensor, float, float, float], Tensor], ...] = (colour, crop, cut, flip, zoom, rotate)
