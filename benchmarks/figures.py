"""A figure beside its anchor of the same run: medians, ranges, ratios of pairs, targets; cells of a table."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_HOLDS = {"≤": operator.le, "<": operator.lt, "≥": operator.ge}


@dataclass(frozen=True)
class Options:
    """What every part is told: whether it is only tried, and how often it measures."""

    quick: bool

    @property
    def repeats(self) -> int:
        """How often a figure and its anchor are measured, in turns."""
        return 2 if self.quick else 8

    @property
    def runs(self) -> int:
        """The same of what takes long, as a federation in processes of its own, or a large network."""
        return 1 if self.quick else 5


@dataclass(frozen=True)
class Target:
    """A bound on the median of a figure, or on that of its ratio to the anchor."""

    of: Literal["figure", "ratio"]
    how: Literal["≤", "<", "≥"]
    bound: float

    def holds(self, value: float) -> bool:
        """Whether a median reaches it."""
        return bool(_HOLDS[self.how](value, self.bound))


@dataclass(frozen=True)
class Figure:
    """What a part has measured.

    Attributes:
        samples: in `unit`, one for each repeat; none where it could not be measured.
        anchor: what stands beside it, in the same unit; empty if nothing does.
        beside: the anchor's samples, in the order of `samples`, or one that stands beside each.
        missing: why the figure, or its anchor, could not be measured.
    """

    part: str
    name: str
    unit: str
    samples: tuple[float, ...]
    anchor: str = ""
    beside: tuple[float, ...] = ()
    targets: tuple[Target, ...] = ()
    missing: str = ""

    def __post_init__(self) -> None:
        if self.beside and len(self.beside) not in (1, len(self.samples)):
            raise ValueError(
                f"{self.name}: {len(self.samples)} samples beside {len(self.beside)} of its anchor"
            )

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each sample to the one of the anchor that was taken beside it."""
        beside = self.beside * len(self.samples) if len(self.beside) == 1 else self.beside
        return tuple(a / b for a, b in zip(self.samples, beside, strict=True)) if beside else ()

    @property
    def reached(self) -> bool | None:
        """Whether all targets are reached, which no target of what is missing is; None without a target."""
        of = {"figure": self.samples, "ratio": self.ratios}
        medians = {name: statistics.median(values) for name, values in of.items() if values}
        if not self.targets:
            return None
        return all(target.of in medians and target.holds(medians[target.of]) for target in self.targets)


def number(value: float) -> str:
    """Three digits, and all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:#.3g}"


def spread(values: Sequence[float]) -> str:
    """Median and range; a single value alone."""
    if len(set(values)) < 2:
        return number(values[0])
    return f"{number(statistics.median(values))} ({number(min(values))}-{number(max(values))})"


HEAD = ("part", "figure", "unit", "n", "Suture", "anchor", "its figure", "ratio", "target", "reached")


def cells(figure: Figure) -> list[str]:
    """The row of a figure, below `HEAD`."""
    targets = [
        f"{'ratio ' if target.of == 'ratio' else ''}{target.how} {target.bound:g}"
        for target in figure.targets
    ]
    lost = f"not measured: {figure.missing}" if figure.missing else ""
    return [
        figure.part,
        figure.name,
        figure.unit,
        str(len(figure.samples)),
        spread(figure.samples) if figure.samples else lost,
        figure.anchor,
        spread(figure.beside) if figure.beside else lost if figure.samples else "",
        spread(figure.ratios) if figure.ratios else "",
        "; ".join(targets),
        {True: "yes", False: "no", None: ""}[figure.reached],
    ]
