"""The curves of a class in the report: ROC, precision-recall and reliability, as positions in an SVG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from suture.learning.proportions import wilson
from suture.protocol.decisions import Diagrams
from suture.reports.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Scale, Tick, Trace

_X = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT)
_Y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
_AXIS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIAGONAL = ((0.0, 0.0), (1.0, 1.0))

Points = Sequence[tuple[float, float]]


def class_charts(found: Diagrams) -> list[Chart]:
    """Return the three charts of a class."""
    chosen = [found.chosen] if found.chosen else []
    x, y = np.array([(1 - specificity, sensitivity) for sensitivity, specificity in found.rates[::-1]]).T
    chance = ((0.0, found.prevalence), (1.0, found.prevalence))
    return [
        _chart(
            f"Sensitivity by 1 − specificity (ROC), area {np.trapezoid(y, x):.2f}",
            [(1 - spec, sens) for sens, spec in found.rates],
            [(1 - spec, sens) for sens, spec in chosen],
            _DIAGONAL,
        ),
        _chart(
            f"Precision by recall, prevalence {found.prevalence:.0%}",
            _precisions(found.rates, found.prevalence),
            _precisions(chosen, found.prevalence),
            chance,
        ),
        _reliability(found),
    ]


def _precisions(rates: Points, prevalence: float) -> Points:
    """Return recall and precision; where no image is positive there is no precision."""
    found = []
    for sensitivity, specificity in rates:
        hits, alarms = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
        if hits + alarms > 0:
            found.append((sensitivity, hits / (hits + alarms)))
    return found


def _chart(title: str, curve: Points, chosen: Points, chance: Points) -> Chart:
    """Return a curve, a dot at the threshold where there is one, and the curve of no skill."""
    traces = [Trace("no skill", 7, (_placed(chance),)), Trace("all sites", 0, (_placed(curve),))]
    if chosen:
        traces.append(Trace("threshold", 3, (_placed(chosen),)))
    return _square(title, traces)


def _reliability(found: Diagrams) -> Chart:
    """Return a dot for each bin with its Wilson interval (Wilson 1927), beside the diagonal."""
    dots, bars = [], []
    for p, share, images in found.reliability:
        _, low, high = wilson(share, images)
        dots.append(_placed([(p, share)]))
        bars.append(_placed([(p, low), (p, high)]))
    traces = [
        Trace("calibrated", 7, (_placed(_DIAGONAL),)),
        Trace("share, 95 % interval", 0, (*bars, *dots)),
    ]
    return _square("Share of positives by calibrated probability", traces)


def _placed(points: Points) -> tuple[tuple[float, float], ...]:
    return tuple((_X(x), _Y(y)) for x, y in points)


def _square(title: str, traces: Sequence[Trace]) -> Chart:
    x, y = (tuple(Tick(scale(v), f"{v:g}") for v in _AXIS) for scale in (_X, _Y))
    return Chart(title, x, y, tuple(traces))
