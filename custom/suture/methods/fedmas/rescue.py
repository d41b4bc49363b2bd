"""The rescue factor of Fed-MAS: how far a model is from the prior, class by class, as one number."""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from suture.core.errors import RescueFactorError

Rescue = Literal["paper", "normalised"]

FARTHEST = 4.0
"""The largest distance, of opposite directions."""

LEAST = 1e-12
"""The smallest rescue factor that can weight a mean."""


def distance(y: Tensor, target: Tensor) -> Tensor:
    """Eq. 1, image by image: ``[n, d]`` twice to ``[n]`` in [0, `FARTHEST`]."""
    return 2 - 2 * (F.normalize(y, dim=1) * F.normalize(target, dim=1)).sum(dim=1)


def by_class(each: Tensor, y: Tensor) -> Tensor:
    """The sum of a number of each image ``[n]`` over the images of each class, ``[c]``."""
    return (each.unsqueeze(1) * (y == 1)).sum(dim=0).double().cpu()


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
            f"{site}: the rescue factor of round {round_} is {factor}, which is no weight of a mean. It is 0 "
            "where no training image has a class, and no number where a distance is none; look over the "
            "site's labels and prior"
        )
