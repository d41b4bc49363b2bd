"""Noise and draws of differential privacy: from the system's random bytes, and never from a seed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import torch

Draw = Callable[[int], bytes]
"""Gives a number of random bytes; only tests use another one than the system's."""


def gaussian(shape: tuple[int, ...], draw: Draw = os.urandom) -> torch.Tensor:
    """Return standard normal numbers, float64: the inverse normal distribution function of 52 bits each."""
    from scipy.special import ndtri

    bits = np.frombuffer(draw(8 * math.prod(shape)), dtype="<u8") >> np.uint64(12)
    return torch.from_numpy(ndtri((bits + 0.5) * 2.0**-52)).reshape(shape)


def uniform(count: int, draw: Draw = os.urandom) -> torch.Tensor:
    """Return numbers that are uniform in [0, 1), of 53 bits each, ``[count]``, float64."""
    bits = np.frombuffer(draw(8 * count), dtype="<u8") >> np.uint64(11)
    return torch.from_numpy(bits * 2.0**-53)
