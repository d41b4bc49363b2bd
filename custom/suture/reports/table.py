"""The result of a run for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from suture.protocol.records import Metrics, Run, parse
from suture.reports.formatting import DASH, area, count, interval
from suture.reports.rows import Group, Row, class_groups, overall


def per_class_table(run: Mapping[str, Any], metrics: Mapping[str, Any]) -> Table:
    """AUROC of every class, grouped by how many sites know it, with the means and the overall figures.

    Args:
        run: the content of run.json.
        metrics: the content of metrics.json.

    Raises:
        DataError: one of them lacks a field or holds a wrong type.
    """
    checked, scores = parse(Run, run, "run.json"), parse(Metrics, metrics, "metrics.json")
    table = Table(
        title=escape(checked.title), caption=_caption(scores), title_justify="left", show_edge=False
    )
    for header in ("Class", "Known to"):
        table.add_column(header)
    for header in ("AUROC", "95 % CI", "Positives"):
        table.add_column(header, justify="right")
    for group in class_groups(checked, scores):
        _add(table, group)
    bounds = interval(scores.mean_interval) if scores.mean_interval else ""
    mean = f"[bold]{area(scores.mean_auroc)}"
    table.add_row("[bold]Mean of all defined", "", mean, bounds, "", end_section=True)
    if scores.loss is not None:
        table.add_row("[bold]Loss (cross-entropy)", "", f"[bold]{area(scores.loss)}", "", "")
    for name, value in overall(scores).items():
        table.add_row(f"[bold]{name[:1].upper()}{name[1:]}", "", f"[bold]{area(value)}", "", "")
    for frequency, value in scores.long_tail.accuracy.items():
        table.add_row(f"[bold]Accuracy, {frequency} classes", "", f"[bold]{area(value)}", "", "")
    return table


def _add(table: Table, group: Group) -> None:
    table.add_row(f"[dim]{group.title}", "", "", "", "")
    for row in group.rows:
        table.add_row(f"  {escape(row.name)}", escape(row.owners), *_values(row))
    mean = f"  [bold]Mean of {group.defined}"
    table.add_row(mean, "", f"[bold]{area(group.mean)}", "", "", end_section=True)


def _values(row: Row) -> tuple[str, str, str]:
    if row.auroc is None:
        return DASH, f"[dim]{escape(row.reason)}", count(row.positives)
    return area(row.auroc), interval(row.interval), count(row.positives)


def _caption(metrics: Metrics) -> str:
    cases = "" if metrics.n is None else f"{count(metrics.n)} cases, "
    model = "" if metrics.selected_round is None else f", model of round {metrics.selected_round}"
    return escape(f"{cases}{metrics.source}{model}")
