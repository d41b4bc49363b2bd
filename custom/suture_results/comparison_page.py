"""A comparison as a page, with its verdict first: of two models by class, or of methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suture.core.escaping import number_of
from suture.core.files import atomic_write
from suture_results.charts import Scale, Tick
from suture_results.formatting import p_value
from suture_results.report import templates
from suture_results.sentences import listed


@dataclass(frozen=True)
class Difference:
    """A line of the page: a class, or a method.

    Attributes:
        value, low, high: the difference and its 95 % interval; NaN where undefined.
        p: after Holm's correction; NaN where nothing was tested.
        values: what is compared, as text, in the order of the page's heads.
    """

    name: str
    value: float
    low: float
    high: float
    p: float
    values: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The difference with its sign."""
        return "—" if math.isnan(self.value) else f"{self.value:+.3f}"

    @property
    def bounds(self) -> str:
        """The interval with its signs."""
        return "—" if math.isnan(self.low) else f"{self.low:+.3f} to {self.high:+.3f}"

    @property
    def p_value(self) -> str:
        """The p in three digits."""
        return p_value(self.p)


def verdict(what: str, lines: Sequence[Difference]) -> str:
    """Return what the tests have found, in a sentence that begins with what was compared."""
    tested = [line for line in lines if not math.isnan(line.p)]
    if not tested:
        return f"{what}: nothing could be tested."
    differ = {
        "higher": [line.name for line in tested if line.p < 0.05 and line.value > 0],
        "lower": [line.name for line in tested if line.p < 0.05 and line.value < 0],
    }
    found = [f"{how} for {listed(names)}" for how, names in differ.items() if names]
    if left := len(tested) - sum(map(len, differ.values())):
        found.append(f"no significant difference in {number_of(left, 'other test' if found else 'test')}")
    return f"{what}: {', '.join(found)}."


def write_comparison(path: Path, lines: Sequence[Difference], **content: Any) -> Path:
    """Write the page and return its path.

    Args:
        content: what else comparison.html shows.

    Raises:
        DiskError: it cannot be written.
    """
    bounds = [abs(v) for line in lines for v in (line.value, line.low, line.high) if not math.isnan(v)]
    most = math.ceil(20 * max([0.05, *bounds])) / 20
    scale = Scale(-most, most, 3.0, 97.0)
    axis = scale, [Tick(scale(at), f"{at:+.2f}" if at else "0") for at in (-most, 0.0, most)]
    content = {"mean": "", "sites": {}, "missing": ()} | content
    page = templates().get_template("comparison.html").render(lines=lines, axis=axis, **content)
    atomic_write(path, page.encode())
    return path
