"""The figures of a table file: of its table, and further plots of its data and of one of its models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from suture.core.files import atomic_write
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.execution.sites import this_machine
from suture_papers.tables.cells import DASH, Estimate, Line, lines, over_series
from suture_papers.tables.conduct import Session
from suture_papers.tables.external_tests import absent_tests, site_config
from suture_papers.tables.outcome import Outcome, choose
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Pairs, Plot, Table, TableSpec
from suture_papers.tables.study import BETTER, CLEARLY, METRICS, WORSE, compared, verdict_of
from suture_papers.tables.tuned_columns import curves, tasks_of
from suture_papers.tables.verdict import number
from suture_results.charts import Chart, Look, Scale, Series, Text, Tick, Trace, line_chart, ticks
from suture_results.cooccurrence import cooccurrence, frequencies, predicted_together, unit_of
from suture_results.plots import (
    drawing,
    plot_contingencies,
    plot_cooccurrence,
    plot_features,
    plot_frequencies,
    text_width,
)


def draw(outcome: Outcome) -> bytes:
    """Plot the main table as SVG: each row as dots, as a line over the series, or a study's differences."""
    table, found = outcome.table, lines(outcome)
    if table.spec.plan:
        return drawing("", _differences(outcome))
    if table.spec.series:
        marks = [over_series(outcome, c) for c in table.columns]
        return drawing("", _series(table.spec, found, marks))
    return drawing("", _dots(table.spec, found, table.pairs))


def plot_curves(outcome: Outcome) -> bytes:
    """Plot learning curves of fine-tuned models as SVG.

    There is a panel for each task and a line for each row: the AUROC after each epoch, mean and SD over runs.

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
    return drawing("", panels)


_TOP, _EACH = 6.0, 26.0
"""Of a panel with a line of text for each row: its upper edge, and the height of a row."""


def _differences(outcome: Outcome) -> list[Chart]:
    """Return a panel for each metric of a study: the rows' differences from the control, and their means.

    The band is ±δ, the differences too small to matter; what is better or worse is in colour.
    """
    spec = outcome.table.spec
    assert spec.plan is not None
    panels: list[Chart] = []
    for metric, effect in spec.plan.effects.items():
        found = {row: one for row, one in compared(outcome, metric).items() if one.same_as is None}
        known = {k: d for k, one in found.items() if (d := one.difference) and not math.isnan(d.low)}
        axis = ticks(*_extent([(-effect, effect), *((d.low, d.high) for d in known.values())]), most=4)
        left = 20.0 if panels else 24 + max(text_width(spec.rows[row].name) for row in found)
        x = Scale(axis[0].at, axis[-1].at, left, left + 250)
        bottom = _TOP + _EACH * len(found)
        sides = ((x(-effect), _TOP), (x(effect), _TOP), (x(effect), bottom), (x(-effect), bottom))
        traces = [Trace("", 7, (((x(0), _TOP), (x(0), bottom)),), band=sides, look="thin")]
        texts = []
        for at, (row, one) in enumerate(found.items()):
            y = _TOP + _EACH * (at + 0.5)
            if d := known.get(row):
                verdict = verdict_of(d, effect)
                tone = 2 if verdict == WORSE else 0 if verdict in (BETTER, CLEARLY) else 7
                traces.append(Trace("", tone, (((x(d.low), y), (x(d.high), y)), ((x(d.mean), y),))))
            texts.append(Text(x.stop + 6, y + 3.5, number(one.mean)))
            if not panels:
                texts.append(Text(left - 8, y + 3.5, spec.rows[row].name, "end", "ink"))
        panels.append(
            Chart(
                METRICS[metric], tuple(Tick(x(t.at), t.text) for t in axis), (), tuple(traces),
                texts=tuple(texts), upright=True, width=x.stop + 54, height=bottom + 26, left=left,
                right=x.stop, top=_TOP, bottom=bottom,
            )
        )  # fmt: skip
    return panels


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


def write_plots(table: Table, session: Session, folder: Path, stem: str) -> None:
    """Write STEM-PLOT.svg of each further plot whose data and model are there.

    A plot of a model is drawn again only if the model is younger than the file.

    Args:
        stem: the stem of the table's other files.

    Raises:
        SutureError: the data cannot be read.
    """
    absent = absent_tests(table.spec.tests, session.data_root)
    for name, plot in table.spec.drawings.items():
        path = folder / f"{stem}-{name}.svg"
        if lacking := [source for source in plot.sources if source in absent]:
            session.report(f"warning: plot {name!r} is left out: there is no {absent[lacking[0]]}")
        elif not plot.of_a_model:
            _write(path, _plot_labels(table.spec, plot, session), session)
        else:
            _plot_model(table, name, session, path)


def existing_plots(spec: TableSpec, folder: Path, stem: str) -> dict[str, str]:
    """Return the further plots in a folder, as `write_plots` writes them: file names with captions."""
    found = {f"{stem}-{name}.svg": _caption(plot) for name, plot in spec.drawings.items()}
    return {file: caption for file, caption in found.items() if _is_file(folder / file)}


def _is_file(path: Path) -> bool:
    """Whether a path is a file and no link, through which a page would show any file of its reader."""
    return path.is_file() and not path.is_symlink()


def _caption(plot: Plot) -> str:
    what = {
        "frequencies": "How often each class occurs",
        "cooccurrence": f"Which classes occur together in {plot.sources[0]}",
        "features": "Features of test images",
        "predictions": "Predictions of related classes",
    }[plot.of]
    return f"{what} ({plot.source})" if plot.source else what


def _plot_labels(spec: TableSpec, plot: Plot, session: Session) -> bytes:
    tables = {name: load_table(_config(spec, name, session).data) for name in plot.sources}
    if plot.of == "frequencies":
        return plot_frequencies({name: frequencies(table) for name, table in tables.items()})
    name, table = next(iter(tables.items()))
    unit = unit_of(table)
    return plot_cooccurrence(table.labels.names, cooccurrence(table, per=unit), name, unit)


def _plot_model(table: Table, name: str, session: Session, path: Path) -> None:
    plot, tuned = table.spec.drawings[name], choose(table, session.store)
    # the first seed's, if the preset does not skip the row
    run = next((run for run in final_runs(table, tuned) if run.row == plot.row), None)
    if run is None:
        session.report(f"warning: plot {name!r} is left out: this preset skips its row {plot.row!r}")
        return
    model = session.work / run.name / "model"
    weights = model / "model.json"
    if not weights.exists():
        session.report(
            f"warning: plot {name!r} is left out: {model} holds no model; delete the run's line in "
            f"{session.store.file_of(run.name)} and its folder, and it is done again"
        )
        return
    if path.exists() and path.stat().st_mtime > weights.stat().st_mtime:
        return
    configs = {source: _config(table.spec, source, session) for source in plot.sources}
    device = this_machine().device
    if plot.of == "features":
        svg = plot_features(model, configs, "test", device=device)
    else:
        svg = plot_contingencies(predicted_together(model, list(configs.values()), "test", device=device))
    _write(path, svg, session)


def _config(spec: TableSpec, test: str, session: Session) -> SiteConfig:
    return site_config(test, spec.tests[test], session.work, session.data_root)


def _write(path: Path, svg: bytes, session: Session) -> None:
    atomic_write(path, svg)
    session.report(f"written: {path}")
