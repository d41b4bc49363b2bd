"""Tables as text in cells, and the footnotes that some of them refer to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from suture.experiments.table import DASH, Figure


@dataclass(frozen=True)
class Table:
    """Text in cells, and the footnotes that some of them refer to."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Notes:
    """The footnotes of a table: one for each reason that a figure, or its p, is undefined."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}

    def marked(self, text: str, reason: str) -> str:
        """The text of a cell with the number of its footnote, where there is a reason."""
        if not reason:
            return text
        return f"{text} [{self._reasons.setdefault(reason, len(self._reasons) + 1)}]"

    def cells(self, figure: Figure) -> tuple[str, str]:
        """A figure and its p; where the figure is undefined, so is p, for the same reason."""
        against = figure.against.why if figure.against and not figure.why else ""
        return self.marked(figure.text, figure.why), self.marked(p_text(figure), against)

    def lines(self) -> tuple[str, ...]:
        """The footnotes."""
        return tuple(f"[{number}] {reason}" for reason, number in self._reasons.items())


def p_text(figure: Figure) -> str:
    """The p value of a figure's comparison."""
    return DASH if figure.against is None else p_value(figure.against.p)


def p_value(p: float | None) -> str:
    """A p value of three digits, without the leading 0; of four where three would say .050 of less."""
    if p is None or math.isnan(p):
        return DASH
    digits = 4 if p < 0.05 <= round(p, 3) else 3
    return "< .001" if p < 0.001 else f"{p:.{digits}f}".removeprefix("0")
