"""Who counts how much in the mean, round by round (Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b and 3c)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from suture.evaluation.figures import Chart, Series, line_chart
from suture.evaluation.metrics import mean_defined
from suture.evaluation.records import Round, Run


def weight_charts(run: Run, history: Sequence[Round], phases: Sequence[int]) -> list[Chart]:
    """Each site's weight, and its share of the sum of all; none where weights say nothing new.

    That is where every site counts once, or with its number of training images.
    """
    weights = [_weights(r) for r in history]
    if not _telling({site: member.n.get("train") for site, member in run.sites.items()}, weights):
        return []
    rounds = [r.round for r in history]
    drawn = {
        "Weight, per site": weights,
        "Share of the sum of weights, %, per site": [
            {site: 100 * share for site, share in _shares(given).items()} for given in weights
        ],
    }
    charts = [
        line_chart(
            title,
            rounds,
            [Series(site, [given.get(site) for given in values]) for site in run.sites],
            phases,
            run.selected_round,
        )
        for title, values in drawn.items()
    ]
    return [chart for chart in charts if chart]


def weighting(images: Mapping[str, int | None], history: Sequence[Round]) -> dict[str, Any]:
    """The same as numbers, for metrics.json; empty where weights say nothing new.

    Args:
        images: training images of each site, None where withheld.

    Returns:
        ``rounds``, those that were committed; of each site its ``weights`` and ``shares`` (0 to 1) in them,
        None where its update was not merged; and ``mean_share``, over the rounds where it was.
    """
    merged = [r for r in history if r.status == "committed"]
    weights = [_weights(r) for r in merged]
    if not _telling(images, weights):
        return {}
    shares = [_shares(given) for given in weights]
    return {
        "rounds": [r.round for r in merged],
        "weights": {site: [given.get(site) for given in weights] for site in images},
        "shares": {site: [given.get(site) for given in shares] for site in images},
        "mean_share": {site: mean_defined(given.get(site) for given in shares) for site in images},
    }


def what_weights_are(run: Run) -> str | None:
    """The method's own sentence of what the weight of a site is."""
    return next((entry.why for entry in run.egress if entry.field == "weight"), None)


def _weights(line: Round) -> dict[str, float]:
    """The weights of the updates that were merged; of an unchanged round none."""
    if line.status != "committed":
        return {}
    accepted = {name: site.weight for name, site in line.sites.items() if site.status == "accepted"}
    return {name: weight for name, weight in accepted.items() if weight is not None}


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {site: weight / total for site, weight in weights.items()} if total > 0 else {}


def _telling(images: Mapping[str, int | None], weights: Sequence[Mapping[str, float]]) -> bool:
    """Whether any weight is neither 1 nor the number of the site's training images."""
    return any(w not in (1, images.get(site)) for given in weights for site, w in given.items())
