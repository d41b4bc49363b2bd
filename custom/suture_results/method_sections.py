"""Sections of the report for some methods only: site weights, pseudo-labels, divergence from the prior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suture.protocol.records import Diagnostic, Member, Round, Run, SiteRound, informative_weights
from suture_results.charts import Chart, Series, round_charts, scatter_chart

TITLES = {
    "pseudo_positive": "Positive pseudo-labels, per site",
    "pseudo_negative": "Negative pseudo-labels, per site",
}
"""The scalars of a site's round that have a chart, and the charts' titles."""

DIVERGENCE, IMAGES = "divergence", "images"
"""The names under which a site of a simulation records w_k and M_k."""

_ACROSS = 16
"""Classes side by side in one matrix: as many as a printed page holds at a readable size."""


@dataclass(frozen=True)
class Checked:
    """The number of pseudo-labels of one class, and how many of them are true."""

    name: str
    made: int
    right: int

    @property
    def share(self) -> float:
        """The share of the pseudo-labels that are true."""
        return self.right / self.made


@dataclass(frozen=True)
class Shares:
    """Each site's share of the weight in the row of each class.

    Attributes:
        labels: the classes.
        sites: for each site its share in the row of each of `labels`; None where the site gave no weight.
        unchanged: the classes that no site gave weight to, whose rows stayed as they were.
    """

    labels: tuple[str, ...]
    sites: dict[str, tuple[float | None, ...]]
    unchanged: frozenset[str]


def method_sections(run: Run, history: Sequence[Round], diagnostics: Sequence[Diagnostic]) -> dict[str, Any]:
    """Return the template's values for these sections, which are empty where a method has no such figures."""
    checked = checked_pseudo_labels(run.labels, diagnostics)
    return {
        "pseudo_labels": pseudo_label_charts(run, history),
        "checked": {site: [*rows, total(rows)] for site, rows in checked.items()},
        "row_shares": row_shares(run, history),
        "row_share_charts": row_share_charts(run, history),
        "weights": weight_charts(run, history),
        "weight_is": meaning_of_weights(run),
        "divergence": divergence_charts(run, diagnostics),
    }


