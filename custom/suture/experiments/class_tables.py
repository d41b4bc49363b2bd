"""Tables of single classes: means over runs, and models compared image by image."""

from __future__ import annotations

from collections.abc import Mapping

from suture.experiments.by_class import Kept
from suture.experiments.conduct import Outcome
from suture.experiments.spec import Column, Experiment, Preset
from suture.experiments.table import DASH, class_means
from suture.experiments.tabular import Table, p_value


def class_table(experiment: Experiment, preset: Preset, outcome: Outcome, column: Column) -> Table:
    """The AUROC (or recall) of each class, mean over the runs."""
    rows = [row for row in experiment.rows if row not in preset.skip]
    areas = [class_means(experiment, row, outcome.results[row, "None"], column) for row in rows]
    names = sorted({name for found in areas for name in found})
    cells = [[name, *(f"{a[name]:.3f}" if name in a else DASH for a in areas)] for name in names]
    heads = ["class", *(experiment.rows[row].name for row in rows)]
    where = f" ({column.name})" if column.test else ""
    what = "Recall" if column.metric == "recall" else "AUROC"
    lacking = any(DASH in row for row in cells)
    notes = [f"{DASH} not run, not learned, or without positive or negative test images"] if lacking else []
    return Table(f"{what} of each class{where}, mean over the runs.", heads, cells, notes)


def by_class_table(experiment: Experiment, kept: Kept) -> Table:
    """Models of single runs, each compared with the first on the same images."""
    assert experiment.by_class is not None
    first, *others = kept
    spec = experiment.by_class
    heads = ["class", experiment.rows[first].name]
    for row in others:
        heads += [experiment.rows[row].name, "p"]
    heads += [f"published: {experiment.rows[row].name}" for row in kept if row in spec.published]
    rows = []
    for name in dict.fromkeys(name for classes in kept.values() for name in classes):
        cells = [name, _area(kept[first].get(name, {}))]
        for row in others:
            found = kept[row].get(name, {})
            cells += [_area(found), p_value(found.get("p"))]
        cells += [spec.published[row].get(name, DASH) for row in kept if row in spec.published]
        rows.append(cells)
    caption = (
        "AUROC (95 % interval) of each class, one model a row (the first seed), and p of a paired bootstrap "
        f"over the patients of the test set against {experiment.rows[first].name}"
    )
    return Table(f"{caption} ({spec.source})." if spec.source else f"{caption}.", heads, rows)


def _area(found: Mapping[str, float | None]) -> str:
    area, low, high = (found.get(key) for key in ("auroc", "low", "high"))
    bounds = "" if low is None or high is None else f" ({low:.3f}, {high:.3f})"
    return DASH if area is None else f"{area:.3f}{bounds}"
