"""The figure of an experiment: rows as dots, or lines over a series."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray

from suture.experiments.conduct import Outcome
from suture.experiments.fine_tuned import curves, tasks_of
from suture.experiments.spec import Experiment, Pairs, Preset
from suture.experiments.table import DASH, Figure, Line, lines, over_series

TONES = ("#0b6e8a", "#c2571a", "#5a7d2b", "#7a4d9c", "#9c2f4d", "#56616d", "#b58900", "#2c5aa0", "#333333")
# The same input gives the same bytes: no date, and element names from a fixed salt.
STYLE = {"svg.hashsalt": "suture", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw(experiment: Experiment, preset: Preset, outcome: Outcome) -> bytes:
    """The figure as SVG."""
    with rc_context(STYLE):
        found = lines(experiment, preset, outcome)
        if experiment.series:
            columns = experiment.columns_in(preset)
            marks = [over_series(experiment, preset, outcome, column) for column in columns]
            return _svg(_series(experiment, found, marks))
        return _svg(_dots(experiment, found, experiment.pairs_in(preset)))


_ACROSS = 3  # panels beside each other, so that their letters stay legible on a page


def plot_curves(experiment: Experiment, preset: Preset, outcome: Outcome) -> bytes:
    """Learning curves of fine-tuned models as SVG (Zhang et al. 2021, Fig. 4).

    A panel for each task and a line for each row: the AUROC after each epoch, the mean over runs in a band of
    their SD.
    """
    tasks = tasks_of(experiment.columns_in(preset))
    rows = [row for row in experiment.rows if row not in preset.skip]
    with rc_context(STYLE):
        canvas = Canvas(figsize=(1.2 + 2.8 * len(tasks), 3.2), layout="constrained")
        axes: Any = canvas.subplots(1, len(tasks), squeeze=False)
        for axis, task in zip(axes[0], tasks, strict=True):
            for tone, row in zip(itertools.cycle(TONES), rows):
                areas = np.array(curves(outcome.results[row, "None"], task))
                if len(areas):
                    _curve(axis, areas, experiment.rows[row].name, tone)
            axis.set_xlabel("epoch")
            axis.set_title(f"AUROC, {task}", fontsize=9, loc="left")
            axis.grid(axis="y", color="#dde3e9")
            axis.set_axisbelow(True)
        handles = axes[0][0].get_legend_handles_labels()
        canvas.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
        return _svg(canvas)


def _curve(axis: Any, areas: NDArray[np.float64], name: str, tone: str) -> None:
    """Runs by epochs as a line in a band."""
    epochs, mean = range(1, areas.shape[1] + 1), areas.mean(axis=0)
    spread = areas.std(axis=0, ddof=1) if len(areas) > 1 else np.zeros_like(mean)
    axis.fill_between(epochs, mean - spread, mean + spread, color=tone, alpha=0.15, linewidth=0)
    axis.plot(epochs, mean, color=tone, linewidth=1.6, label=name)


def _svg(canvas: Canvas) -> bytes:
    out = io.BytesIO()
    canvas.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index(b"<svg") :]


def _dots(experiment: Experiment, found: Sequence[Line], pairs: Pairs) -> Canvas:
    """A panel for each group of classes: the values of each row, their mean, and the mark of the test."""
    columns = list(found[0].figures)
    down = math.ceil(len(columns) / _ACROSS)
    across = math.ceil(len(columns) / down)
    canvas = Canvas(figsize=(2.2 + 2.6 * across, down * (1.1 + 0.32 * len(found))), layout="constrained")
    axes: Any = canvas.subplots(down, across, sharey=True, squeeze=False)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    for axis, column in zip(axes.flat, columns, strict=False):
        for place, line in enumerate(found):
            cell = line.figures[column]
            tone = TONES[0] if line.row == experiment.reference else TONES[5]
            values = [v for v in cell.values if v is not None]
            if pairs != "classes":
                axis.plot(
                    values, [place] * len(values), "o", color=tone, alpha=0.35, markersize=4, linewidth=0
                )
            if not math.isnan(cell.mean):
                axis.plot([cell.mean], [place], "|", color=tone, markersize=14, markeredgewidth=2.5)
            if cell.against is not None and cell.against.mark != DASH:
                axis.annotate(
                    cell.against.mark, (1, place), xycoords=("axes fraction", "data"), va="center", fontsize=8
                )
        axis.set_title(column, fontsize=9, loc="left")
        axis.grid(axis="x", color="#dde3e9")
        axis.set_axisbelow(True)
    axes[0][0].set_yticks(range(len(found)), [line.name for line in found])
    axes[0][0].set_ylim(len(found) - 0.4, -0.6)  # downwards, and no row on the edge
    return canvas


def _marks(
    axis: Any, over: Mapping[str, Figure], last: Mapping[str, float], tones: Mapping[str, str]
) -> None:
    """The rows' marks in the colours of their lines, one above the other as the lines end."""
    marked = [row for row, figure in over.items() if figure.against and figure.against.mark != DASH]
    marked.sort(key=lambda row: last[row] if last[row] == last[row] else -math.inf)
    for place, row in enumerate(marked):
        height = 0.5 + 0.09 * (place - (len(marked) - 1) / 2)
        against = over[row].against
        assert against is not None
        axis.annotate(
            against.mark, (1.02, height), xycoords="axes fraction", color=tones[row], va="center", fontsize=8
        )


def _series(
    experiment: Experiment, found: Sequence[Line], compared: Sequence[Mapping[str, Figure]]
) -> Canvas:
    """A panel for each group of classes: a line for each row over the values of the series, and its mark.

    Args:
        compared: of each column, the rows over the whole series.
    """
    columns = list(found[0].figures)
    canvas = Canvas(figsize=(1.5 + 3.0 * len(columns), 3.2), layout="constrained")
    axes: Any = canvas.subplots(1, len(columns), squeeze=False)
    xs = list(dict.fromkeys(line.x for line in found))
    rows = list(dict.fromkeys(line.row for line in found))
    tones = dict(zip(rows, itertools.cycle(TONES)))
    for axis, column, over in zip(axes[0], columns, compared, strict=True):
        for row in rows:
            own = [line for line in found if line.row == row]
            means = [line.figures[column].mean for line in own]
            spread = [0.0 if math.isnan(s) else s for s in (line.figures[column].spread for line in own)]
            width = 2.4 if row == experiment.reference else 1.2
            axis.errorbar(
                [xs.index(line.x) for line in own], means, spread, marker="o", markersize=4, color=tones[row],
                linewidth=width, capsize=2, label=own[0].name,
            )  # fmt: skip
        last = {line.row: line.figures[column].mean for line in found if line.x == xs[-1]}
        _marks(axis, over, last, tones)
        axis.set_xticks(range(len(xs)), [str(x) for x in xs])
        axis.set_xlabel(experiment.series.label if experiment.series else "")
        axis.set_title(column, fontsize=9, loc="left")
        axis.grid(axis="y", color="#dde3e9")
        axis.set_axisbelow(True)
    names, wide = axes[0][0].get_legend_handles_labels(), min(3, 1 + len(columns))
    canvas.legend(*names, loc="outside lower center", ncols=wide, frameon=False)
    return canvas
