"""Scores summarised: over the sites, over groups of classes and of images, and of each site's own model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from suture.federation.server.registry import SiteRegistry
from suture.learning.metrics import mean_defined
from suture.protocol.messages import ClassScore, Figures, Metrics

Plain = Mapping[str, float | None]
"""Figures as they stand in metrics.json: ``n`` images, mean ``auroc``, and for multiclass labels more."""


def mean_over_sites(registry: SiteRegistry, tested: Mapping[str, Metrics], of_round: int) -> Metrics:
    """Return the sites' metrics as one: each figure is the unweighted mean over the sites that define it."""
    values = dict.fromkeys(value for metrics in tested.values() for value in metrics.attributes)
    return Metrics(
        of_round,
        "test",
        sum(metrics.n for metrics in tested.values()),
        mean_defined(metrics.loss for metrics in tested.values()),
        across_sites({site: registry.classes_from_site(site, m) for site, m in sorted(tested.items())}),
        mean_of(metrics.overall for metrics in tested.values()),
        {
            value: _mean([m.attributes[value] for m in tested.values() if value in m.attributes])
            for value in sorted(values)
        },
    )


def condensed(metrics: Metrics) -> Figures:
    """Return metrics without those of single classes."""
    area = mean_defined(score.auroc for score in metrics.classes.values())
    return Figures(metrics.n, area, metrics.overall)


def plain(figures: Figures) -> Plain:
    """Return figures as they stand in metrics.json."""
    return {"n": figures.n, "auroc": figures.auroc, **figures.overall}


def _mean(parts: list[Figures]) -> Figures:
    overall = mean_of(part.overall for part in parts)
    return Figures(sum(part.n for part in parts), mean_defined(part.auroc for part in parts), overall)


def across_sites(sites: Mapping[str, Mapping[str, ClassScore]]) -> dict[str, ClassScore]:
    """Return for each class the unweighted mean of AUROC and recall over the sites that define them.

    Counts are sums over all sites that evaluated the class, None where one of them withholds its own. The
    interval is None unless a single site defines the AUROC: intervals of different sites do not average.
    """
    return {
        name: _across([at[name] for at in sites.values() if name in at])
        for name in dict.fromkeys(name for at in sites.values() for name in at)
    }


def _across(scores: Sequence[ClassScore]) -> ClassScore:
    defined = [s for s in scores if s.auroc is not None]
    low, high = (defined[0].low, defined[0].high) if len(defined) == 1 else (None, None)
    return ClassScore(
        mean_defined(s.auroc for s in defined),
        low,
        high,
        _total(s.positives for s in scores),
        _total(s.negatives for s in scores),
        mean_defined(s.recall for s in scores),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def by_frequency(groups: Mapping[str, Sequence[str]], recall: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the accuracy of the head, medium and tail classes (Fed-MAS, Elbatel et al. 2023, Table 1).

    Args:
        groups: the classes of each group, such as those of `suture.data.long_tail.long_tail_groups`.
        recall: share of each class's images that are predicted as this class; undefined for a class without
            test images.

    Returns:
        ``classes`` of each group, and its ``accuracy``, the mean recall of its classes; ``all`` is the mean
        of the groups, which differs from the mean of the classes where groups differ in size. {} where no
        class has a recall.
    """
    if not groups or not any(value is not None for value in recall.values()):
        return {}
    accuracy = {group: mean_defined(recall.get(name) for name in names) for group, names in groups.items()}
    return {
        "classes": {group: list(names) for group, names in groups.items()},
        "accuracy": accuracy | {"all": mean_defined(accuracy.values())},
    }


def by_attribute(found: Mapping[str, Plain]) -> dict[str, Any]:
    """Return figures by attribute, and their unweighted mean (Fed-MAS, Table 3: Light, Dark, Avg).

    Returns:
        the ``values`` and their ``mean``; {} where there is no attribute.
    """
    return (
        {"values": {k: dict(v) for k, v in found.items()}, "mean": mean_of(found.values())} if found else {}
    )


def local_and_global(sites: Mapping[str, tuple[Plain, Plain]]) -> dict[str, Any]:
    """Return figures of the global model (gFL) and of the sites' own (pFL) on their data (Fed-MAS, Table 8).

    Args:
        sites: for each site the figures of the global model, and of the model that the site had trained in
            the same round, before aggregation.

    Returns:
        both of the ``sites``, and their ``mean`` over the sites; {} where no site has a model of its own.
    """
    if not sites:
        return {}
    return {
        "sites": {site: {"global": dict(g), "local": dict(own)} for site, (g, own) in sites.items()},
        "mean": {
            "global": mean_of(g for g, _ in sites.values()),
            "local": mean_of(own for _, own in sites.values()),
        },
    }


def mean_of(parts: Iterable[Plain]) -> dict[str, float | None]:
    """Return for each figure the unweighted mean over the parts that define it, but for ``n``."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part if name != "n")
    return {name: mean_defined(part.get(name) for part in parts) for name in names}
