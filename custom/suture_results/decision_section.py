"""The section of the report on decisions: how each site's test images are decided, and calibrated.

The curves of a class in the report: ROC, precision-recall and reliability, over all sites and at each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from suture.core.errors import ConfigError, unknown
from suture.learning.metrics import Estimate, difference, wilson
from suture.protocol.decisions import (
    Decided,
    DecidedGroup,
    Decision,
    DecisionSettings,
    Diagrams,
    Operating,
    Rule,
)
from suture.protocol.records import DecisionRecord, Metrics, Run
from suture_results.charts import Chart, Look, Point, Scale, Tick, Trace
from suture_results.formatting import percent

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
    return _cross(wilson(at[0][0], found.images[0]), wilson(at[0][1], _count_called(rates, found.images)))


def _count_called(rates: Point, images: tuple[int, int]) -> int:
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
    called = [_count_called(pair, found.images) for pair in found.rates][: len(precision)]
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


_RULES = {
    "sensitivity": "a sensitivity of {sensitivity}",
    "specificity": "a specificity of {specificity}",
    "youden": "the largest sum of sensitivity and specificity",
    "cost": "the lowest cost, if a missed finding costs as much as {cost:g} false alarms",
}

_CALIBRATIONS = {"platt": "Platt scaling", "temperature": "temperature scaling"}


@dataclass(frozen=True)
class Rates:
    """Sensitivity and specificity on some images, with intervals where their numbers are known."""

    sensitivity: Estimate | None
    specificity: Estimate | None


@dataclass(frozen=True)
class ThresholdRates:
    """A threshold with what it does.

    Attributes:
        threshold: a probability of the model.
        at: on the site's test images.
        values: PPV and NPV; None where undefined.
    """

    threshold: float
    at: Rates
    values: tuple[Estimate | None, Estimate | None]


@dataclass(frozen=True)
class Group:
    """The test images with one value of the site's attribute, with and without the class, and their rates."""

    name: str
    positives: int
    negatives: int
    at: Rates


@dataclass(frozen=True)
class Line:
    """A class at a site: its own threshold and that of all sites (None where there is none), and 0.5.

    Attributes:
        prevalence: of PPV and NPV: a stated one, or that of the site's validation images.
        groups: of the attribute that the site names, at its own threshold, or that of all sites.
        gap: of the groups, the largest sensitivity less the smallest, and of specificity.
    """

    site: str
    own: ThresholdRates | None
    pooled: ThresholdRates | None
    half: ThresholdRates
    prevalence: float | None
    ece: tuple[float | None, float | None]
    brier: tuple[float | None, float | None]
    groups: list[Group]
    gap: Rates

    @property
    def best(self) -> ThresholdRates | None:
        """The point by which the site decides."""
        return self.own or self.pooled


@dataclass(frozen=True)
class Section:
    """What the section shows.

    Attributes:
        target: of the rule, in words.
        classes: the lines of each class.
        unvalidated: classes without an operating point.
        charts: the curves of each class over all sites.
        sites: those at each site.
        stated: prevalences that a reader has stated, by class.
        aim: the rate that the rule aims at, and its value; None where it aims at no rate.
    """

    target: str
    calibration: str
    classes: dict[str, list[Line]]
    unvalidated: Sequence[str]
    charts: dict[str, list[Chart]]
    sites: dict[str, ClassCurves]
    stated: Mapping[str, float]
    aim: tuple[str, float] | None

    def is_missed(self, point: ThresholdRates) -> bool:
        """Whether the test images miss what the rule aims at, in whole per cent."""
        rate: Estimate | None = getattr(point.at, self.aim[0]) if self.aim else None
        return bool(self.aim and rate and round(100 * rate.value) < round(100 * self.aim[1]))

    @property
    def missed(self) -> list[bool]:
        """Whether each threshold of a site for a class is missed; empty where the rule aims at no rate."""
        own = (line.own for lines in self.classes.values() for line in lines)
        return [
            self.is_missed(point) for point in own if point and self.aim and getattr(point.at, self.aim[0])
        ]

    @property
    def without_curves(self) -> list[str]:
        """The classes whose counts show no curve, in a run that draws any."""
        return [name for name in self.classes if name not in self.charts] if self.charts else []

    @property
    def groups(self) -> dict[str, list[Line]]:
        """The lines of each class that have groups."""
        found = {name: [line for line in lines if line.groups] for name, lines in self.classes.items()}
        return {name: lines for name, lines in found.items() if lines}


