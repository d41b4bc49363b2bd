"""Plots of data sets, predictions and features as SVG files: the same input gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from suture.core.errors import DataError
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.metrics import Floats
from suture_results.charts import COLOURS, Cell, Chart, Scale, Text, Tick, Trace, ticks
from suture_results.cooccurrence import Contingency, Frequency, Unit
from suture_results.report import templates
from suture_results.saved_models import features_of

_COMPONENTS = 50  # principal components that t-SNE reads at most
_DASH = "–"
_LETTER = 6.2
"""Pixels of a letter of 11 px: a little more than most need, as no font is measured."""


def drawing(title: str, panels: Sequence[Chart]) -> bytes:
    """Return charts, three beside one another and others below, as an SVG file with one legend."""
    rows = [panels[first : first + 3] for first in range(0, len(panels), 3)]
    placed, y = [], 34.0 if title else 4.0
    for row in rows:
        x = 0.0
        for panel in row:
            placed.append((panel, x, y))
            x += panel.width
        y += max(panel.height for panel in row) + 24
    width = max([360.0, 24 + 8 * len(title), *(sum(panel.width for panel in row) for row in rows)])
    names = {trace.name: trace.tone for panel in panels for trace in panel.traces if trace.name}
    key, x = [], 12.0
    for name, tone in names.items() if len(names) > 1 else ():
        if x > 12 and x + text_width(name) + 22 > width - 12:
            x, y = 12.0, y + 18
        key.append((tone, name, x, y + 14))
        x += text_width(name) + 40
    height = y + (26 if key else 4)
    page = templates().get_template("drawing.svg")
    return page.render(
        title=title, panels=placed, key=key, width=round(width), height=round(height), style=_style()
    ).encode()


@cache
def _style() -> str:
    """Return the style of a file: that of a page's charts, with colours in place of variables."""
    rules = (Path(__file__).parent / "chart.css").read_text(encoding="utf-8")
    light, dark = (
        re.sub(r"var\(--(\w+)\)", lambda name, i=i: COLOURS[name[1]][i], rules)  # type: ignore[misc]
        for i in range(2)
    )
    return f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


def text_width(text: str) -> float:
    """Return about how many pixels a text has in a chart."""
    return _LETTER * len(text)


def brief(name: str, most: int = 48) -> str:
    """Return a name without its middle where it is so long that the plot beside it would be far away.

    >>> brief("Fracture of the upper end of the left humerus, displaced, subsequent encounter", 40)
    'Fracture of the upper end …ent encounter'
    """
    return name if len(name) <= most else f"{name[: most - 14]}…{name[-13:]}"


def plot_frequencies(tables: Mapping[str, Mapping[str, Frequency]]) -> bytes:
    """Plot label frequencies of data sets as grouped horizontal bars (Kulkarni et al. 2024, Fig. 4a), as SVG.

    Bars are shares of the labelled images, so that large and small data sets compare. A class that a data
    set does not label has a dash in place of its bar; a class that all of several label is in bold.

    Args:
        tables: the `frequencies` of each data set by its name.

    Raises:
        DataError: no data set, or none with a class.
    """
    shares = {table: {name: f.share for name, f in own.items()} for table, own in tables.items()}
    names = {name for own in shares.values() for name in own}
    if not names:
        raise DataError("there is no class to plot; give at least one data set with labels")
    order = sorted(names, key=lambda name: (-_largest(own.get(name) for own in shares.values()), name))
    found = ticks(0, 100 * _largest(v for own in shares.values() for v in own.values()), most=5)
    left = 24 + 1.12 * max(text_width(brief(name)) for name in order)  # some names are bold
    top, bar = 6.0, 12.0
    each = bar * len(shares) + 8
    bottom = top + each * len(order)
    x = Scale(0, found[-1].at / 100, left, left + 420)
    traces, texts = [], []
    for i, (table, own) in enumerate(shares.items()):
        bars = []
        for row, name in enumerate(order):
            value, y = own.get(name, math.nan), top + each * row + bar * i + 4
            known = not math.isnan(value)
            if known:
                bars.append((left, y, round(x(value) - left, 2), bar - 2))
            text = f"{100 * value:.1f}" if known and not 0 < value < 0.0005 else "<0.1" if known else _DASH
            texts.append(Text((x(value) if known else left) + 4, y + 8.5, text))
        traces.append(Trace(table, i, bars=tuple(bars)))
    for row, name in enumerate(order):
        everywhere = len(shares) > 1 and not any(math.isnan(o.get(name, math.nan)) for o in shares.values())
        y = top + each * (row + 0.5) + 3.5
        texts.append(Text(left - 8, y, brief(name), "end", "bold" if everywhere else "ink"))
    texts.append(
        Text((left + x.stop) / 2, bottom + 34, "images with the class, % of labelled images", "middle")
    )
    chart = Chart(
        "", tuple(Tick(x(t.at / 100), t.text) for t in found), (), tuple(traces), texts=tuple(texts),
        upright=True, width=x.stop + 52, height=bottom + 42, left=left, right=x.stop, top=top, bottom=bottom,
    )  # fmt: skip
    return drawing("How often each class occurs", [chart])


