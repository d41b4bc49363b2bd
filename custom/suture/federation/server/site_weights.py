"""How much each site counts in the mean, by round (Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b, 3c)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from suture.learning.metrics import mean_defined
from suture.protocol.records import Round

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
    weights = [weights_of(r) for r in merged]
    if not are_informative(images, weights):
        return {}
    shares = [shares_of(given) for given in weights]
    return {
        "rounds": [r.round for r in merged],
        "weights": {site: [given.get(site) for given in weights] for site in images},
        "shares": {site: [given.get(site) for given in shares] for site in images},
        "mean_share": {site: mean_defined(given.get(site) for given in shares) for site in images},
    }


def weights_of(line: Round) -> dict[str, float]:
    """Return the weights of the merged updates; none of an unchanged round."""
    if line.status != "committed":
        return {}
    accepted = {name: site.weight for name, site in line.sites.items() if site.status == "accepted"}
    return {name: weight for name, weight in accepted.items() if weight is not None}


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Return each site's share of the sum of all weights; none where the sum is 0."""
    total = math.fsum(weights.values())
    return {site: weight / total for site, weight in weights.items()} if total > 0 else {}


def are_informative(images: Mapping[str, int | None], weights: Sequence[Mapping[str, float]]) -> bool:
    """Whether any weight is neither 1 nor the number of the site's training images."""
    return any(w not in (1, images.get(site)) for given in weights for site, w in given.items())


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
        found = {r.round: _dominating(r, name, annotating) for r in history if has_row_weights(r)}
        rounds = [number for number, sites in found.items() if sites]
        if rounds:
            first, last = rounds[0], rounds[-1]
            notes.append(
                f"{name}: from round {first} sites that do not annotate it count over {_FAR} times as many "
                f"as any site that does (in round {last}: {', '.join(found[last])}), by pseudo-labels. These "
                "may feed on themselves: the class's row has become theirs."
            )
    return notes


def _dominating(line: Round, name: str, annotating: Collection[str]) -> list[str]:
    """Return the sites without the class that count far more in its row than every site with it."""
    counts = {site: s.rows.get(name) or 0.0 for site, s in line.sites.items() if s.status == "accepted"}
    most = max((counts[site] for site in annotating if site in counts), default=0.0)
    return [site for site, n in counts.items() if site not in annotating and n > _FAR * max(most, 1.0)]


def has_row_weights(line: Round) -> bool:
    """Whether a committed round records the weight of any site in the rows of its classes."""
    return line.status == "committed" and any(site.rows for site in line.sites.values())
