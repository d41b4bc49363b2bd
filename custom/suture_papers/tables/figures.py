"""The figure of a table: learning curves, lines over a series, or dots for each row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from suture_papers.tables.cells import DASH, Estimate, Line, lines, over_series
from suture_papers.tables.outcome import Outcome
from suture_papers.tables.spec import Pairs, TableSpec
from suture_papers.tables.tuned_columns import curves, tasks_of
from suture_results.charts import Chart, Look, Scale, Series, Text, Tick, Trace, line_chart, ticks
from suture_results.plots import drawing, text_width


def draw(outcome: Outcome) -> bytes:
    """Plot a table as SVG."""
    table = outcome.table
    if table.pairs == "tuned":
        return drawing("", _curves(outcome))
    if table.spec.series:
        marks = [over_series(outcome, c) for c in table.columns]
        return drawing("", _series(table.spec, lines(outcome), marks))
    return drawing("", _dots(table.spec, lines(outcome), table.pairs))


def _curves(outcome: Outcome) -> list[Chart]:
    """Return a panel for each task, with a line for each row: mean and SD of the AUROC after each epoch.

    Source: Zhang et al. 2021, Fig. 4.
    """
    table = outcome.table
    panels = []
    for task in tasks_of(table.columns):
        series = []
        for key, row in table.rows.items():
            areas = np.array(curves(outcome.results[key, "None"], task))
            if len(areas):
                mean = areas.mean(axis=0)
                spread = areas.std(axis=0, ddof=1) if len(areas) > 1 else np.zeros_like(mean)
                band = list(zip((mean - spread).tolist(), (mean + spread).tolist(), strict=True))
                series.append(Series(row.name, mean.tolist(), band))
        epochs = range(1, max((len(one.values) for one in series), default=0) + 1)
        if chart := line_chart(f"AUROC after each epoch, {task}", epochs, series):
            panels.append(chart)
    return panels


_TOP, _EACH = 6.0, 26.0
"""Of a panel with a line of text for each row: its upper edge, and the height of a row."""


def _dots(spec: TableSpec, found: Sequence[Line], pairs: Pairs) -> list[Chart]:
    """Return a panel for each column that has figures: the values of each row, their mean, and its mark."""
    panels: list[Chart] = []
    bottom = _TOP + _EACH * len(found)
    for column in found[0].estimates:
        cells = [line.estimates[column] for line in found]
        dots = [[] if pairs == "classes" else [v for v in cell.values if v is not None] for cell in cells]
        means = [(cell.mean, cell.mean) for cell in cells if not math.isnan(cell.mean)]
        if not means:
            continue
        named = len(panels) % 3 == 0  # the first beside its row of panels
        axis = ticks(*_extent([*means, *((v, v) for own in dots for v in own)]), most=4)
        left = 24 + max(text_width(line.name) for line in found) if named else 20.0
        x = Scale(axis[0].at, axis[-1].at, left, left + 190)
        traces, texts = [], []
        for row, (line, cell) in enumerate(zip(found, cells, strict=True)):
            y, tone = _TOP + _EACH * (row + 0.5), 0 if line.row == spec.reference else 7
            traces.append(Trace("", tone, tuple(((x(v), y),) for v in dots[row]), look="faint"))
            if not math.isnan(cell.mean):
                bar = ((x(cell.mean), y - 8), (x(cell.mean), y + 8))
                traces.append(Trace("", tone, (bar,), look="strong"))
            if cell.against is not None and cell.against.mark != DASH:
                texts.append(Text(x.stop + 6, y + 3.5, cell.against.mark))
            if named:
                texts.append(Text(left - 8, y + 3.5, line.name, "end", "ink"))
        panels.append(
            Chart(
                column, tuple(Tick(x(t.at), t.text) for t in axis), (), tuple(traces), texts=tuple(texts),
                upright=True, width=x.stop + 44, height=bottom + 26, left=left, right=x.stop, top=_TOP,
                bottom=bottom,
            )
        )  # fmt: skip
    return panels


def _series(
    spec: TableSpec, found: Sequence[Line], compared: Sequence[Mapping[str, Estimate]]
) -> list[Chart]:
    """Return a panel for each column: a line for each row over the values of the series, and its mark.

    Args:
        compared: for each column, the rows over the whole series.
    """
    panels, places = [], list(dict.fromkeys(line.x for line in found))
    rows = {line.row: line.name for line in found}
    x = Scale(-0.3, len(places) - 0.7, 40.0, 240.0)
    for column, over in zip(found[0].estimates, compared, strict=True):
        cells = {(line.row, line.x): line.estimates[column] for line in found}
        known = {key: cell for key, cell in cells.items() if not math.isnan(cell.mean)}
        bounds = {
            key: (cell.mean - spread, cell.mean + spread)
            for key, cell in known.items()
            for spread in [0.0 if math.isnan(cell.spread) else cell.spread]
        }
        axis = ticks(*_extent(bounds.values()), most=4)
        y = Scale(axis[0].at, axis[-1].at, 200.0, 12.0)
        traces = []
        for tone, (row, name) in enumerate(rows.items()):
            own = [
                (x(k), known[row, at], bounds[row, at]) for k, at in enumerate(places) if (row, at) in known
            ]
            line = tuple((px, y(cell.mean)) for px, cell, _ in own)
            bars = tuple(((px, y(low)), (px, y(high))) for px, _, (low, high) in own)
            look: Look = "strong" if row == spec.reference else ""
            traces.append(Trace(name, tone, (line,) if len(line) > 1 else (), look=look))
            traces.append(Trace("", tone, (*bars, *((point,) for point in line))))
        marked = [row for row, one in over.items() if one.against and one.against.mark != DASH]
        ends = {
            row: known[row, places[-1]].mean if (row, places[-1]) in known else -math.inf for row in marked
        }
        texts = [Text(140, 234, spec.series.label if spec.series else "", "middle")]
        for rank, row in enumerate(sorted(marked, key=lambda row: ends[row], reverse=True)):
            against = over[row].against
            assert against is not None
            at = 110 + 16 * (rank - (len(marked) - 1) / 2)
            texts.append(Text(246, at, against.mark, tone=list(rows).index(row)))
        panels.append(
            Chart(
                column, tuple(Tick(x(k), str(at)) for k, at in enumerate(places)),
                tuple(Tick(y(t.at), t.text) for t in axis), tuple(traces), texts=tuple(texts),
                width=290, height=242, right=240, bottom=200,
            )
        )  # fmt: skip
    return panels


def _extent(bounds: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the lowest and the highest of some bounds; 0 and 1 where there is none."""
    every = [bound for pair in bounds for bound in pair] or [0.0, 1.0]
    return min(every), max(every)
