"""Values of any type as gray levels, in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

_Values = NDArray[np.generic]

_Gray = NDArray[np.uint8]

_STRIP = 2**20
"""Values that are worked on at a time."""


def scale_gray(values: _Values, low: float, high: float) -> _Gray:
    """Map the range from `low` to `high` onto 0..255, rounded; what lies outside is cut off."""
    out = np.empty(values.shape, dtype=np.uint8)
    for rows in _strips(values):
        levels = (values[rows].astype(np.float64) - low) * (255.0 / (high - low))
        out[rows] = np.clip(np.rint(levels), 0, 255)
    return out


def by_value(pixels: _Values, levels: Callable[[_Values], _Gray]) -> _Gray:
    """Return the gray levels of pixels; integers of up to 16 bits are computed once per value, not per pixel.

    Args:
        levels: from the distinct values, of the type of `pixels`, to their gray levels.
    """
    if pixels.dtype.itemsize > 2:
        return levels(pixels)
    codes = pixels.view(np.dtype(f"{pixels.dtype.byteorder}u{pixels.dtype.itemsize}"))
    every = np.arange(2 ** (8 * codes.itemsize), dtype=codes.dtype)
    here = np.zeros(len(every), dtype=np.bool_)
    for rows in _strips(codes):
        here[codes[rows]] = True
    table = np.zeros(len(every), dtype=np.uint8)
    table[here] = levels(every[here].view(pixels.dtype))
    out = np.empty(pixels.shape, dtype=np.uint8)
    for rows in _strips(codes):
        out[rows] = table[codes[rows]]
    return out


def _strips(values: _Values) -> Iterator[slice]:
    """Slices of the first axis, of about `_STRIP` values each."""
    step = max(1, _STRIP * len(values) // max(1, values.size))
    return (slice(start, start + step) for start in range(0, len(values), step))
