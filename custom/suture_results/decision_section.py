"""The section of the report on decisions: how each site's test images are decided, and calibrated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from suture.core.errors import ConfigError, unknown
from suture.learning.operating_points import predictive
from suture.learning.proportions import Estimate, difference, wilson
from suture.protocol.decisions import Decided, DecidedGroup, Decision, DecisionSettings, Operating, Rule
from suture.protocol.records import DecisionRecord, Metrics, Run
from suture_results.charts import Chart
from suture_results.decision_charts import ClassCurves, class_charts, class_curves
from suture_results.formatting import percent

_RULES = {
    "sensitivity": "a sensitivity of {sensitivity}",
    "specificity": "a specificity of {specificity}",
    "youden": "the largest sum of sensitivity and specificity",
    "cost": "the lowest cost, if a missed finding costs as much as {cost:g} false alarms",
}

_CALIBRATIONS = {
    "platt": "Platt scaling",
    "temperature": "temperature scaling",
    "isotonic": "isotonic regression",
}


@dataclass(frozen=True)
class Rates:
    """Sensitivity and specificity on some images, with intervals where their numbers are known."""

    sensitivity: Estimate | None
    specificity: Estimate | None


@dataclass(frozen=True)
class Point:
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
    own: Point | None
    pooled: Point | None
    half: Point
    prevalence: float | None
    ece: tuple[float | None, float | None]
    brier: tuple[float | None, float | None]
    sets: float | None
    groups: list[Group]
    gap: Rates

    @property
    def best(self) -> Point | None:
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
    coverage: float
    calibration: str
    classes: dict[str, list[Line]]
    unvalidated: Sequence[str]
    charts: dict[str, list[Chart]]
    sites: dict[str, ClassCurves]
    stated: Mapping[str, float]
    aim: tuple[str, float] | None

    def missed(self, point: Point) -> bool:
        """Whether the test images miss what the rule aims at, in whole per cent."""
        rate: Estimate | None = getattr(point.at, self.aim[0]) if self.aim else None
        return bool(self.aim and rate and round(100 * rate.value) < round(100 * self.aim[1]))

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
        found.settings.coverage,
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

    def point(fitted: Operating | None, at: Decided | None) -> Point | None:
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
        measured.sets,
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


def _point(threshold: float, at: Rates, prevalence: float | None) -> Point:
    if at.sensitivity is None or at.specificity is None or prevalence is None:
        return Point(threshold, at, (None, None))
    ppv, npv = predictive(at.sensitivity, at.specificity, prevalence)
    return Point(threshold, at, (_defined(ppv), _defined(npv)))


def _defined(found: Estimate) -> Estimate | None:
    return None if any(map(math.isnan, found)) else found