def decision_section(
    metrics: Metrics | None, run: Run, stated: Mapping[str, float] | None = None
) -> Section | None:
    """Return the section; None where the job decides nothing.

    Args:
        run: of which the metrics are.
        stated: prevalences of classes, in place of those of the validation images.

    Raises:
        ConfigError: a prevalence is none, or of a class that is not decided.
    """
    stated = stated or {}
    _check(stated, metrics.decisions.pooled if metrics else ())
    found = metrics.decisions if metrics else None
    if found is None or found.settings is None:
        return None
    labels, rule = run.labels, found.settings.rule
    lines = {
        name: [
            _line(found, rule, site, name, stated.get(name))
            for site, classes in found.measured.items()
            if name in classes
        ]
        for name in labels
    }
    return Section(
        target_of(found.settings),
        _CALIBRATIONS[found.settings.calibration],
        {name: at for name, at in lines.items() if at},
        [name for name in labels if name not in found.pooled],
        {name: class_charts(found.diagrams[name]) for name in labels if name in found.diagrams},
        _at_sites(found, run),
        stated,
        (rule, getattr(found.settings, rule)) if rule in ("sensitivity", "specificity") else None,
    )


def _at_sites(found: DecisionRecord, run: Run) -> dict[str, ClassCurves]:
    """Return the curves of each class at its sites."""
    return {
        name: class_curves(
            found.diagrams[name],
            {site: own[name] for site, own in found.site_diagrams.items() if name in own},
            run.owners(name),
        )
        for name in run.labels
        if name in found.diagrams
    }


def _check(stated: Mapping[str, float], decided: Collection[str]) -> None:
    for name, share in stated.items():
        if not decided:
            raise ConfigError("the run has no thresholds, so it has no PPV and NPV; leave --prevalence out")
        if name not in decided:
            raise unknown("decided class", name, decided)
        if not 0 < share < 1:
            raise ConfigError(f"the prevalence {share:g} of {name} is not between 0 and 1")


def target_of(settings: DecisionSettings) -> str:
    """Return what the rule of a job aims at, in words."""
    rates = {name: percent(getattr(settings, name)) for name in ("sensitivity", "specificity")}
    return _RULES[settings.rule].format(**rates, cost=settings.cost)


def _line(found: DecisionRecord, rule: Rule, site: str, name: str, stated: float | None) -> Line:
    measured, counts = found.measured[site][name], found.counts.get(site, {}).get(name)
    decision = Decision(found.sites.get(site, {}).get(name), found.pooled.get(name))
    fitted_to = decision.fitted.prevalence if decision.fitted else None
    prevalence = fitted_to if stated is None else stated

    def point(fitted: Operating | None, at: Decided | None) -> ThresholdRates | None:
        threshold = fitted.thresholds.get(rule) if fitted else None
        return None if threshold is None or at is None else _point(threshold, _rates(at, counts), prevalence)

    half = _point(0.5, _rates(measured.half, counts), prevalence)
    groups = [
        Group(value, one.positives, one.negatives, _rates(one, (one.positives, one.negatives)))
        for value, one in sorted(measured.groups.items())
    ]
    return Line(
        site,
        point(decision.own, measured.own),
        point(decision.pooled, measured.pooled),
        half,
        prevalence,
        measured.ece,
        measured.brier,
        groups,
        Rates(_gap(g.at.sensitivity for g in groups), _gap(g.at.specificity for g in groups)),
    )


def _rates(at: Decided | DecidedGroup, counts: tuple[int, int] | None) -> Rates:
    numbers = counts or (0, 0)  # of none, an interval is all of 0 to 1
    both = zip((at.sensitivity, at.specificity), numbers, strict=True)
    return Rates(*(None if rate is None else wilson(rate, n) for rate, n in both))


def _gap(rates: Iterable[Estimate | None]) -> Estimate | None:
    """Return how far the largest rate is above the smallest; None with fewer than two."""
    known = sorted((rate for rate in rates if rate), key=lambda rate: rate.value)
    return difference(known[-1], known[0]) if len(known) > 1 else None


def _point(threshold: float, at: Rates, prevalence: float | None) -> ThresholdRates:
    if at.sensitivity is None or at.specificity is None or prevalence is None:
        return ThresholdRates(threshold, at, (None, None))
    ppv, npv = predictive(at.sensitivity, at.specificity, prevalence)
    return ThresholdRates(threshold, at, (_estimate(ppv), _estimate(npv)))


def _estimate(found: Estimate) -> Estimate | None:
    return None if any(map(math.isnan, found)) else found


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """Return PPV and NPV at a prevalence, by Bayes' rule; NaN where no image would be decided so."""
    hits, alarms = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
    misses, clear = (1 - sensitivity) * prevalence, specificity * (1 - prevalence)
    return _share(hits, alarms), _share(clear, misses)


def predictive(sensitivity: Estimate, specificity: Estimate, prevalence: float) -> tuple[Estimate, Estimate]:
    """Return PPV and NPV at a prevalence, NaN where no image would be decided so.

    Both grow with sensitivity and with specificity, so the bounds are those of the lower and of the upper
    bounds of the two, which covers at least as often.
    """
    at = [predictive_values(se, sp, prevalence) for se, sp in zip(sensitivity, specificity, strict=True)]
    ppv, npv = zip(*at, strict=True)
    return Estimate(*ppv), Estimate(*npv)


def _share(part: float, other: float) -> float:
    return part / (part + other) if part + other > 0 else math.nan
