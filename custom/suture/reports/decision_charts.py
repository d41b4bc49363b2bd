"""The curves of a class in the report: ROC, precision-recall and reliability, as positions in an SVG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from suture.learning.proportions import Estimate, wilson
from suture.protocol.decisions import Diagrams
from suture.reports.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Scale, Tick, Trace

_X = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT)
_Y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
_AXIS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIAGONAL = ((0.0, 0.0), (1.0, 1.0))

Points = Sequence[tuple[float, float]]


Band = Sequence[tuple[float, float, float]]
"""Points on the first axis with the bounds on the second."""


def class_charts(found: Diagrams) -> list[Chart]:
    """Return the three charts of a class over all sites."""
    chance = ((0.0, found.prevalence), (1.0, found.prevalence))
    return [
        _chart(
            f"Sensitivity by 1 − specificity (ROC), area {area(found):.2f}",
            [(1 - spec, sens) for sens, spec in found.rates],
            _roc_band(found),
            roc_bars(found.chosen, found),
            _DIAGONAL,
        ),
        _chart(
            f"Precision by recall, prevalence {found.prevalence:.0%}",
            precisions(found.rates, found.prevalence),
            _precision_band(found),
            precision_bars(found.chosen, found),
            chance,
        ),
        _reliability(found),
    ]


def area(found: Diagrams) -> float:
    """Return the area under the ROC as it is drawn."""
    x, y = np.array([(1 - specificity, sensitivity) for sensitivity, specificity in found.rates[::-1]]).T
    return float(np.trapezoid(y, x))


def precisions(rates: Points, prevalence: float) -> Points:
    """Return recall and precision; where no image is positive there is no precision."""
    found = []
    for sensitivity, specificity in rates:
        hits, alarms = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
        if hits + alarms > 0:
            found.append((sensitivity, hits / (hits + alarms)))
    return found


def roc_bars(rates: tuple[float, float] | None, found: Diagrams) -> list[Points]:
    """Return an operating point in the ROC with its Wilson intervals: two bars, then the point."""
    if rates is None:
        return []
    (sens, spec), (with_it, without) = rates, found.images or (0, 0)
    x, y = wilson(1 - spec, without), wilson(sens, with_it)
    return _cross(x, y) if found.images else [[(1 - spec, sens)]]


def precision_bars(rates: tuple[float, float] | None, found: Diagrams) -> list[Points]:
    """Return an operating point by recall and precision, as `roc_bars`; none where no image is positive."""
    at = precisions([rates] if rates else [], found.prevalence)
    if not rates or not at or not found.images:
        return [at] if at else []
    return _cross(wilson(at[0][0], found.images[0]), wilson(at[0][1], _called(rates, found.images)))


def _called(rates: tuple[float, float], images: tuple[int, int]) -> int:
    """Return how many images are called positive."""
    return round(rates[0] * images[0] + (1 - rates[1]) * images[1])


def _cross(x: Estimate, y: Estimate) -> list[Points]:
    return [
        [(x.low, y.value), (x.high, y.value)],
        [(x.value, y.low), (x.value, y.high)],
        [(x.value, y.value)],
    ]


def _roc_band(found: Diagrams) -> Band:
    """Return the interval of the sensitivity at each threshold."""
    if not found.images:
        return []
    bounds = [(1 - spec, wilson(sens, found.images[0])) for sens, spec in found.rates]
    return [(x, y.low, y.high) for x, y in bounds]


def _precision_band(found: Diagrams) -> Band:
    """Return the interval of the precision at each threshold, a share of the images called positive."""
    if not found.images:
        return []
    called = [_called(pair, found.images) for pair in found.rates]
    curve = precisions(found.rates, found.prevalence)
    bounds = [(x, wilson(y, n)) for (x, y), n in zip(curve, called[: len(curve)], strict=True)]
    return [(x, y.low, y.high) for x, y in bounds]


def _chart(title: str, curve: Points, band: Band, chosen: Sequence[Points], chance: Points) -> Chart:
    """Return a curve with its band, the threshold where there is one, and the curve of no skill."""
    outline = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
    traces = [
        Trace("no skill", 7, (_placed(chance),)),
        Trace("all sites", 0, (_placed(curve),), band=_placed(outline)),
    ]
    if chosen:
        traces.append(Trace("threshold", 2, tuple(map(_placed, chosen))))
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