def weight_charts(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Return two charts over rounds: each site's weight, and its share of the sum of all weights.

    Fed-MAS, Elbatel et al. 2023, Figs. 2c, 2d, 3b and 3c. There are none where every site counts once, or
    with its number of training images.
    """
    if not informative_weights({site: member.n.get("train") for site, member in run.sites.items()}, history):
        return []
    weights = [r.weights for r in history]
    shares = [{site: 100 * share for site, share in r.shares.items()} for r in history]
    series = {
        title: [Series(site, [given.get(site) for given in values]) for site in run.sites]
        for title, values in (
            ("Weight, per site", weights),
            ("Share of the sum of weights, %, per site", shares),
        )
    }
    return round_charts(run, history, series)


def meaning_of_weights(run: Run) -> str | None:
    """Return the method's own explanation of a site's weight."""
    return next((entry.why for entry in run.egress if entry.field == "weight"), None)


def divergence_charts(run: Run, diagnostics: Sequence[Diagnostic]) -> tuple[int, list[Chart]] | None:
    """Return a round and two charts of it: w_k over the images of all sites, and over those of the site.

    A chart has a dot for each class at each site (Fed-MAS, Elbatel et al. 2023, Fig. 2a). The round is the
    selected one, or the last with records; the result is None where no site has recorded the figures. A site
    measures the global model with which the round began.
    """
    records = [line for line in diagnostics if {DIVERGENCE, IMAGES} <= line.figures.keys()]
    if not records:
        return None
    rounds = {line.round for line in records}
    number = run.selected_round if run.selected_round in rounds else max(rounds)
    sites = {line.site: line.figures for line in records if line.round == number}
    names = dict.fromkeys(name for found in sites.values() for name in found[IMAGES])
    total_images = {name: math.fsum(found[IMAGES].get(name, 0) for found in sites.values()) for name in names}
    everywhere, at_site = {}, {}
    for site, found in sites.items():
        images = {name: n for name, n in found[IMAGES].items() if n}
        everywhere[site] = [(total_images[name], found[DIVERGENCE][name]) for name in images]
        at_site[site] = [(n, found[DIVERGENCE][name]) for name, n in images.items()]
    charts = (
        scatter_chart("Divergence, over images at all sites", everywhere),
        scatter_chart("Divergence, over images at the site", at_site),
    )
    return number, [chart for chart in charts if chart]


def pseudo_label_charts(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Return a chart with a line per site for each scalar of `TITLES` that a site has recorded.

    Multiclass labels have no chart of negative pseudo-labels: they follow from the positive one of the image.
    """
    series = {
        title: [Series(site, [_scalar(r.sites.get(site), key) for r in history]) for site in run.sites]
        for key, title in TITLES.items()
        if key != "pseudo_negative" or run.label_type != "multiclass"
    }
    return round_charts(run, history, series)


def checked_pseudo_labels(
    labels: Sequence[str], diagnostics: Sequence[Diagnostic]
) -> dict[str, list[Checked]]:
    """Return, for each site, its pseudo-labels of all rounds by class, in the order of `labels`."""
    made: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for line in diagnostics:
        for name, found in line.classes.items():
            made.setdefault(line.site, {}).setdefault(name, []).append((found.made, found.right))
    position = {name: i for i, name in enumerate(labels)}
    tables = {}
    for site, classes in sorted(made.items()):
        rows = [Checked(n, sum(m for m, _ in c), sum(r for _, r in c)) for n, c in classes.items()]
        rows.sort(key=lambda row: (position.get(row.name, len(position)), row.name))
        tables[site] = [row for row in rows if row.made]
    return {site: rows for site, rows in tables.items() if rows}


def total(rows: Sequence[Checked]) -> Checked:
    """Return the sum over classes."""
    return Checked("All classes", sum(row.made for row in rows), sum(row.right for row in rows))


def row_shares(run: Run, history: Sequence[Round]) -> tuple[int, list[Shares]] | None:
    """Return the last committed round with weights by class, and its matrix of shares in blocks of classes.

    The result is None if no round has weights by class: each site then counts once in each row that it sends.
    """
    weighted = [r for r in history if r.has_row_weights]
    if not weighted or not run.labels:
        return None
    last = weighted[-1]
    starts = range(0, len(run.labels), _ACROSS)
    return last.round, [_shares(run, last, run.labels[start : start + _ACROSS]) for start in starts]


def row_share_charts(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Return a chart for each class: each site's share of the row's weight over rounds, in per cent.

    A line is broken where a site gave the row no weight, or the round has no weights by class. There is no
    chart where fewer than two rounds have them.
    """
    shares = [_shares(run, r, run.labels) if r.has_row_weights else None for r in history]
    if sum(found is not None for found in shares) < 2:
        return []
    series = {
        f"{label}, %": [Series(site, [_percent(found, site, i) for found in shares]) for site in run.sites]
        for i, label in enumerate(run.labels)
    }
    return round_charts(run, history, series)


def _percent(shares: Shares | None, site: str, label: int) -> float | None:
    share = shares.sites[site][label] if shares else None
    return None if share is None else 100 * share


def _scalar(site: SiteRound | None, key: str) -> float | None:
    return None if site is None else site.scalars.get(key)


def _weights(site: SiteRound | None, member: Member) -> Mapping[str, float | None]:
    """Return the weight of a site in each class row; {} where its update was not accepted."""
    if site is None or site.status != "accepted":
        return {}
    return site.rows or dict.fromkeys(member.labels, 1.0)


def _shares(run: Run, line: Round, labels: Sequence[str]) -> Shares:
    weights = {name: _weights(line.sites.get(name), member) for name, member in run.sites.items()}
    sums = {name: math.fsum(given.get(name) or 0.0 for given in weights.values()) for name in labels}
    sites = {
        site: tuple(_share(given.get(name) or 0.0, sums[name]) for name in labels)
        for site, given in weights.items()
    }
    return Shares(tuple(labels), sites, frozenset(name for name in labels if sums[name] <= 0))


def _share(weight: float, of: float) -> float | None:
    return weight / of if weight > 0 and of > 0 else None
