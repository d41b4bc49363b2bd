"""Plots of data sets, predictions and features as SVG: the same input gives the same bytes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from suture.core.errors import DataError
from suture.core.printable import escaped
from suture.core.seeds import generator_for
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.metrics import Floats
from suture.learning.samples import load_samples
from suture.models.saved import load_model, load_spec
from suture.reports.cooccurrence import Contingency, Frequency, Unit

# Okabe & Ito 2008: distinct for colour-blind readers. Their yellow is left out, too pale on white.
TONES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333")
# After the last tone the tones come again with the next marker or hatch.
MARKERS = ("o", "^", "s", "D", "v")
HATCHES = ("", "/////", ".....", "xxxxx", "|||||")
INK, GREY, PALE, GRID = "#1f2933", "#7b8794", "#eef1f4", "#dde3e9"
# Element names come from a fixed salt; a name is text and never a formula, whatever characters it holds.
STYLE = {
    "svg.hashsalt": "suture", "text.parse_math": False, "font.size": 9, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "hatch.linewidth": 0.5,
}  # fmt: skip
_BATCH = 256
_COMPONENTS = 50  # principal components that t-SNE reads at most
_VECTORS = 5000  # points as vector graphics at most; more would make an SVG of megabytes
_DASH = "–"


def plot_frequencies(
    tables: Mapping[str, Mapping[str, Frequency]], title: str = "How often each class occurs"
) -> bytes:
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
    """Plot a co-occurrence matrix in percent (MIDL 2023, Fig. 3), as SVG; undefined entries have a dash.

    Args:
        labels: names of the c classes.
        matrix: shares [c, c] as `cooccurrence` returns them; row: given class, column: class with it.
        per: the unit of which they are shares.

    Raises:
        DataError: a matrix of another shape, or no class.
    """
    shares = np.asarray(matrix, dtype=np.float64)
    if not len(labels) or shares.shape != (len(labels), len(labels)):
        raise DataError(f"the matrix {shares.shape} must be [{len(labels)}, {len(labels)}] and not empty")
    # The diagonal is 1 by definition; its colour would leave no contrast to the other cells.
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
    """Plot contingency matrices side by side (MIDL 2023, Fig. 4), as SVG: images, and their share of the row.

    Raises:
        DataError: no matrix.
    """
    if not found:
        raise DataError("there is no contingency matrix to plot; give at least one pair of classes")
    with rc_context(STYLE):
        canvas: Any = Canvas(figsize=(0.4 + 3.4 * len(found), 4.1), layout="constrained")
        for axis, one in zip(canvas.subplots(1, len(found), squeeze=False)[0], found, strict=True):
            _contingency(axis, one)
        canvas.get_layout_engine().set(wspace=0.08)
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11)
        return _svg(canvas)


def plot_embedding(points: ArrayLike, sources: Sequence[str], title: str = "Features (t-SNE)") -> bytes:
    """Plot embedded features coloured by their source (Kulkarni et al. 2024, Fig. 4b), as SVG.

    Args:
        points: positions [n, 2] as `embed` returns them.
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


@torch.no_grad()
def plot_features(
    model_folder: Path,
    configs: Mapping[str, SiteConfig],
    split: Split,
    images: int = 500,
    seed: int = 1,
    device: str = "cpu",
) -> bytes:
    """Plot the features of some images of each source in two dimensions by t-SNE, as SVG.

    Args:
        configs: the data of each source by its name.
        images: the largest number of images of a source; they are chosen at random.

    Raises:
        ConfigError: there is no model.
        DataError: the data cannot be read, or a source has no image in the split.
    """
    model, prepare = load_model(model_folder)
    spec = load_spec(model_folder)
    model.to(device)
    features: list[Tensor] = []
    sources: list[str] = []
    for name, config in configs.items():
        _, samples = load_samples(config, spec, name, only=split)
        part = samples[split]
        if not len(part):
            raise DataError(f"{name}: {config.data.table} has no {split} images; choose another --split")
        order = torch.randperm(len(part), generator=generator_for(seed, "latent", name))[:images]
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            pixels = prepare(part.batch(rows).inputs["image"].to(device))
            features.append(model.features({"image": pixels}).cpu())
        sources += [name] * len(order)
    return plot_embedding(embed(torch.cat(features).numpy(), seed), sources)


