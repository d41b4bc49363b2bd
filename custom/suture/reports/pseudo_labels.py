"""What a method that labels images itself did: how many pseudo-labels, how good, and whose rows count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suture.federation.server.site_weights import has_row_weights
from suture.protocol.records import Diagnostic, Member, Round, Run, SiteRound
from suture.reports.charts import Chart, Series, line_chart

TITLES = {
    "pseudo_positive": "Positive pseudo-labels, per site",
    "pseudo_negative": "Negative pseudo-labels, per site",
}
"""The scalars of a site's round that are drawn, and what is written above them."""

_ACROSS = 16
"""Classes side by side in one matrix: as many as a printed page holds at a readable size."""


@dataclass(frozen=True)
class Checked:
    """Pseudo-labels of one class and how many of them are true."""

    name: str
    made: int
    right: int

    @property
    def share(self) -> float:
        """Of the pseudo-labels, those that are true."""
        return self.right / self.made


@dataclass(frozen=True)
class Shares:
    """Sites by classes: the site's share of the weight in the class's row, None where it gave none.

    `kept` are the classes that no site gave weight to, so that their row stayed as it was.
    """

    labels: tuple[str, ...]
    sites: dict[str, tuple[float | None, ...]]
    kept: frozenset[str]


def pseudo_label_charts(run: Run, history: Sequence[Round], phases: Sequence[int]) -> list[Chart]:
    """A chart for each scalar of `TITLES` that a site has recorded, a line per site.

    None of the negative ones where an image has a single label: all other classes then follow from it.
    """
    if not history:
        return []
    rounds = [r.round for r in history]
    charts = [
        line_chart(
            title,
            rounds,
            [Series(site, [_scalar(r.sites.get(site), key) for r in history]) for site in run.sites],
            phases,
            run.selected_round,
        )
        for key, title in TITLES.items()
        if key != "pseudo_negative" or run.label_type != "multiclass"
    ]
    return [chart for chart in charts if chart]


def checked_pseudo_labels(
    labels: Sequence[str], diagnostics: Sequence[Diagnostic]
) -> dict[str, list[Checked]]:
    """For each site the classes that it gave pseudo-labels to, in the order of `labels`, over all rounds."""
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
    """All classes together."""
    return Checked("All classes", sum(row.made for row in rows), sum(row.right for row in rows))


def row_shares(run: Run, history: Sequence[Round]) -> tuple[int, list[Shares]] | None:
    """Who made the rows of the last committed round that tells it: the round and its matrix, in blocks.

    None if no round tells it: there every site counts once in each row that it sends.
    """
    telling = [r for r in history if has_row_weights(r)]
    if not telling or not run.labels:
        return None
    last = telling[-1]
    starts = range(0, len(run.labels), _ACROSS)
    return last.round, [_shares(run, last, run.labels[start : start + _ACROSS]) for start in starts]


def row_share_charts(run: Run, history: Sequence[Round], phases: Sequence[int]) -> list[Chart]:
    """The same over rounds, in per cent: a chart for each class with a line per site; none of a single round.

    A line is broken where a site gave the row no weight, or the round tells none.
    """
    rounds = [r.round for r in history]
    told = [_shares(run, r, run.labels) if has_row_weights(r) else None for r in history]
    if sum(shares is not None for shares in told) < 2:
        return []
    charts = [
        line_chart(
            f"{label}, %",
            rounds,
            [Series(site, [_percent(shares, site, i) for shares in told]) for site in run.sites],
            phases,
            run.selected_round,
        )
        for i, label in enumerate(run.labels)
    ]
    return [chart for chart in charts if chart]


def _percent(shares: Shares | None, site: str, label: int) -> float | None:
    share = shares.sites[site][label] if shares else None
    return None if share is None else 100 * share


def _scalar(site: SiteRound | None, key: str) -> float | None:
    return None if site is None else site.scalars.get(key)


def _weights(site: SiteRound | None, member: Member) -> Mapping[str, float | None]:
    """The weight of a site in each class row; an update that was not accepted has none."""
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
