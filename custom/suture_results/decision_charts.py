"""The curves of a class in the report: ROC, precision-recall and reliability, over all sites and at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from suture.learning.proportions import Estimate, wilson
from suture.protocol.decisions import Diagrams
from suture_results.charts import Chart, Look, Point, Scale, Tick, Trace

_AXIS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIAGONAL = ((0.0, 0.0), (1.0, 1.0))
_ALL = Chart("")
_SMALL = Chart("", width=108, height=108, left=4, right=104, top=4, bottom=104)
"""The frames of a large chart, of the usual size, and of one of a site; both axes run from 0 to 1."""

Points = Sequence[Point]

_Band = Sequence[tuple[float, float, float]]
"""Points on the first axis with the bounds on the second."""


@dataclass(frozen=True)
class SiteCurves:
    """A class at a site.

    Attributes:
        images: validation images with the class and without, as the site has sent them.
        own, pooled: sensitivity and specificity on them at the site's threshold and at that of all sites.
        plots: ROC, precision by recall, and reliability.
    """

    site: str
    images: tuple[int, int]
    area: float
    own: tuple[Estimate, Estimate] | None
    pooled: tuple[Estimate, Estimate] | None
    plots: tuple[Chart, Chart, Chart]


@dataclass(frozen=True)
class ClassCurves:
    """A class at its sites, and the sites that annotate the class and have no curve."""

    sites: Sequence[SiteCurves]
    without: Sequence[str]


def class_charts(found: Diagrams) -> list[Chart]:
    """Return the three charts of a class over all sites."""
    roc, precision = _curves(found)
    chance = ((0.0, found.prevalence), (1.0, found.prevalence))
    roc_band, precision_band = _bands(found)
    return [
        _large(f"Sensitivity by 1 − specificity (ROC), area {area(found):.2f}", [
            _trace("no skill", 7, _DIAGONAL),
            _trace("all sites", 0, roc, band=roc_band),
            _trace("threshold", 2, *_roc_bars(found.chosen, found)),
        ]),
        _large(f"Precision by recall, prevalence {found.prevalence:.0%}", [
            _trace("no skill", 7, chance),
            _trace("all sites", 0, precision, band=precision_band),
            _trace("threshold", 2, *_precision_bars(found.chosen, found)),
        ]),
        _large("Share of positives by calibrated probability", [
            _trace("calibrated", 7, _DIAGONAL),
            _trace("share, 95 % interval", 0, *_reliability(found)),
        ]),
    ]  # fmt: skip


def class_curves(pooled: Diagrams, sites: Mapping[str, Diagrams], owners: Sequence[str]) -> ClassCurves:
    """Return the small charts of a class.

    Args:
        pooled: over all sites.
        sites: of each site whose counts show curves.
        owners: the sites that annotate the class.
    """
    under = _curves(pooled)
    return ClassCurves(
        [_at_site(site, found, under) for site, found in sites.items()],
        [site for site in owners if site not in sites],
    )


def _at_site(site: str, found: Diagrams, under: tuple[Points, Points]) -> SiteCurves:
    images = found.images
    charts = []
    for what, curve, below, bars in zip(
        ("ROC", "precision by recall"), _curves(found), under, (_roc_bars, _precision_bars), strict=True
    ):
        used, chosen = bars(found.own or found.chosen, found), bars(found.chosen, found)
        traces = [
            _trace("", 7, below, frame=_SMALL, look="thin"),
            _trace("", 0, curve, frame=_SMALL),
            _trace("", 2, *used[:-1], *(used[-1:] if found.own else ()), frame=_SMALL, look="thin"),
            _trace("", 2, *chosen[-1:], frame=_SMALL, look="ring"),
        ]
        charts.append(_small(what, traces))
    reliable = [
        _trace("", 7, _DIAGONAL, frame=_SMALL, look="thin"),
        _trace("", 0, *_reliability(found), frame=_SMALL, look="thin"),
    ]
    roc, precision = charts
    small = _small("calibration", reliable)
    rates = [
        None if at is None else (wilson(at[0], images[0]), wilson(at[1], images[1]))
        for at in (found.own, found.chosen)
    ]
    return SiteCurves(site, images, area(found), rates[0], rates[1], (roc, precision, small))


def area(found: Diagrams) -> float:
    """Return the area under the ROC as it is drawn."""
    x, y = np.array([(1 - specificity, sensitivity) for sensitivity, specificity in found.rates[::-1]]).T
    return float(np.trapezoid(y, x))


def _curves(found: Diagrams) -> tuple[Points, Points]:
    """Return the ROC, and precision by recall."""
    return [(1 - spec, sens) for sens, spec in found.rates], precisions(found.rates, found.prevalence)


def precisions(rates: Points, prevalence: float) -> Points:
    """Return recall and precision; where no image is positive there is no precision."""
    found = []
    for sensitivity, specificity in rates:
        hits, alarms = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
        if hits + alarms > 0:
            found.append((sensitivity, hits / (hits + alarms)))
    return found


def _roc_bars(rates: Point | None, found: Diagrams) -> list[Points]:
    """Return an operating point in the ROC with its Wilson intervals: two bars, then the point."""
    if rates is None:
        return []
    (sens, spec), (with_it, without) = rates, found.images
    return _cross(wilson(1 - spec, without), wilson(sens, with_it))


def _precision_bars(rates: Point | None, found: Diagrams) -> list[Points]:
    """Return an operating point by recall and precision, as `_roc_bars`; none where no image is positive."""
    at = precisions([rates] if rates else [], found.prevalence)
    if not rates or not at:
        return []
    return _cross(wilson(at[0][0], found.images[0]), wilson(at[0][1], _called(rates, found.images)))


def _called(rates: Point, images: tuple[int, int]) -> int:
    """Return how many images are called positive."""
    return round(rates[0] * images[0] + (1 - rates[1]) * images[1])


def _cross(x: Estimate, y: Estimate) -> list[Points]:
    return [
        [(x.low, y.value), (x.high, y.value)],
        [(x.value, y.low), (x.value, y.high)],
        [(x.value, y.value)],
    ]


def _bands(found: Diagrams) -> tuple[_Band, _Band]:
    """Return the intervals of the sensitivity, and of the precision: a share of those called positive."""
    roc, precision = _curves(found)
    called = [_called(pair, found.images) for pair in found.rates][: len(precision)]
    sensitivities = [(x, wilson(y, found.images[0])) for x, y in roc]
    shares = [(x, wilson(y, n)) for (x, y), n in zip(precision, called, strict=True)]
    return [(x, e.low, e.high) for x, e in sensitivities], [(x, e.low, e.high) for x, e in shares]


def _reliability(found: Diagrams) -> list[Points]:
    """Return the Wilson interval of each bin (Wilson 1927), and then a dot for each."""
    estimates = [(p, wilson(share, images)) for p, share, images in found.reliability]
    return [*([(p, e.low), (p, e.high)] for p, e in estimates), *([(p, e.value)] for p, e in estimates)]


def _trace(
    name: str, tone: int, *lines: Points, band: _Band = (), frame: Chart = _ALL, look: Look = ""
) -> Trace:
    x, y = _scales(frame)
    outline = [(at, high) for at, _, high in band] + [(at, low) for at, low, _ in reversed(band)]
    runs = tuple(tuple((x(a), y(b)) for a, b in line) for line in lines)
    return Trace(name, tone, runs, band=tuple((x(a), y(b)) for a, b in outline), look=look)


def _scales(frame: Chart) -> tuple[Scale, Scale]:
    return Scale(0.0, 1.0, frame.left, frame.right), Scale(0.0, 1.0, frame.bottom, frame.top)


def _large(title: str, traces: Sequence[Trace]) -> Chart:
    x, y = (tuple(Tick(scale(v), f"{v:g}") for v in _AXIS) for scale in _scales(_ALL))
    return replace(_ALL, title=title, x=x, y=y, traces=tuple(trace for trace in traces if trace.runs))


def _small(title: str, traces: Sequence[Trace]) -> Chart:
    base = Tick(_SMALL.bottom, "")
    return replace(_SMALL, title=title, y=(base,), traces=tuple(trace for trace in traces if trace.runs))
