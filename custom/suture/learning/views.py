"""Two views of an image that MoCo v2 takes for the same: crops, colours, blur; on the batch.

Chen et al. Improved Baselines with Momentum Contrastive Learning. arXiv:2003.04297 (Sec. 3): the augmentation
of MoCo v1 with the blur of SimCLR (Chen et al. ICML 2020, App. A).
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.validation import STRICT
from suture.data.augmentation import Share, chosen, padded, resample, spread
from suture.models.priors.prior import LUMA

YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""Red, green and blue to brightness and two axes of colour, in which a change of hue is a rotation."""

WIDEST = 224
"""Side of the images that `Views.blur` is for."""


@dataclass(frozen=True, config=STRICT)
class Views:
    """How views differ; the numbers are MoCo v2's.

    Attributes:
        crop: the smallest share of the image's area that a crop takes; sides are as 3 to 4 at most.
        flip: chance of a mirror image left to right.
        tone: largest relative change of brightness and of contrast, and of saturation in colour.
        hue: largest change, as a share of the whole circle.
        tone_chance: chance that tone and hue change at all.
        gray_chance: chance that a colour image loses its colours.
        blur: range of the Gaussian filter's standard deviation, in pixels of a 224 px image.
        blur_chance: chance that an image is blurred at all.
    """

    crop: Annotated[float, Field(gt=0, le=1)] = 0.2
    flip: Share = 0.5
    tone: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    tone_chance: Share = 0.8
    gray_chance: Share = 0.2
    blur: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.1, 2.0)
    blur_chance: Share = 0.5


def view(images: Tensor, generator: torch.Generator, spec: Views) -> Tensor:
    """One random view of each image.

    Args:
        images: float ``[n, 1 or 3, h, w]`` in [0, 255].
        generator: the only source of randomness, on the CPU.

    Returns:
        ``[n, 1 or 3, h, w]`` in [0, 255].
    """
    n = len(images)
    images = toned(resample(images, crops(n, generator, spec).to(images)), generator, spec)
    if images.shape[1] == 3:
        images = mixed(images, colours(n, generator, spec).to(images))
    low, high = (sigma * images.shape[-1] / WIDEST for sigma in spec.blur)
    rows = chosen(n, generator, spec.blur_chance).nonzero().flatten()
    sigma = low + (high - low) * torch.rand(len(rows), generator=generator)
    if not len(rows):
        return images
    rows, weights = rows.to(images.device), bells(sigma, high).to(images)
    return images.index_copy(0, rows, blurred(images.index_select(0, rows), weights))


def crops(n: int, generator: torch.Generator, spec: Views) -> Tensor:
    """The map of each crop, resized to the whole image and perhaps mirrored: ``[n, 2, 3]`` for `resample`.

    The area is uniform between `spec.crop` and 1; so are, of the crops inside the image, the logarithm of the
    sides' ratio, between 3/4 and 4/3, and the place.
    """
    area = spec.crop + (1 - spec.crop) * torch.rand(n, generator=generator)
    ratio = (spread(n, generator, 1.0) * (-area.log()).clamp(max=math.log(4 / 3))).exp()
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=1)
    # An image is 2 long in the coordinates of `resample`, so the centre moves by 1 - side at most.
    centre = (2 * torch.rand(n, 2, generator=generator) - 1) * (1 - sides)
    mirror = torch.where(chosen(n, generator, spec.flip), -1.0, 1.0)
    scale = torch.diag_embed(sides * torch.stack([mirror, torch.ones(n)], dim=1))
    return torch.cat([scale, centre.unsqueeze(2)], dim=2)


def toned(images: Tensor, generator: torch.Generator, spec: Views) -> Tensor:
    """Some images brighter or darker, then of another contrast around the mean of their gray image."""
    n = len(images)
    some = chosen(n, generator, spec.tone_chance)
    factors = [(1 + spread(n, generator, spec.tone) * some).view(-1, 1, 1, 1).to(images) for _ in range(2)]
    images = (images * factors[0]).clamp_(0, 255)
    weights = images.new_tensor(LUMA if images.shape[1] == 3 else (1.0,)).view(1, -1, 1, 1)
    mean = (images * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    return ((images - mean) * factors[1] + mean).clamp_(0, 255)


def colours(n: int, generator: torch.Generator, spec: Views) -> Tensor:
    """How each image's colours are mixed anew, ``[n, 3, 3]``: hue, then saturation, to none for some."""
    some = chosen(n, generator, spec.tone_chance)
    saturation = 1 + spread(n, generator, spec.tone) * some
    saturation = torch.where(chosen(n, generator, spec.gray_chance), 0.0, saturation).view(-1, 1, 1)
    angle = spread(n, generator, 2 * math.pi * spec.hue) * some
    turn = torch.eye(3).repeat(n, 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    yiq = torch.tensor(YIQ)
    gray = torch.tensor(LUMA).expand(3, 3)
    turned: Tensor = torch.linalg.inv(yiq) @ turn @ yiq
    return (saturation * torch.eye(3) + (1 - saturation) * gray) @ turned


def mixed(images: Tensor, mixes: Tensor) -> Tensor:
    """Images ``[n, 3, h, w]`` with the colours of every pixel mixed by ``[n, 3, 3]``."""
    return (mixes @ images.flatten(2)).clamp_(0, 255).view_as(images)


def bells(sigma: Tensor, widest: float) -> Tensor:
    """The weights of Gaussian filters ``[n, k]`` that reach three of the widest standard deviation."""
    reach = max(1, math.ceil(3 * widest))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma.view(-1, 1)) ** 2)
    return weights / weights.sum(1, keepdim=True)


def blurred(images: Tensor, weights: Tensor) -> Tensor:
    """Each image through its own filter, ``[n, k]``, along its columns and then its rows."""
    side = weights.shape[1]
    wide = padded(images, side)
    for axis in (-2, -1):
        length = images.shape[axis]
        wide = torch.stack(
            [wide.narrow(axis, i, length) * weights[:, i].view(-1, 1, 1, 1) for i in range(side)]
        ).sum(0)
    return wide