def plot_cooccurrence(
    labels: Sequence[str], matrix: ArrayLike, title: str = "Which classes occur together", per: Unit = "image"
) -> bytes:
    """Plot a co-occurrence matrix in percent (MIDL 2023, Fig. 3), as SVG; undefined entries have a dash.

    Args:
        labels: names of the c classes.
        matrix: shares [c, c] as `cooccurrence` returns them; row: given class, column: class with it.
        per: the unit of which they are shares.
    """
    shares = np.asarray(matrix, dtype=np.float64)
    # The diagonal is 1 by definition; its colour would leave no contrast to the other cells.
    shades = np.where(np.eye(len(labels), dtype=np.bool_), np.nan, shares)
    texts = [[_DASH if math.isnan(v) else f"{100 * v:.0f}" for v in row] for row in shares]
    notes = [f"% of the {per}s with the class on the left", "that have the class above, too"]
    panel = _matrix("", labels, labels, shades, texts, _largest(shades.ravel()), 28, notes)
    return drawing(title, [panel])


def plot_contingencies(found: Sequence[Contingency]) -> bytes:
    """Plot contingency matrices side by side (MIDL 2023, Fig. 4): images, and their share of the row."""
    return drawing("Predictions of related classes", [_contingency(one) for one in found])


def _contingency(one: Contingency) -> Chart:
    """Return one matrix with the conditional probabilities below it."""
    counts = np.array(one.counts, dtype=np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, rows, out=np.full_like(counts, np.nan), where=rows > 0)
    texts = [
        [_DASH if math.isnan(n) else f"{n:,.0f}\n{_percent(s)}" for n, s in zip(*pair, strict=True)]
        for pair in zip(counts, shares, strict=True)
    ]
    notes = [
        f"P({one.second} | {one.first}) = {_percent(one.second_given_first)}",
        f"P({one.first} | {one.second}) = {_percent(one.first_given_second)}",
        *wrap(one.why, 42),
    ]
    names = [[f"{name}: {word}" for word in ("no", "yes")] for name in (one.first, one.second)]
    return _matrix(
        f"{one.first} and {one.second}, predicted", names[0], names[1], shares, texts, 1.0, 84, notes
    )


def _matrix(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    shades: Floats,
    words: Sequence[Sequence[str]],
    darkest: float,
    side: float,
    notes: Sequence[str],
) -> Chart:
    """Return a matrix of cells, the darker the nearer a shade is to `darkest`, with words in them."""
    rows, columns = [*map(brief, rows)], [*map(brief, columns)]
    left, top = 24 + max(map(text_width, rows)), 16 + 0.64 * max(map(text_width, columns))
    cells, texts = [], []
    for (i, j), shade in np.ndenumerate(shades):
        share = None if math.isnan(shade) else float(shade / darkest)
        x, y = left + j * side, top + i * side
        cells.append(Cell(x, y, side - 1, side - 1, share))
        lines = words[i][j].split("\n")
        for k, line in enumerate(lines):
            at = y + side / 2 + 3.5 + 14 * (k - (len(lines) - 1) / 2)
            look: Literal["ink", "light"] = "light" if share is not None and share > 0.55 else "ink"
            texts.append(Text(x + side / 2, at, line, "middle", look))
    right, bottom = left + side * len(columns), top + side * len(rows)
    texts += [Text(left - 8, top + side * (i + 0.5) + 3.5, n, "end", "ink") for i, n in enumerate(rows)]
    texts += [Text(left + side * (j + 0.5), top - 8, n, "start", "ink", -40) for j, n in enumerate(columns)]
    texts += [Text(12, bottom + 20 + 15 * k, line) for k, line in enumerate(notes)]
    width = max([right + 0.8 * text_width(columns[-1]), *(24 + text_width(line) for line in (title, *notes))])
    height = bottom + 12 + 15 * len(notes)
    return Chart(title, cells=tuple(cells), texts=tuple(texts), width=width, height=height)


