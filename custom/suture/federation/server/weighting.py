"""Who counts how much in the mean, round by round (Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b and 3c)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from suture.learning.metrics import mean_defined
from suture.protocol.records import Round

_FAR = 10  # times as many positives of a class as at the sites that annotate it


def weighting(images: Mapping[str, int | None], history: Sequence[Round]) -> dict[str, Any]:
    """The same as numbers, for metrics.json; empty where weights say nothing new.

    Args:
        images: training images of each site, None where withheld.

    Returns:
        ``rounds``, those that were committed; of each site its ``weights`` and ``shares`` (0 to 1) in them,
        None where its update was not merged; and ``mean_share``, over the rounds where it was.
    """
    merged = [r for r in history if r.status == "committed"]
    weights = [weights_of(r) for r in merged]
    if not is_telling(images, weights):
        return {}
    shares = [shares_of(given) for given in weights]
    return {
        "rounds": [r.round for r in merged],
        "weights": {site: [given.get(site) for given in weights] for site in images},
        "shares": {site: [given.get(site) for given in shares] for site in images},
        "mean_share": {site: mean_defined(given.get(site) for given in shares) for site in images},
    }


def weights_of(line: Round) -> dict[str, float]:
    """The weights of the updates that were merged; of an unchanged round none."""
    if line.status != "committed":
        return {}
    accepted = {name: site.weight for name, site in line.sites.items() if site.status == "accepted"}
    return {name: weight for name, weight in accepted.items() if weight is not None}


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {site: weight / total for site, weight in weights.items()} if total > 0 else {}


def is_telling(images: Mapping[str, int | None], weights: Sequence[Mapping[str, float]]) -> bool:
    """Whether any weight is neither 1 nor the number of the site's training images."""
    return any(w not in (1, images.get(site)) for given in weights for site, w in given.items())


def run_away(history: Sequence[Round], owners: Mapping[str, Collection[str]]) -> list[str]:
    """A sentence for each class that sites which do not annotate it see far too often.

    Where a row's weights are counts of labels and pseudo-labels (FedLSM, Eq. 7), such sites take the row
    over, and the teacher that comes of it is surer still. Prevalences of sites seldom differ tenfold.

    Args:
        owners: the sites that annotate each class.
    """
    told = []
    for name, annotating in owners.items():
        found = {r.round: _beyond(r, name, annotating) for r in history if tells_rows(r)}
        rounds = [number for number, sites in found.items() if sites]
        if rounds:
            first, last = rounds[0], rounds[-1]
            told.append(
                f"{name}: from round {first} sites that do not annotate it count over {_FAR} times as many "
                f"as any site that does (in round {last}: {', '.join(found[last])}), by pseudo-labels. These "
                "may feed on themselves: the class's row has become theirs."
            )
    return told


def _beyond(line: Round, name: str, annotating: Collection[str]) -> list[str]:
    counts = {site: s.rows.get(name) or 0.0 for site, s in line.sites.items() if s.status == "accepted"}
    most = max((counts[site] for site in annotating if site in counts), default=0.0)
    return [site for site, n in counts.items() if site not in annotating and n > _FAR * max(most, 1.0)]


def tells_rows(line: Round) -> bool:
    return line.status == "committed" and any(site.rows for site in line.sites.values())
