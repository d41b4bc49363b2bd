"""Counts of scores: what a site releases of them, and what a server reads out of them.

A score is the log-odds of a probability. A site counts its validation images in the cells between the edges
of `GRID`. From below, neighbouring cells are joined until each holds `round_counts` images, of `min_count`
patients, so that none shows the score of an image; a class with fewer patients on either side is withheld. At
a site with `min_count` 0 and exact counts every cell is kept. What is rounded is the number of images up to
the end of a cell: so no cell that holds images shows none, and all add up to the rounded number of the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from suture.learning.metrics import Floats
from suture.protocol.decisions import CELLS, GRID, JOINED
from suture.protocol.disclosure import near

Counts = NDArray[np.int32]


def histogram(
    scores: Floats, patients: NDArray[np.intp], min_count: int, round_counts: int = 1
) -> Counts | None:
    """Return how many images lie in each cell, ``[CELLS]``, or `JOINED`; None for too few patients, or none.

    Args:
        scores: log-odds ``[n]``.
        patients: number of the patient of each image, ``[n]``.
        round_counts: counts are rounded to multiples of it; see `PrivacyConfig`.
    """
    cells = np.searchsorted(GRID, scores, side="right")  # cell k ends at edge k
    exact = not min_count and round_counts == 1
    ends = list(range(CELLS)) if exact else _ends(cells, patients, min_count, round_counts)
    if not ends or not len(scores):
        return None
    found = np.full(CELLS, JOINED, dtype=np.int32)
    counts = np.bincount(np.searchsorted(ends, cells), minlength=len(ends))
    found[ends] = np.diff(near(np.cumsum(counts), round_counts), prepend=0)
    return found


def _ends(cells: NDArray[np.intp], patients: NDArray[np.intp], least: int, images: int) -> list[int]:
    """Return the last cells of the runs that hold so many images, of at least so many patients, if any."""
    numbers = np.unique(patients, return_inverse=True)[1]
    highest = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.intp)
    np.maximum.at(highest, numbers, cells)
    if len(highest) < least:
        return []
    below = np.searchsorted(np.sort(cells), np.arange(len(GRID)), side="right")  # up to each cell's end
    ends: list[int] = []
    inside: set[int] = set()
    before = 0
    for cell, n in enumerate(below.tolist()):
        inside.update(numbers[cells == cell].tolist())
        enough = len(inside) >= least and int((highest > cell).sum()) >= least
        if enough and min(n - before, len(cells) - n) >= images:
            ends.append(cell)
            inside.clear()
            before = n
    return [*ends, CELLS - 1]


@dataclass(frozen=True)
class Curve:
    """How many images score below each edge of `GRID`, as far as counts show it.

    Attributes:
        below: ``[edges]``, increasing. Within a cell images are taken to lie evenly.
        total: number of images.
        known: the lowest and the highest log-odds between which this is more than a guess.
    """

    below: Floats
    total: float
    known: tuple[float, float]

    @classmethod
    def of(cls, counts: Sequence[Counts]) -> Curve:
        """Return the sum over sites, of one or more."""
        parts = [_read(row) for row in counts]
        return cls(
            np.sum([part.below for part in parts], axis=0),
            sum(part.total for part in parts),
            (min(part.known[0] for part in parts), max(part.known[1] for part in parts)),
        )

    def quantile(self, share: float) -> float | None:
        """Return the lowest log-odds below which that share of the images lies; None if it is not known."""
        # A slope on flat parts, where no image lies, because interpolation needs one.
        rising = self.below + np.arange(len(self.below)) * (1e-9 * max(self.total, 1.0))
        found = float(np.interp(share * self.total, rising, GRID))
        return found if self.known[0] <= found <= self.known[1] else None


def _read(counts: Counts) -> Curve:
    """Read a histogram. The outermost cells have no outer edge: they are taken to be as wide as the next."""
    ends = np.flatnonzero(counts != JOINED)
    below, at = np.cumsum(counts[ends], dtype=np.float64), GRID[ends[:-1]]
    total = float(below[-1])
    if not len(at):  # a single cell: nothing is known of where its images lie
        even = np.interp(GRID, GRID[[0, -1]], [0.0, total])
        return Curve(even, total, (np.inf, -np.inf))
    step = GRID[1] - GRID[0]
    first, last = (at[1] - at[0], at[-1] - at[-2]) if len(at) > 1 else (step, step)
    outer = [at[0] - first, *at, at[-1] + last]
    even = np.interp(GRID, outer, [0.0, *below])
    return Curve(even, total, (float(at[0]), float(at[-1])))


@dataclass(frozen=True)
class Curves:
    """The scores of the images with a class, and of those without it."""

    positives: Curve
    negatives: Curve

    @classmethod
    def of(cls, counts: Sequence[tuple[Counts, Counts]]) -> Curves:
        """Return the sum over sites of histograms of positives and negatives."""
        positives, negatives = zip(*counts, strict=True)
        return cls(Curve.of(positives), Curve.of(negatives))

    @property
    def defined(self) -> bool:
        """Whether there are both positives and negatives."""
        return min(self.positives.total, self.negatives.total) > 0

    @property
    def shown(self) -> bool:
        """Whether the counts of both kinds have an edge between cells, as those of few images have not."""
        return all(curve.known[0] <= curve.known[1] for curve in (self.positives, self.negatives))

    @property
    def prevalence(self) -> float:
        """Share of the positives."""
        return self.positives.total / (self.positives.total + self.negatives.total)

    def sensitivity(self) -> Floats:
        """Return the share of the positives at and above each edge."""
        return 1 - self.positives.below / self.positives.total

    def specificity(self) -> Floats:
        """Return the share of the negatives below each edge."""
        return self.negatives.below / self.negatives.total