def plot_embedding(points: ArrayLike, sources: Sequence[str]) -> bytes:
    """Plot embedded features coloured by their source (Kulkarni et al. 2024, Fig. 4b), as SVG.

    Args:
        points: positions [n, 2] as `embed` returns them.
        sources: source of each point, n of them.
    """
    at = np.asarray(points, dtype=np.float64)
    side, middle = 480.0, (at.min(axis=0) + at.max(axis=0)) / 2
    half = max(float(np.ptp(at, axis=0).max()) / 2, 1e-9)
    x, y = (
        Scale(m - half, m + half, *ends)
        for m, ends in zip(middle.tolist(), ((12, side - 12), (side - 12, 12)), strict=True)
    )
    places = [((x(a), y(b)),) for a, b in at.tolist()]
    names = list(dict.fromkeys(sources))
    slices = np.array_split(np.random.default_rng(0).permutation(len(at)), min(20, len(at)))
    traces = [Trace(f"{name} ({list(sources).count(name)})", i) for i, name in enumerate(names)]
    for part in slices:  # one after the other, so that no source covers the others
        for i, name in enumerate(names):
            runs = tuple(places[k] for k in part if sources[k] == name)
            traces.append(Trace("", i, runs, look="faint"))
    return drawing("Features (t-SNE)", [Chart("", traces=tuple(traces), width=side, height=side)])


def plot_features(
    model_folder: Path,
    configs: Mapping[str, SiteConfig],
    split: Split,
    images: int = 500,
    seed: int = 1,
    device: str = "cpu",
) -> bytes:
    """Plot features of images of each source in two dimensions by t-SNE, as SVG; see `features_of`."""
    found = features_of(model_folder, configs, split, images, seed, device)
    sources = [name for name, features in found.items() for _ in features]
    return plot_embedding(embed(np.concatenate(list(found.values())), seed), sources)


def embed(features: ArrayLike, seed: int) -> Floats:
    """Embed features in two dimensions that keep neighbours together (Kulkarni et al. 2024, Fig. 4b).

    The features are reduced by principal components first, against noise and for speed (van der Maaten &
    Hinton 2008, Sec. 4.2). The perplexity is 30, or (n - 1) / 3 where there are too few points for that.

    Args:
        features: [n, d], outputs of the same layer for every source.
        seed: of the embedding.

    Returns:
        [n, 2].

    Raises:
        DataError: fewer than 5 points or 2 dimensions, a value that is not finite, or points all the same.
    """
    from sklearn.decomposition import PCA  # a second's import that only this function needs
    from sklearn.manifold import TSNE

    x = np.asarray(features, dtype=np.float64)
    if x.ndim != 2 or len(x) < 5 or x.shape[1] < 2:
        raise DataError(f"features {x.shape} must be [n, d] with at least 5 images and 2 dimensions")
    if not np.isfinite(x).all():
        raise DataError("some features are not finite; the model has diverged, lower its learning rate")
    if not np.ptp(x, axis=0).any():
        raise DataError("all images have the same features, so they cannot be plotted")
    if x.shape[1] > _COMPONENTS:
        x = PCA(min(_COMPONENTS, len(x)), random_state=seed).fit_transform(x)
    x = TSNE(perplexity=min(30.0, (len(x) - 1) / 3), init="pca", random_state=seed).fit_transform(x)
    return np.asarray(x, dtype=np.float64)


def _percent(share: float) -> str:
    return _DASH if math.isnan(share) else f"{100 * share:.1f} %"


def _largest(values: Iterable[float | None]) -> float:
    """Return the largest defined value, at least one percent so that a scale has a length."""
    return max([0.01, *(v for v in values if v is not None and not math.isnan(v))])
