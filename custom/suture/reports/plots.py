"""Drawings of data sets and predictions as SVG: the same input gives the same bytes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from suture.core.errors import DataError
from suture.learning.metrics import Floats
from suture.reports.contingency import Contingency
from suture.reports.labels_overview import Frequency, Unit

# Okabe & Ito 2008: told apart by colour-blind readers. Their yellow is left out, too pale on white.
TONES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333")
# After the last tone the tones come again with the next marker or hatch.
MARKERS = ("o", "^", "s", "D", "v")
HATCHES = ("", "/////", ".....", "xxxxx", "|||||")
INK, GREY, PALE, GRID = "#1f2933", "#7b8794", "#eef1f4", "#dde3e9"
# Element names from a fixed salt; a name is text and never a formula, whatever signs it holds.
STYLE = {
    "svg.hashsalt": "suture", "text.parse_math": False, "font.size": 9, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "hatch.linewidth": 0.5,
}  # fmt: skip
_WIDEST = 50  # principal components that t-SNE sees at most
_VECTORS = 5000  # points that are drawn one by one; more would make an SVG of megabytes
_DASH = "–"


def plot_frequencies(
    tables: Mapping[str, Mapping[str, Frequency]], title: str = "How often each class occurs"
) -> bytes:
    """Label frequencies of data sets as grouped horizontal bars (Kulkarni et al. 2024, Fig. 4a), as SVG.

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
        raise DataError("there is no class to draw; give at least one data set with labels")
    order = sorted(names, key=lambda name: (-_largest(own.get(name) for own in shares.values()), name))
    with rc_context(STYLE):
        canvas: Any = Canvas(figsize=(7, 1.2 + len(order) * (0.1 + 0.16 * len(shares))), layout="constrained")
        axis = canvas.subplots()
        for i, (table, own) in enumerate(shares.items()):
            _bars(axis, i, len(shares), table, [own.get(name, math.nan) for name in order])
        axis.set_yticks(range(len(order)), [_wrap(name) for name in order])
        for tick, name in zip(axis.get_yticklabels(), order, strict=True):
            everywhere = not any(math.isnan(own.get(name, math.nan)) for own in shares.values())
            tick.set_fontweight("bold" if everywhere and len(shares) > 1 else "normal")
        _lay_out_bars(axis, len(order), _largest(v for own in shares.values() for v in own.values()))
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11)
        if len(shares) > 1:
            canvas.legend(loc="outside lower center", ncols=min(4, len(shares)), frameon=False)
        return _svg(canvas)


def plot_cooccurrence(
    labels: Sequence[str],
    matrix: ArrayLike,
    title: str = "Which classes occur together",
    per: Unit = "image",
) -> bytes:
    """A co-occurrence matrix in percent (MIDL 2023, Fig. 3), as SVG; undefined entries have a dash.

    Args:
        labels: names of the c classes.
        matrix: shares [c, c] as `cooccurrence` gives them; row: given class, column: class with it.
        per: what they are shares of.

    Raises:
        DataError: a matrix of another shape, or no class.
    """
    shares = np.asarray(matrix, dtype=np.float64)
    if not len(labels) or shares.shape != (len(labels), len(labels)):
        raise DataError(f"the matrix {shares.shape} must be [{len(labels)}, {len(labels)}] and not empty")
    # The diagonal is 1 by definition: coloured, it would leave the rest no contrast.
    shades = np.where(np.eye(len(labels), dtype=np.bool_), np.nan, shares)
    texts = [[_DASH if math.isnan(v) else f"{100 * v:.0f}" for v in row] for row in shares]
    with rc_context(STYLE):
        side = 2.2 + 0.34 * len(labels)
        canvas: Any = Canvas(figsize=(max(4.2, side), max(3.6, side)), layout="constrained")
        axis = canvas.subplots()
        _cells(axis, shades, texts, _largest(shades.ravel()), size=7.5)
        _name_cells(axis, [_wrap(name) for name in labels], [_wrap(name) for name in labels], turned=True)
        axis.set_xlabel("… have this class too, %")
        axis.set_ylabel(f"of the {per}s with this class …")
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11)
        return _svg(canvas)


