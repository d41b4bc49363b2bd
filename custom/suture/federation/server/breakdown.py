"""One result in several parts: common and rare classes, images of different attributes, models of sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from suture.learning.metrics import mean_defined

Figures = Mapping[str, float | None]
"""``n`` images, their mean ``auroc``, and of a single-label task accuracy and its like."""


def by_frequency(groups: Mapping[str, Sequence[str]], recall: Mapping[str, float]) -> dict[str, Any]:
    """The accuracy of the head, medium and tail classes (Fed-MAS, Elbatel et al. 2023, Table 1).

    Args:
        groups: the classes of each group, such as those of `suture.data.long_tail.long_tail_groups`.
        recall: the share of each class's images that is predicted as it; a class of no test image has none.

    Returns:
        ``classes`` of each group, and its ``accuracy``, the mean recall of its classes; ``all`` is the plain
        mean of the groups, which differs from the mean of the classes where groups are of different size.
        {} where no class has a recall.
    """
    if not groups or not recall:
        return {}
    accuracy = {group: mean_defined(recall.get(name) for name in names) for group, names in groups.items()}
    return {
        "classes": {group: list(names) for group, names in groups.items()},
        "accuracy": accuracy | {"all": mean_defined(accuracy.values())},
    }


def by_attribute(found: Mapping[str, Figures]) -> dict[str, Any]:
    """Figures by attribute, and their plain mean (Fed-MAS, Table 3: Light, Dark, Avg).

    Returns:
        the ``values`` and their ``mean``; {} where there is no attribute.
    """
    return (
        {"values": {k: dict(v) for k, v in found.items()}, "mean": mean_of(found.values())} if found else {}
    )


def local_and_global(sites: Mapping[str, tuple[Figures, Figures]]) -> dict[str, Any]:
    """The global model (gFL) and each site's own (pFL) at the sites' test data (Fed-MAS, Table 8).

    Args:
        sites: of each the figures of the global model, and of the one that it had trained itself before the
            merge of the same round.

    Returns:
        both of the ``sites``, and their ``mean`` over the sites; {} where no site has kept its own.
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


def mean_of(parts: Iterable[Figures]) -> dict[str, float | None]:
    """Figure by figure, the plain mean over the parts that define it; numbers of images have none."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part if name != "n")
    return {name: mean_defined(part.get(name) for part in parts) for name in names}
