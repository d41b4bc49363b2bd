"""The section of the report on decisions: how each site's test images are decided, and calibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from suture.learning.operating_points import predictive_values
from suture.protocol.decisions import Decided, Decision, DecisionSettings, Operating, Rule
from suture.protocol.records import DecisionRecord, Metrics
from suture.reports.charts import Chart
from suture.reports.decision_charts import class_charts

_RULES = {
    "sensitivity": "a sensitivity of {sensitivity:.0%}",
    "specificity": "a specificity of {specificity:.0%}",
    "youden": "the largest sum of sensitivity and specificity",
    "cost": "the least cost, where a missed finding costs {cost:g} false alarms",
}


@dataclass(frozen=True)
class Point:
    """A threshold with what it does.

    Attributes:
        threshold: a probability of the model.
        at: sensitivity and specificity on the site's test images.
        values: PPV and NPV at the prevalence of the site's validation images; None where undefined.
    """

    threshold: float
    at: Decided
    values: tuple[float | None, float | None]


@dataclass(frozen=True)
class Line:
    """A class at a site: its own threshold and that of all sites (None where there is none), and 0.5."""

    site: str
    own: Point | None
    pooled: Point | None
    half: Point
    prevalence: float | None
    ece: tuple[float | None, float | None]
    brier: tuple[float | None, float | None]
    sets: float | None


@dataclass(frozen=True)
class Section:
    """What the section shows.

    Attributes:
        target: of the rule, in words.
        classes: the lines of each class.
        unvalidated: classes without an operating point.
        charts: the curves of each class; none of a run of an earlier version.
    """

    target: str
    coverage: float
    calibration: str
    classes: dict[str, list[Line]]
    unvalidated: Sequence[str]
    charts: dict[str, list[Chart]]


def decision_section(metrics: Metrics | None, labels: Sequence[str]) -> Section | None:
    """Return the section; None where the job decides nothing.

    Args:
        labels: the classes of the model, in their order.
    """
    found = metrics.decisions if metrics else None
    if found is None or found.settings is None:
        return None
    lines = {
        name: [
            _line(found, found.settings.rule, site, name)
            for site, classes in found.measured.items()
            if name in classes
        ]
        for name in labels
    }
    return Section(
        target_of(found.settings),
        found.settings.coverage,
        found.settings.calibration,
        {name: at for name, at in lines.items() if at},
        [name for name in labels if name not in found.pooled],
        {name: class_charts(found.diagrams[name]) for name in labels if name in found.diagrams},
    )


def target_of(settings: DecisionSettings) -> str:
    """Return what the rule of a job aims at, in words."""
    values = {name: getattr(settings, name) for name in ("sensitivity", "specificity", "cost")}
    return _RULES[settings.rule].format(**values)


def _line(found: DecisionRecord, rule: Rule, site: str, name: str) -> Line:
    measured = found.measured[site][name]
    decision = Decision(found.sites.get(site, {}).get(name), found.pooled.get(name))
    prevalence = decision.fitted.prevalence if decision.fitted else None

    def point(fitted: Operating | None, at: Decided | None) -> Point | None:
        threshold = fitted.thresholds.get(rule) if fitted else None
        return _point(threshold, at, prevalence) if threshold is not None and at else None

    return Line(
        site,
        point(decision.own, measured.own),
        point(decision.pooled, measured.pooled),
        _point(0.5, measured.half, prevalence),
        prevalence,
        measured.ece,
        measured.brier,
        measured.sets,
    )


def _point(threshold: float, at: Decided, prevalence: float | None) -> Point:
    if at.sensitivity is None or at.specificity is None or prevalence is None:
        return Point(threshold, at, (None, None))
    ppv, npv = predictive_values(at.sensitivity, at.specificity, prevalence)
    return Point(threshold, at, (None if math.isnan(ppv) else ppv, None if math.isnan(npv) else npv))
