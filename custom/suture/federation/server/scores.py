"""Scores over the sites, groups of classes and of images, of each site's own model; the sites' weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from suture.federation.server import intervals
from suture.federation.server.registry import SiteRegistry
from suture.learning.metrics import mean_defined
from suture.protocol.messages import ClassScore, Figures, Metrics
from suture.protocol.records import Round, informative_weights

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

    Counts are sums over all sites that evaluated the class, None where one of them withholds its own. For
    the interval see `intervals.of_class`.
    """
    return {
        name: _across([at[name] for at in sites.values() if name in at])
        for name in dict.fromkeys(name for at in sites.values() for name in at)
    }


def _across(scores: Sequence[ClassScore]) -> ClassScore:
    defined = [s for s in scores if s.auroc is not None]
    low, high = intervals.of_class(defined) or (None, None)
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
        groups: the classes of each group, such as those of `suture.data.split.long_tail_groups`.
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


_FAR = 10
"""A row is taken over where a site counts this many times as much as every site that annotates the class."""


def weighting(images: Mapping[str, int | None], history: Sequence[Round]) -> dict[str, Any]:
    """Return the sites' weights for metrics.json; empty where the weights are uninformative.

    Args:
        images: number of training images of each site, None where withheld.
        history: the rounds of the run.

    Returns:
        ``rounds``, the committed ones; ``weights`` and ``shares`` (0 to 1) of each site in them, None where
        its update was not merged; and its ``mean_share`` over the rounds in which it was merged.
    """
    merged = [r for r in history if r.status == "committed"]
    if not informative_weights(images, merged):
        return {}
    shares = [r.shares for r in merged]
    return {
        "rounds": [r.round for r in merged],
        "weights": {site: [r.weights.get(site) for r in merged] for site in images},
        "shares": {site: [given.get(site) for given in shares] for site in images},
        "mean_share": {site: mean_defined(given.get(site) for given in shares) for site in images},
    }


_MOST = 0.75
"""Share of the mean from which on the report names the site: it alone nearly makes the model."""


def dominant(history: Sequence[Round]) -> list[str]:
    """Return a sentence for each site that had most of the mean of three or more sites.

    A weight can be a number of images or a rescue factor that a site announces, and nobody can check it.
    """
    shares = [found for line in history if len(found := line.shares) >= 3]
    sites = sorted({site for found in shares for site in found})
    means = {site: mean_defined(found.get(site) for found in shares) for site in sites}
    return [
        (
            f"{site} had {share:.1%} of the weight in the mean of the sites' updates, so it determined the "
            "model almost alone. The server cannot check a site's weight."
        )
        for site, share in means.items()
        if share is not None and share > _MOST
    ]


def run_away(history: Sequence[Round], owners: Mapping[str, Collection[str]]) -> list[str]:
    """Return a sentence for each class whose row was taken over by sites that do not annotate it.

    Where the weights of a row are counts of labels and pseudo-labels (FedLSM, Eq. 7), sites that do not
    annotate a class can dominate its row; the mean teacher that results is even more confident. Prevalences
    at different sites seldom differ tenfold.

    Args:
        owners: the sites that annotate each class.
    """
    notes = []
    for name, annotating in owners.items():
        found = {r.round: _dominating(r, name, annotating) for r in history if r.has_row_weights}
        rounds = [number for number, sites in found.items() if sites]
        if rounds:
            first, last = rounds[0], rounds[-1]
            notes.append(
                f"{name}: from round {first} sites that do not annotate the class weigh over {_FAR} "
                f"times as much as any site that does (in round {last}: {', '.join(found[last])}), "
                "through pseudo-labels. Such labels may reinforce themselves: they now determine the "
                "class's row."
            )
    return notes


def _dominating(line: Round, name: str, annotating: Collection[str]) -> list[str]:
    """Return the sites without the class that count far more in its row than every site with it."""
    counts = {site: s.rows.get(name) or 0.0 for site, s in line.sites.items() if s.status == "accepted"}
    most = max((counts[site] for site in annotating if site in counts), default=0.0)
    return [site for site, n in counts.items() if site not in annotating and n > _FAR * max(most, 1.0)]
