"""How far classes are from the prior, against how often they occur (Elbatel et al. 2023, Fig. 2a)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from suture.protocol.records import Diagnostic, Run
from suture.reports.charts import Chart, scatter_chart

DIVERGENCE, IMAGES = "divergence", "images"
"""The names under which a site of a simulation writes down w_k and M_k."""


def divergence_charts(run: Run, diagnostics: Sequence[Diagnostic]) -> tuple[int, list[Chart]] | None:
    """A dot for each class at each site: w_k over the images of all sites, and over the site's own.

    Of the selected round, or the last that has been written down; None where no site has written any. The
    global model that a site measured is the one that the round began with.
    """
    telling = [line for line in diagnostics if {DIVERGENCE, IMAGES} <= line.figures.keys()]
    if not telling:
        return None
    rounds = {line.round for line in telling}
    number = run.selected_round if run.selected_round in rounds else max(rounds)
    lines = {line.site: line.figures for line in telling if line.round == number}
    names = dict.fromkeys(name for found in lines.values() for name in found[IMAGES])
    of_all = {name: math.fsum(found[IMAGES].get(name, 0) for found in lines.values()) for name in names}
    charts = [
        scatter_chart(
            title,
            {
                site: [
                    (of_all[name] if everywhere else n, found[DIVERGENCE][name])
                    for name, n in found[IMAGES].items()
                    if n
                ]
                for site, found in lines.items()
            },
        )
        for title, everywhere in (
            ("Divergence, over images at all sites", True),
            ("Divergence, over images at the site", False),
        )
    ]
    return number, [chart for chart in charts if chart]