def plot_contingencies(found: Sequence[Contingency], title: str = "Predictions of related classes") -> bytes:
    """Contingency matrices side by side (MIDL 2023, Fig. 4), as SVG: images, and their share of the row.

    Raises:
        DataError: no matrix.
    """
    if not found:
        raise DataError("there is no contingency matrix to draw; give at least one pair of classes")
    with rc_context(STYLE):
        canvas: Any = Canvas(figsize=(0.4 + 3.4 * len(found), 4.1), layout="constrained")
        for axis, one in zip(canvas.subplots(1, len(found), squeeze=False)[0], found, strict=True):
            _contingency(axis, one)
        canvas.get_layout_engine().set(wspace=0.08)
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11)
        return _svg(canvas)


def plot_latent(points: ArrayLike, sources: Sequence[str], title: str = "Latent space") -> bytes:
    """Embedded features coloured by where they come from (Kulkarni et al. 2024, Fig. 4b), as SVG.

    Args:
        points: positions [n, 2] as `embed` gives them.
        sources: source of each point, n of them.

    Raises:
        DataError: points of another shape, or not finite, or none, or another number of sources.
    """
    at = np.asarray(points, dtype=np.float64)
    if at.shape != (len(sources), 2) or not len(at) or not np.isfinite(at).all():
        raise DataError(f"points {at.shape} must be finite and [{len(sources)}, 2], one for each source")
    names = list(dict.fromkeys(sources))
    number = np.array([names.index(source) for source in sources])
    tone = np.array(TONES)[number % len(TONES)]
    mixed = np.random.default_rng(0).permutation(len(at))  # so that no source covers the others
    with rc_context(STYLE):
        canvas: Any = Canvas(figsize=(6.4, 4.6), layout="constrained")
        axis = canvas.subplots()
        for cycle in range(number.max() // len(TONES) + 1):
            own = mixed[number[mixed] // len(TONES) == cycle]
            axis.scatter(
                *at[own].T, c=tone[own], s=14, alpha=0.75, linewidths=0.3, edgecolors="white",
                marker=_of(MARKERS, cycle), rasterized=len(at) > _VECTORS,
            )  # fmt: skip
        axis.tick_params(length=0, labelbottom=False, labelleft=False)
        axis.grid(color=GRID)
        axis.set_axisbelow(True)
        axis.spines[:].set_visible(False)
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11)
        canvas.legend(handles=_keys(names, number), loc="outside right upper", frameon=False)
        return _svg(canvas, dpi=200)


def embed(features: ArrayLike, seed: int, method: Literal["tsne", "pca"] = "tsne") -> Floats:
    """Two dimensions that keep neighbours together (Kulkarni et al. 2024, Fig. 4b).

    Van der Maaten & Hinton 2008, Sec. 4.2, reduce the features by principal components first, against noise
    and for speed. The perplexity is 30, or (n - 1) / 3 where there are too few points for that.

    Args:
        features: [n, d], the same layer's outputs for every source.
        seed: of the embedding.
        method: ``tsne``, or ``pca`` for the first two principal components alone.

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
        raise DataError("all images have the same features, so there is nothing to lay out")
    if method == "pca" or x.shape[1] > _WIDEST:
        x = PCA(2 if method == "pca" else min(_WIDEST, len(x)), random_state=seed).fit_transform(x)
    if method == "tsne":
        x = TSNE(perplexity=min(30.0, (len(x) - 1) / 3), init="pca", random_state=seed).fit_transform(x)
    return np.asarray(x, dtype=np.float64)


def _bars(axis: Any, i: int, of: int, table: str, values: Sequence[float]) -> None:
    """The bars of the i-th of so many data sets, a value or a dash at the end of each."""
    height = 0.8 / of
    places = np.arange(len(values)) - 0.4 + height * (i + 0.5)
    lengths = [0.0 if math.isnan(v) else v for v in values]
    axis.barh(
        places, lengths, height=0.88 * height, label=_wrap(table), color=_of(TONES, i),
        hatch=_of(HATCHES, i // len(TONES)), edgecolor="white", linewidth=0,
    )  # fmt: skip
    for place, value, length in zip(places, values, lengths, strict=True):
        text = _DASH if math.isnan(value) else "<0.1" if 0 < value < 0.0005 else f"{100 * value:.1f}"
        axis.annotate(
            text, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=7, color=GREY
        )


def _lay_out_bars(axis: Any, classes: int, largest: float) -> None:
    axis.set_ylim(classes - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * largest)
    axis.set_xlabel("images with the class, % of those labelled")
    axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axis.grid(axis="x", color=GRID)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)


def _contingency(axis: Any, one: Contingency) -> None:
    """One matrix, with the conditional probabilities under it."""
    counts = np.array(one.counts, dtype=np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, rows, out=np.full_like(counts, np.nan), where=rows > 0)
    texts = [
        [_DASH if math.isnan(n) else f"{n:,.0f}\n{_percent(s)}" for n, s in zip(*pair, strict=True)]
        for pair in zip(counts, shares, strict=True)
    ]
    _cells(axis, shares, texts, 1.0, size=10)
    _name_cells(axis, ["no", "yes"], ["no", "yes"], turned=False)
    axis.set_ylabel(textwrap.fill(f"{one.first} predicted", 28))
    notes = (
        f"{_wrap(one.second)} predicted\n",
        _given(one.second, one.first, one.second_given_first),
        _given(one.first, one.second, one.first_given_second),
        textwrap.fill(one.why, 42),
    )
    axis.set_xlabel("\n".join(notes))


def _cells(axis: Any, shades: Floats, texts: Sequence[Sequence[str]], top: float, size: float) -> None:
    """A matrix of written cells, darker where the shade is nearer to `top`; NaN is pale."""
    axis.set_facecolor(PALE)
    axis.pcolormesh(np.ma.masked_invalid(shades), cmap="Blues", vmin=0, vmax=top, edgecolors="white")
    for (i, j), shade in np.ndenumerate(shades):
        tone = GREY if math.isnan(shade) else "white" if shade > 0.62 * top else INK
        axis.text(j + 0.5, i + 0.5, texts[i][j], ha="center", va="center", fontsize=size, color=tone)


def _name_cells(axis: Any, columns: Sequence[str], rows: Sequence[str], *, turned: bool) -> None:
    axis.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90 if turned else 0)
    axis.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _keys(names: Sequence[str], number: NDArray[np.intp]) -> list[Any]:
    """The entries of the legend, with how many points each source has."""
    return [
        Line2D(
            [], [], linewidth=0, marker=_of(MARKERS, i // len(TONES)), color=_of(TONES, i), markersize=6,
            label=f"{_wrap(name)} ({np.sum(number == i)})",
        )
        for i, name in enumerate(names)
    ]  # fmt: skip


def _of(cycle: Sequence[str], i: int) -> str:
    return cycle[i % len(cycle)]


def _given(name: str, condition: str, share: float) -> str:
    """A conditional probability, on two lines where the names are long."""
    gap = " " if len(name) + len(condition) < 30 else "\n"
    return f"P({name} |{gap}{condition}) = {_percent(share)}"


def _percent(share: float) -> str:
    return _DASH if math.isnan(share) else f"{100 * share:.1f} %"


def _wrap(name: str) -> str:
    return textwrap.fill(name, 26)


def _largest(values: Iterable[float | None]) -> float:
    """The largest defined value, at least one percent so that a scale has a length."""
    return max([0.01, *(v for v in values if v is not None and not math.isnan(v))])


def _svg(canvas: Any, dpi: int = 72) -> bytes:
    out = io.BytesIO()
    canvas.savefig(out, format="svg", dpi=dpi, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index(b"<svg") :]
