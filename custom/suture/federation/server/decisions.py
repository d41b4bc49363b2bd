"""What the server fits to the sites' counts of scores: the operating points of each class."""

from __future__ import annotations

from collections.abc import Mapping

from suture.federation.server.registry import SiteRegistry
from suture.learning.decisions import operating
from suture.learning.diagrams import diagrams
from suture.learning.score_counts import Counts, Curves
from suture.protocol.decisions import Decision, Decisions, DecisionSettings, Diagrams, Operating
from suture.protocol.messages import Scores

Pair = tuple[Counts, Counts]
"""Histograms of the scores of positives and of negatives."""


def fit_decisions(
    registry: SiteRegistry, scores: Mapping[str, Scores], settings: DecisionSettings
) -> Decisions:
    """Fit operating points to the counts of the sites that answered, of each class together and by site."""
    counts = _by_site(registry, scores)
    return Decisions(
        settings,
        _fitted(_pooled(counts), settings),
        {
            site: _fitted({name: [pair] for name, pair in found.items()}, settings)
            for site, found in counts.items()
        },
    )


def diagrams_of(
    registry: SiteRegistry, scores: Mapping[str, Scores], decisions: Decisions
) -> dict[str, Diagrams]:
    """Return the curves of each class over all sites, from the same counts."""
    return _drawn(_pooled(_by_site(registry, scores)), decisions, None)


def site_diagrams_of(
    registry: SiteRegistry, scores: Mapping[str, Scores], decisions: Decisions
) -> dict[str, dict[str, Diagrams]]:
    """Return the curves of each class at each site, from the same counts."""
    return {
        site: _drawn({name: [pair] for name, pair in found.items()}, decisions, site)
        for site, found in _by_site(registry, scores).items()
    }


def decisions_of(decisions: Decisions, registry: SiteRegistry, site: str) -> dict[str, Decision]:
    """Return by what a site decides the classes that it annotates, in its own names."""
    member = registry.members[site]
    found = {own: decisions.of(site, name) for own, name in zip(member.own, member.names, strict=True)}
    return {own: one for own, one in found.items() if one.own or one.pooled}


def _by_site(registry: SiteRegistry, scores: Mapping[str, Scores]) -> dict[str, dict[str, Pair]]:
    return {site: registry.named(site, _by_class(one)) for site, one in sorted(scores.items())}


def _pooled(counts: Mapping[str, Mapping[str, Pair]]) -> dict[str, list[Pair]]:
    names = sorted({name for found in counts.values() for name in found})
    return {name: [found[name] for found in counts.values() if name in found] for name in names}


def _by_class(scores: Scores) -> dict[str, Pair]:
    if not scores.labels:
        return {}
    positives, negatives = (scores.class_tensors[kind].numpy() for kind in ("positives", "negatives"))
    return dict(zip(scores.labels, zip(positives, negatives, strict=True), strict=True))


def _drawn(counts: Mapping[str, list[Pair]], decisions: Decisions, site: str | None) -> dict[str, Diagrams]:
    """Return the curves of the classes whose counts show any; `site` is None for all sites together."""
    found = {
        name: diagrams(Curves.of(pairs), decisions.of(site, name), decisions.settings.rule)
        for name, pairs in counts.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def _fitted(counts: Mapping[str, list[Pair]], settings: DecisionSettings) -> dict[str, Operating]:
    found = {name: operating(Curves.of(pairs), settings) for name, pairs in counts.items()}
    return {name: one for name, one in found.items() if one is not None}
