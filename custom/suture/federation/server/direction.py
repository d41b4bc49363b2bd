"""Where an update points, beside the other updates of its round, in memory that no model makes larger.

Random signs fold the change of all parameters into 2,048 numbers, which keep the angle between two updates:
the cosine is right to about 0.02 (Charikar, Chen, Farach-Colton. Finding Frequent Items in Data Streams.
ICALP 2002). To compare whole updates, each would have to be read from disk once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from suture.core.labels import canonical
from suture.core.seeds import generator_for
from suture.protocol.messages import Labels

_WIDTH = 2048


@lru_cache(maxsize=4096)
def _signs(name: str, count: int) -> Tensor:
    """``[count]``, 1 or -1 each, float64."""
    return torch.randint(0, 2, (count,), generator=generator_for("direction", name)).double() * 2 - 1


@lru_cache(maxsize=8)
def class_signs(labels: Labels) -> Tensor:
    """``[c]``, 1 or -1 for each class, the same at every site that has it."""
    return torch.cat([_signs(canonical(label), 1) for label in labels]) if labels else torch.ones(0).double()


class Direction:
    """The direction of one update, folded as its numbers pass by."""

    def __init__(self) -> None:
        self._folded = torch.zeros(_WIDTH, dtype=torch.float64)

    def add(self, name: str, start: int, block: Tensor) -> None:
        """Fold the numbers of a tensor from `start` on, a multiple of 2,048: ``[n]``."""
        first, rows = start // _WIDTH, block.numel() // _WIDTH
        signs, rest = _signs(name, -(-(start + block.numel()) // _WIDTH)), block[rows * _WIDTH :]
        if rows:
            self._fold(block[: rows * _WIDTH].view(rows, _WIDTH), signs[first : first + rows])
        if len(rest):
            self._folded[: len(rest)].add_(rest, alpha=float(signs[first + rows]))

    def add_rows(self, name: str, signs: Tensor, rows: Tensor) -> None:
        """Fold rows of classes, which every site has in another order: ``[c]`` and ``[c, d]``."""
        for start in range(0, rows.shape[1], _WIDTH):
            self._fold(rows[:, start : start + _WIDTH], signs * _signs(f"{name}/{start}", 1))

    def _fold(self, rows: Tensor, signs: Tensor) -> None:
        self._folded[: rows.shape[1]] += signs.to(rows.dtype) @ rows

    def unit(self) -> Tensor:
        """Return the direction with a length of 1, float32 ``[2048]``; zeros where nothing has changed."""
        largest = float(self._folded.abs().max())
        scaled = self._folded / (largest or 1.0)  # first, as squares of the largest floats overflow
        length = float(torch.linalg.vector_norm(scaled))
        return scaled.div_(length or 1.0).float()


def cosines(units: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return for each site the cosine of its update to the mean of the others' directions; None without one.

    Every direction counts once there, however long the update: else one liar would be the mean of the others.
    """
    total = sum(units.values(), torch.zeros(()))
    found: dict[str, float | None] = {}
    for site, unit in units.items():
        others = total - unit
        length = float(torch.linalg.vector_norm(others)) * float(torch.linalg.vector_norm(unit))
        found[site] = round(float(unit @ others) / length, 3) if len(units) > 1 and length > 1e-6 else None
    return found
