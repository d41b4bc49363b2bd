"""The figure of a table, and further plots of its data and of one of its models."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray

from suture.core.files import atomic_write, make_folder
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.reports.cooccurrence import cooccurrence, frequencies, predicted_together, unit_of
from suture.reports.plots import STYLE, plot_contingencies, plot_cooccurrence, plot_features, plot_frequencies
from suture.simulation.sites import this_machine
from suture_papers.tables.cells import DASH, Estimate, Line, lines, over_series
from suture_papers.tables.conduct import Session
from suture_papers.tables.external_tests import absent_tests, site_config
from suture_papers.tables.outcome import Outcome, chosen
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Pairs, Plot, Table, TableSpec
from suture_papers.tables.tuned_columns import curves, tasks_of

_TONES = ("#0b6e8a", "#c2571a", "#5a7d2b", "#7a4d9c", "#9c2f4d", "#56616d", "#b58900", "#2c5aa0", "#333333")


def draw(outcome: Outcome) -> bytes:
    """Plot the main table as SVG: each row as dots, or as a line over the series."""
    table, found = outcome.table, lines(outcome)
    with rc_context(STYLE):
        if not table.spec.series:
            return _svg(_dots(table.spec, found, table.pairs))
        marks = [over_series(outcome, column) for column in table.columns]
        return _svg(_series(table.spec, found, marks))


_ACROSS = 3  # panels beside each other, so that their letters stay legible on a page


def plot_curves(outcome: Outcome) -> bytes:
    """Plot learning curves of fine-tuned models as SVG.

    There is a panel for each task and a line for each row: the AUROC after each epoch, mean and SD over runs.

    Source: Zhang et al. 2021, Fig. 4.
    """
    table = outcome.table
    tasks = tasks_of(table.columns)
    with rc_context(STYLE):
        canvas = Canvas(figsize=(1.2 + 2.8 * len(tasks), 3.2), layout="constrained")
        axes: Any = canvas.subplots(1, len(tasks), squeeze=False)
        for axis, task in zip(axes[0], tasks, strict=True):
            for tone, (key, row) in zip(itertools.cycle(_TONES), table.rows.items()):
                areas = np.array(curves(outcome.results[key, "None"], task))
                if len(areas):
                    _curve(axis, areas, row.name, tone)
            axis.set_xlabel("epoch")
            _frame(axis, f"AUROC, {task}", "y")
        handles = axes[0][0].get_legend_handles_labels()
        canvas.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
        return _svg(canvas)


def _curve(axis: Any, areas: NDArray[np.float64], name: str, tone: str) -> None:
    """Plot areas `[runs, epochs]` as their mean in a band of their SD."""
    epochs, mean = range(1, areas.shape[1] + 1), areas.mean(axis=0)
    spread = areas.std(axis=0, ddof=1) if len(areas) > 1 else np.zeros_like(mean)
    axis.fill_between(epochs, mean - spread, mean + spread, color=tone, alpha=0.15, linewidth=0)
    axis.plot(epochs, mean, color=tone, linewidth=1.6, label=name)


def _frame(axis: Any, title: str, grid: str) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.grid(axis=grid, color="#dde3e9")
    axis.set_axisbelow(True)


def _svg(canvas: Canvas) -> bytes:
    out = io.BytesIO()
    canvas.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index(b"<svg") :]


def _dots(spec: TableSpec, found: Sequence[Line], pairs: Pairs) -> Canvas:
    """Plot a panel for each column: the values of each row, their mean, and the mark of the test."""
    columns = list(found[0].estimates)
    down = math.ceil(len(columns) / _ACROSS)
    across = math.ceil(len(columns) / down)
    canvas = Canvas(figsize=(2.2 + 2.6 * across, down * (1.1 + 0.32 * len(found))), layout="constrained")
    axes: Any = canvas.subplots(down, across, sharey=True, squeeze=False)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    for axis, column in zip(axes.flat, columns, strict=False):
        for y, line in enumerate(found):
            cell = line.estimates[column]
            tone = _TONES[0] if line.row == spec.reference else _TONES[5]
            values = [v for v in cell.values if v is not None]
            if pairs != "classes":
                axis.plot(values, [y] * len(values), "o", color=tone, alpha=0.35, markersize=4, linewidth=0)
            if not math.isnan(cell.mean):
                axis.plot([cell.mean], [y], "|", color=tone, markersize=14, markeredgewidth=2.5)
            if cell.against is not None and cell.against.mark != DASH:
                axis.annotate(
                    cell.against.mark, (1, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
                )
        _frame(axis, column, "x")
    axes[0][0].set_yticks(range(len(found)), [line.name for line in found])
    axes[0][0].set_ylim(len(found) - 0.4, -0.6)  # downwards, and no row on the edge
    return canvas


def _marks(
    axis: Any, over: Mapping[str, Estimate], last: Mapping[str, float], tones: Mapping[str, str]
) -> None:
    """Write the rows' marks in the colours of their lines, in the vertical order of the lines' ends."""
    marked = [row for row, one in over.items() if one.against and one.against.mark != DASH]
    marked.sort(key=lambda row: last[row] if last[row] == last[row] else -math.inf)
    for rank, row in enumerate(marked):
        height = 0.5 + 0.09 * (rank - (len(marked) - 1) / 2)
        against = over[row].against
        assert against is not None
        axis.annotate(
            against.mark, (1.02, height), xycoords="axes fraction", color=tones[row], va="center", fontsize=8
        )


def _series(spec: TableSpec, found: Sequence[Line], compared: Sequence[Mapping[str, Estimate]]) -> Canvas:
    """Plot a panel for each column: a line for each row over the values of the series, and its mark.

    Args:
        compared: for each column, the rows over the whole series.
    """
    columns = list(found[0].estimates)
    canvas = Canvas(figsize=(1.5 + 3.0 * len(columns), 3.2), layout="constrained")
    axes: Any = canvas.subplots(1, len(columns), squeeze=False)
    xs = list(dict.fromkeys(line.x for line in found))
    rows = list(dict.fromkeys(line.row for line in found))
    tones = dict(zip(rows, itertools.cycle(_TONES)))
    for axis, column, over in zip(axes[0], columns, compared, strict=True):
        for row in rows:
            own = [line for line in found if line.row == row]
            means = [line.estimates[column].mean for line in own]
            spread = [0.0 if math.isnan(s) else s for s in (line.estimates[column].spread for line in own)]
            width = 2.4 if row == spec.reference else 1.2
            axis.errorbar(
                [xs.index(line.x) for line in own], means, spread, marker="o", markersize=4, color=tones[row],
                linewidth=width, capsize=2, label=own[0].name,
            )  # fmt: skip
        last = {line.row: line.estimates[column].mean for line in found if line.x == xs[-1]}
        _marks(axis, over, last, tones)
        axis.set_xticks(range(len(xs)), [str(x) for x in xs])
        axis.set_xlabel(spec.series.label if spec.series else "")
        _frame(axis, column, "y")
    names, wide = axes[0][0].get_legend_handles_labels(), min(3, 1 + len(columns))
    canvas.legend(*names, loc="outside lower center", ncols=wide, frameon=False)
    return canvas


def write_plots(table: Table, session: Session, folder: Path, stem: str) -> None:
    """Write STEM-PLOT.svg of each further plot whose data and model are there.

    A plot of a model is drawn again only if the model is younger than the file.

    Args:
        stem: the stem of the table's other files.

    Raises:
        SutureError: the data cannot be read.
    """
    make_folder(folder)
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
    plot, tuned = table.spec.drawings[name], chosen(table, session.store)
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
