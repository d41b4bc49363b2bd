"""95 % intervals of shares of images, and of their differences.

Each image counts as one of another patient; several images of a patient make an interval too narrow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_Z = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


class Estimate(NamedTuple):
    """A figure with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, n: int) -> Estimate:
    """Return Wilson's interval of a share of `n` images (JASA 22:209, 1927), which may be rounded.

    >>> [round(bound, 4) for bound in wilson(0.5, 10)]
    [0.5, 0.2366, 0.7634]
    """
    if n < 1:
        return Estimate(share, 0.0, 1.0)
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return a - b of two shares by Newcombe's hybrid score method (Stat. Med. 17:873, 1998, method 10).

    >>> a, b = wilson(56 / 70, 70), wilson(48 / 80, 80)  # the example of his Table II (a)
    >>> [round(bound, 4) for bound in difference(a, b)]
    [0.2, 0.0524, 0.3339]
    """
    d = a.value - b.value
    low = d - math.hypot(a.value - a.low, b.high - b.value)
    return Estimate(d, low, d + math.hypot(a.high - a.value, b.value - b.low))