def embed(features: ArrayLike, seed: int, method: Literal["tsne", "pca"] = "tsne") -> Floats:
    """Embed features in two dimensions that keep neighbours together (Kulkarni et al. 2024, Fig. 4b).

    The features are reduced by principal components first, against noise and for speed (van der Maaten &
    Hinton 2008, Sec. 4.2). The perplexity is 30, or (n - 1) / 3 where there are too few points for that.

    Args:
        features: [n, d], outputs of the same layer for every source.
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
        raise DataError("all images have the same features, so they cannot be plotted")
    if method == "pca" or x.shape[1] > _COMPONENTS:
        x = PCA(2 if method == "pca" else min(_COMPONENTS, len(x)), random_state=seed).fit_transform(x)
    if method == "tsne":
        x = TSNE(perplexity=min(30.0, (len(x) - 1) / 3), init="pca", random_state=seed).fit_transform(x)
    return np.asarray(x, dtype=np.float64)


def _bars(axis: Any, i: int, of: int, table: str, values: Sequence[float]) -> None:
    """Add the bars of the i-th of `of` data sets, with a value or a dash at the end of each."""
    height = 0.8 / of
    positions = np.arange(len(values)) - 0.4 + height * (i + 0.5)
    lengths = [0.0 if math.isnan(v) else v for v in values]
    axis.barh(
        positions, lengths, height=0.88 * height, label=_key(table), color=_of(TONES, i),
        hatch=_of(HATCHES, i // len(TONES)), edgecolor="white", linewidth=0,
    )  # fmt: skip
    for position, value, length in zip(positions, values, lengths, strict=True):
        text = _DASH if math.isnan(value) else "<0.1" if 0 < value < 0.0005 else f"{100 * value:.1f}"
        axis.annotate(
            text, (length, position), (3, 0), textcoords="offset points", va="center", fontsize=7, color=GREY
        )


def _lay_out_bars(axis: Any, classes: int, largest: float) -> None:
    axis.set_ylim(classes - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * largest)
    axis.set_xlabel("images with the class, % of labelled images")
    axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axis.grid(axis="x", color=GRID)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)


def _contingency(axis: Any, one: Contingency) -> None:
    """Add one matrix with the conditional probabilities below it."""
    counts = np.array(one.counts, dtype=np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, rows, out=np.full_like(counts, np.nan), where=rows > 0)
    texts = [
        [_DASH if math.isnan(n) else f"{n:,.0f}\n{_percent(s)}" for n, s in zip(*pair, strict=True)]
        for pair in zip(counts, shares, strict=True)
    ]
    _cells(axis, shares, texts, 1.0, size=10)
    _name_cells(axis, ["no", "yes"], ["no", "yes"], turned=False)
    axis.set_ylabel(_wrap(f"{one.first} predicted"))
    notes = (
        f"{_wrap(one.second)} predicted\n",
        _given(one.second, one.first, one.second_given_first),
        _given(one.first, one.second, one.first_given_second),
        textwrap.fill(one.why, 42),
    )
    axis.set_xlabel("\n".join(notes))


def _cells(axis: Any, shades: Floats, texts: Sequence[Sequence[str]], top: float, size: float) -> None:
    """Add a matrix of cells with texts, darker where the shade is nearer to `top`; NaN is pale."""
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
    """Return the entries of the legend, with the number of points of each source."""
    return [
        Line2D(
            [], [], linewidth=0, marker=_of(MARKERS, i // len(TONES)), color=_of(TONES, i), markersize=6,
            label=_key(f"{name} ({np.sum(number == i)})"),
        )
        for i, name in enumerate(names)
    ]  # fmt: skip


def _of(cycle: Sequence[str], i: int) -> str:
    return cycle[i % len(cycle)]


def _given(name: str, condition: str, share: float) -> str:
    """Return a conditional probability as text, on two lines where the names are long."""
    gap = " " if len(name) + len(condition) < 30 else "\n"
    return f"P({name} |{gap}{condition}) = {_percent(share)}"


def _percent(share: float) -> str:
    return _DASH if math.isnan(share) else f"{100 * share:.1f} %"


def _key(name: str) -> str:
    """Return a name for the legend, from which matplotlib leaves out one that begins with an underscore."""
    return f" {_wrap(name)}" if name.startswith("_") else _wrap(name)


def _wrap(name: str) -> str:
    """Return a name on lines, without a character that XML does not know."""
    return textwrap.fill(escaped(name), 26)


def _largest(values: Iterable[float | None]) -> float:
    """Return the largest defined value, at least one percent so that a scale has a length."""
    return max([0.01, *(v for v in values if v is not None and not math.isnan(v))])


def _svg(canvas: Any, dpi: int = 72) -> bytes:
    out = io.BytesIO()
    canvas.savefig(out, format="svg", dpi=dpi, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index(b"<svg") :]
