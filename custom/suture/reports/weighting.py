"""Who counts how much in the mean, round by round (Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b and 3c)."""

from __future__ import annotations

from collections.abc import Sequence

from suture.federation.server.site_weights import are_informative, shares_of, weights_of
from suture.protocol.records import Round, Run
from suture.reports.charts import Chart, Series, line_chart


def weight_charts(run: Run, history: Sequence[Round], phases: Sequence[int]) -> list[Chart]:
    """Each site's weight, and its share of the sum of all; none where weights say nothing new.

    That is where every site counts once, or with its number of training images.
    """
    weights = [weights_of(r) for r in history]
    if not are_informative({site: member.n.get("train") for site, member in run.sites.items()}, weights):
        return []
    rounds = [r.round for r in history]
    drawn = {
        "Weight, per site": weights,
        "Share of the sum of weights, %, per site": [
            {site: 100 * share for site, share in shares_of(given).items()} for given in weights
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


def what_weights_are(run: Run) -> str | None:
    """The method's own sentence of what the weight of a site is."""
    return next((entry.why for entry in run.egress if entry.field == "weight"), None)
