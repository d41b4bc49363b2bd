"""What the server fits to the sites' counts of scores: the operating points of each class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from suture.federation.server.registry import SiteRegistry
from suture.learning.decisions import DecisionSettings, operating
from suture.learning.score_counts import Counts, Curves
from suture.protocol.decisions import Decision, Operating
from suture.protocol.messages import Scores

FORMAT = 1
"""Version of what model.json says of decisions."""


@dataclasses.dataclass(frozen=True)
class Decisions:
    """By what the selected model decides.

    Attributes:
        pooled: of each class, fitted to the counts of all sites.
        sites: of each site and class, fitted to its own counts.
    """

    settings: DecisionSettings
    pooled: Mapping[str, Operating] = dataclasses.field(default_factory=dict)
    sites: Mapping[str, Mapping[str, Operating]] = dataclasses.field(default_factory=dict)

    def of_site(self, registry: SiteRegistry, site: str) -> dict[str, Decision]:
        """Return by what a site decides the classes that it annotates, in its own names."""
        member, own = registry.members[site], self.sites.get(site, {})
        return {
            named: Decision(own.get(name), self.pooled.get(name))
            for named, name in zip(member.own, member.names, strict=True)
            if name in own or name in self.pooled
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for model.json and metrics.json."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def fit_decisions(
    registry: SiteRegistry, scores: Mapping[str, Scores], settings: DecisionSettings
) -> Decisions:
    """Fit operating points to the counts of the sites that answered."""
    counts = {site: registry.named(site, _by_class(one)) for site, one in sorted(scores.items())}
    names = sorted({name for found in counts.values() for name in found})
    pooled = {name: [found[name] for found in counts.values() if name in found] for name in names}
    return Decisions(
        settings,
        _fitted({name: Curves.of(pairs) for name, pairs in pooled.items()}, settings),
        {
            site: _fitted({name: Curves.of([pair]) for name, pair in found.items()}, settings)
            for site, found in counts.items()
        },
    )


def _by_class(scores: Scores) -> dict[str, tuple[Counts, Counts]]:
    if not scores.labels:
        return {}
    positives, negatives = (scores.class_tensors[kind].numpy() for kind in ("positives", "negatives"))
    return dict(zip(scores.labels, zip(positives, negatives, strict=True), strict=True))


def _fitted(curves: Mapping[str, Curves], settings: DecisionSettings) -> dict[str, Operating]:
    found = {name: operating(curve, settings) for name, curve in curves.items()}
    return {name: one for name, one in found.items() if one is not None}
