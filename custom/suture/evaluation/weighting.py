"""Who counts how much in the mean, round by round (Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b and 3c)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from suture.evaluation.figures import Chart, Series, line_chart
from suture.evaluation.records import Round, Run


def weight_charts(run: Run, history: Sequence[Round], phases: Sequence[int]) -> list[Chart]:
    """Each site's weight, and its share of the sum of all; none where weights say nothing new.

    That is where every site counts once, or with its number of training images.
    """
    weights = [_weights(r) for r in history]
    if not any(_telling(run, site, weight) for given in weights for site, weight in given.items()):
        return []
    rounds = [r.round for r in history]
    drawn = {
        "Weight, per site": weights,
        "Share of the sum of weights, %, per site": [_shares(given) for given in weights],
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
    return {site: 100 * weight / total for site, weight in weights.items()} if total > 0 else {}


def _telling(run: Run, site: str, weight: float) -> bool:
    images = run.sites[site].n.get("train") if site in run.sites else None
    return weight != 1 and weight != images
