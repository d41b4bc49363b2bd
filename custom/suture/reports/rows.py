"""Classes in the order a reader meets them: those of several sites, then those of one; the best first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from suture.protocol.records import Metrics, Run

SHARED, UNIQUE, NOBODY = "Known to several sites", "Known to one site", "Known to no site"
OVERALL = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1": "macro F1",
    "precision": "macro precision",
}
"""The figures over all classes of a single-label task, in the order they are shown, and their names. Macro
recall is not shown: it is the balanced accuracy."""

AUROC = {"auroc": "AUROC"}


@dataclass(frozen=True)
class Row:
    """One class: who knows it and how well it was ranked; `reason` says why `auroc` is None. `recall` is of a
    single-label task.
    """

    name: str
    owners: str
    auroc: float | None
    interval: tuple[float, float] | None
    positives: int | None
    negatives: int | None
    reason: str
    recall: float | None


@dataclass(frozen=True)
class Group:
    """Classes that equally many sites know, and their mean AUROC (over those where it is defined)."""

    title: str
    rows: tuple[Row, ...]
    mean: float | None

    @property
    def defined(self) -> int:
        """How many classes the mean is over."""
        return sum(row.auroc is not None for row in self.rows)


def class_groups(run: Run, metrics: Metrics) -> list[Group]:
    """The groups that have a class, best class first, undefined ones last."""
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
    """The group of a class."""
    owners = len(run.owners(label))
    return SHARED if owners > 1 else UNIQUE if owners else NOBODY


def overall(metrics: Metrics) -> dict[str, float | None]:
    """The figures over all classes by their shown name; none where not one of them is defined."""
    found = {name: metrics.overall[key] for key, name in OVERALL.items() if key in metrics.overall}
    return found if any(value is not None for value in found.values()) else {}


def shown(parts: Iterable[Mapping[str, float | None]], most: int = 5) -> dict[str, str]:
    """The figures that any of several parts of a result defines, the first few of them, and their names."""
    defined = {key for part in parts for key, value in part.items() if value is not None}
    return dict([(key, name) for key, name in (AUROC | OVERALL).items() if key in defined][:most])


def _row(run: Run, metrics: Metrics, label: str) -> Row:
    owners = run.owners(label)
    positives, negatives = metrics.counts.get(label, (None, None))
    return Row(
        label,
        " and ".join(owners) if len(owners) < 3 else f"{len(owners)} of {len(run.sites)} sites",
        metrics.auroc.get(label),
        metrics.intervals.get(label),
        positives,
        negatives,
        metrics.undefined.get(label, "not evaluated"),
        metrics.recall.get(label),
    )


def _best_first(row: Row) -> tuple[float, str]:
    return (1.0 if row.auroc is None else -row.auroc, row.name)
