"""What the server fits to the sites' counts of scores: the operating points of each class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from suture.federation.server.registry import SiteRegistry
from suture.learning.decisions import operating
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Counts, Curves
from suture.protocol.decisions import Decision, Decisions, DecisionSettings, Diagrams, Operating
from suture.protocol.messages import Scores


@dataclass(frozen=True)
class FittedDecisions:
    """What was fitted to the counts of scores of the sites that answered.

    Attributes:
        decisions: the operating points of each class, of all sites together and of each site.
        diagrams, site_diagrams: the curves of each class from the same counts, likewise.
    """

    decisions: Decisions
    diagrams: Mapping[str, Diagrams]
    site_diagrams: Mapping[str, Mapping[str, Diagrams]]


def fit_decisions(
    registry: SiteRegistry, scores: Mapping[str, Scores], settings: DecisionSettings
) -> FittedDecisions:
    """Fit operating points, of each class together and by site."""
    counts = {site: registry.rename_keys(site, _by_class(one)) for site, one in sorted(scores.items())}
    names = sorted({name for found in counts.values() for name in found})
    pooled = {name: Curves.of([of[name] for of in counts.values() if name in of]) for name in names}
    sites = {s: {name: Curves.of([pair]) for name, pair in of.items()} for s, of in counts.items()}
    points = {site: _fit(curves, settings) for site, curves in sites.items()}
    decisions = Decisions(settings, _fit(pooled, settings), points)
    drawn = {site: _draw(curves, decisions, site) for site, curves in sites.items()}
    return FittedDecisions(decisions, _draw(pooled, decisions, None), drawn)


def decisions_of(decisions: Decisions, registry: SiteRegistry, site: str) -> dict[str, Decision]:
    """Return by what a site decides the classes that it annotates, in its own names."""
    member = registry.members[site]
    found = {own: decisions.of(site, name) for own, name in zip(member.own, member.names, strict=True)}
    return {own: one for own, one in found.items() if one.own or one.pooled}


def _by_class(scores: Scores) -> dict[str, tuple[Counts, Counts]]:
    """Return the histograms of the scores of positives and of negatives."""
    if not scores.labels:
        return {}
    positives, negatives = (scores.class_tensors[kind].numpy() for kind in ("positives", "negatives"))
    return dict(zip(scores.labels, zip(positives, negatives, strict=True), strict=True))


def _draw(curves: Mapping[str, Curves], decisions: Decisions, site: str | None) -> dict[str, Diagrams]:
    """Return the curves of the classes whose counts show any; `site` is None for all sites together."""
    found = {
        name: diagrams(one, decisions.of(site, name), decisions.settings.rule) for name, one in curves.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def _fit(curves: Mapping[str, Curves], settings: DecisionSettings) -> dict[str, Operating]:
    found = {name: operating(one, settings) for name, one in curves.items()}
    return {name: one for name, one in found.items() if one is not None}
