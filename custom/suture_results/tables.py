"""The result of a run by class: the rows of the report page, and the table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.padding import Padding
from rich.table import Table

from suture.core.escaping import printable, rich
from suture.protocol.messages import few
from suture.protocol.records import Metrics, Note, Run
from suture_results.formatting import DASH, FEW_NOTE, area, count, interval, step_path
from suture_results.sentences import sentence

SHARED, UNIQUE, NOBODY = "At several sites", "At one site", "At no site"
OVERALL = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1": "macro F1",
    "precision": "macro precision",
}
"""The figures over all classes of multiclass labels, in the order in which they are shown, and their names.
Macro recall is left out: it equals the balanced accuracy."""

AUROC = {"auroc": "AUROC"}


@dataclass(frozen=True)
class Row:
    """The figures of one class.

    Attributes:
        name: the class.
        owners: the sites that annotate it, as text.
        auroc, interval: the AUROC and its 95 % interval; None where undefined.
        positives, negatives: test cases with and without the class.
        reason: why `auroc` is None.
        recall: of multiclass labels alone.
        step: to whose multiples a site has rounded the figures; None where they are exact.
    """

    name: str
    owners: str
    auroc: float | None
    interval: tuple[float, float] | None
    positives: int | None
    negatives: int | None
    reason: str
    recall: float | None
    step: float | None

    @property
    def few(self) -> bool:
        """Whether the figures are of so few cases that they rank nothing."""
        return self.auroc is not None and few(self.positives, self.negatives)


@dataclass(frozen=True)
class Group:
    """The classes that several sites, one site or no site annotates, and the mean of their defined AUROCs."""

    title: str
    rows: tuple[Row, ...]
    mean: float | None

    @property
    def defined(self) -> int:
        """The number of classes whose AUROC is defined."""
        return sum(row.auroc is not None for row in self.rows)


def class_groups(run: Run, metrics: Metrics) -> list[Group]:
    """Return the groups that have a class; within a group the best class comes first, those of few
    cases after it, undefined ones last.
    """
    members: dict[str, list[Row]] = {SHARED: [], UNIQUE: [], NOBODY: []}
    for label in run.labels:
        members[kind(run, label)].append(_row(run, metrics, label))
    means = {SHARED: metrics.groups.get("shared"), UNIQUE: metrics.groups.get("unique"), NOBODY: None}
    return [
        Group(title, tuple(sorted(rows, key=_best_first)), means[title])
        for title, rows in members.items()
        if rows
    ]


def kind(run: Run, label: str) -> str:
    """Return the title of the group of a class."""
    owners = len(run.owners(label))
    return SHARED if owners > 1 else UNIQUE if owners else NOBODY


def overall(metrics: Metrics) -> dict[str, float | None]:
    """Return the figures over all classes under their shown names; {} where none of them is defined."""
    found = {name: metrics.overall[key] for key, name in OVERALL.items() if key in metrics.overall}
    return found if any(value is not None for value in found.values()) else {}


def shown(parts: Iterable[Mapping[str, float | None]], most: int = 5) -> dict[str, str]:
    """Return keys and names of the first `most` figures that at least one part of a result defines."""
    defined = {key for part in parts for key, value in part.items() if value is not None}
    return dict([(key, name) for key, name in (AUROC | OVERALL).items() if key in defined][:most])


def _row(run: Run, metrics: Metrics, label: str) -> Row:
    owners = run.owners(label)
    positives, negatives = metrics.counts.get(label, (None, None))
    why = metrics.undefined.get(label, Note("not_evaluated"))
    annotated = " and ".join(owners) if len(owners) < 3 else f"{len(owners)} of {len(run.sites)} sites"
    return Row(
        label,
        annotated + (" (unprotected)" if label in run.unprotected else ""),
        metrics.auroc.get(label),
        metrics.intervals.get(label),
        positives,
        negatives,
        sentence(why.code, why.values),
        metrics.recall.get(label),
        metrics.steps.get(label),
    )


def _best_first(row: Row) -> tuple[int, float, str]:
    return (2 if row.auroc is None else row.few, -(row.auroc or 0.0), row.name)


def class_table(run: Run, metrics: Metrics) -> Table:
    """Return the terminal's table: the AUROC of every class by group, the means and the overall figures."""
    table = Table(title=_cell(run.title), caption=_caption(metrics), title_justify="left", show_edge=False)
    for header in ("Class", "Annotated at"):
        table.add_column(header)
    for header in ("AUROC", "95 % CI", "Positives"):
        table.add_column(header, justify="right")
    for group in class_groups(run, metrics):
        _add(table, group)
    bounds = interval(metrics.mean_interval) if metrics.mean_interval else ""
    mean = f"[bold]{step_path(metrics.mean_auroc, metrics.coarsest)}"
    n = sum(value is not None for value in metrics.auroc.values())
    table.add_row(f"[bold]Mean ({n} class{'es' * (n != 1)})", "", mean, bounds, "", end_section=True)
    if metrics.loss is not None:
        loss = step_path(metrics.loss, metrics.loss_step)
        table.add_row("[bold]Loss (cross-entropy)", "", f"[bold]{loss}", "", "")
    for name, value in overall(metrics).items():
        table.add_row(f"[bold]{name[:1].upper()}{name[1:]}", "", f"[bold]{area(value)}", "", "")
    for frequency, value in metrics.long_tail.accuracy.items():
        table.add_row(f"[bold]Accuracy, {_cell(frequency)} classes", "", f"[bold]{area(value)}", "", "")
    return table


def _add(table: Table, group: Group) -> None:
    table.add_row(f"[dim]{group.title}", "", "", "", "")
    for row in group.rows:
        table.add_row(Padding(_cell(row.name), (0, 0, 0, 2)), _cell(row.owners), *_values(row))
    mean = f" [bold]Mean ({group.defined})"
    table.add_row(mean, "", f"[bold]{area(group.mean)}", "", "", end_section=True)


def _values(row: Row) -> tuple[str, str, str]:
    if row.auroc is None:
        return DASH, f"[dim]{_cell(row.reason)}", count(row.positives)
    auroc = step_path(row.auroc, row.step) + " (few)" * row.few
    return auroc, interval(row.interval), count(row.positives)


def _caption(metrics: Metrics) -> str:
    cases = "" if metrics.n is None else f"{count(metrics.n)} case{'' if metrics.n == 1 else 's'}, "
    model = "" if metrics.selected_round is None else f", model of round {metrics.selected_round}"
    of_few = (few(*metrics.counts.get(n, ())) for n, value in metrics.auroc.items() if value is not None)
    note = f"; {FEW_NOTE}" if any(of_few) else ""
    return _cell(f"{cases}{metrics.source}{model}{note}")


def _cell(text: str) -> str:
    """Return text of another party for a cell of the terminal's table."""
    return rich(printable(text))
