"""Every chart of Suture, as positions in an SVG: those of a report, and the files of `suture plot`.

figures.html renders a chart in a page and in a file. Not by matplotlib: a chart takes 0.4 ms and 3 kB here,
34 ms and 9 kB there, which a page that is served while a run works would wait for, and it would follow
neither the page's colours nor the dark. (Matplotlib draws the pictures of `suture explain`.)
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from suture.protocol.records import Round, Run
from suture_results.formatting import count

# No screen shows a chart narrower than this, so that its 11 px letters are at least that.
WIDTH, HEIGHT = 280.0, 176.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 12.0, 12.0, 26.0

_SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif'
COLOURS = {
    "ink": ("#1c2630", "#e4e8ec"), "quiet": ("#5f6a76", "#9aa5b1"), "hair": ("#e3e6ea", "#2b343d"),
    "rule": ("#aab2ba", "#55616d"), "paper": ("#ffffff", "#12171c"), "wash": ("#f6f7f8", "#1a2127"),
    "t0": ("#2f4b66", "#8fb2d6"), "t1": ("#6fa0bd", "#4f87a8"), "t2": ("#a3456b", "#dd86ab"),
    "t3": ("#6d8b35", "#a3c266"), "t4": ("#b3982f", "#dcc45f"), "t5": ("#6f5f9e", "#a998dc"),
    "t6": ("#8a6b45", "#c7a377"), "t7": ("#8b9097", "#a4abb3"), "sans": (_SANS, _SANS),
}  # fmt: skip
"""The variables of chart.css, in the light and in the dark; a page defines them, a file has their values."""

Point = tuple[float, float]
Bar = tuple[float, float, float, float]
"""x, y, width and height."""
Look = Literal["", "thin", "strong", "faint", "ring"]


@dataclass(frozen=True)
class Scale:
    """A linear map from data (low to high) to positions in the SVG (start to stop)."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 2)


@dataclass(frozen=True)
class Tick:
    """A position on an axis and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Series:
    """One value per round, or None; and its lowest and highest value in each round, where it has a spread."""

    name: str
    values: Sequence[float | None]
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Trace:
    """A series as positions in the SVG.

    Attributes:
        name: of the series in the legend; one without a name has no place there.
        tone: number of its colour.
        runs: points (x, y) between gaps; a run of one point is a dot.
        bars: x, y, width and height of each.
        band: the outline of the series' spread, points (x, y).
        look: of its lines and dots.
    """

    name: str
    tone: int
    runs: tuple[tuple[Point, ...], ...] = ()
    bars: tuple[Bar, ...] = ()
    band: tuple[Point, ...] = ()
    look: Look = ""

    @property
    def path(self) -> str:
        """The runs of several points as one path of an SVG."""
        return "".join("M" + _join(run, "L") for run in self.runs if len(run) > 1)

    @property
    def outline(self) -> str:
        """The band as points of an SVG."""
        return _join(self.band, " ")

    @property
    def dots(self) -> list[Point]:
        """The runs of one point."""
        return [run[0] for run in self.runs if len(run) == 1]


def _join(points: Sequence[Point], by: str) -> str:
    return by.join(f"{x:g},{y:g}" for x, y in points)


@dataclass(frozen=True)
class Cell:
    """A rectangle of a matrix, the darker the larger its share; pale where that is None."""

    x: float
    y: float
    width: float
    height: float
    share: float | None


@dataclass(frozen=True)
class Text:
    """A text that begins, ends or has its middle at a position; turned by degrees, coloured by a tone."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    look: Literal["", "ink", "bold", "light"] = ""
    turn: int = 0
    tone: int | None = None


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        x, y: the ticks of the axes.
        phases, selected: over rounds: the x of the lines between phases, and of the selected round.
        cells, texts: what it has besides traces.
        upright: whether the lines of its grid stand on the x axis; else they lie at the ticks of y.
        width, height: of the SVG.
        left, right, top, bottom: the edges of the plot in it.
    """

    title: str
    x: tuple[Tick, ...] = ()
    y: tuple[Tick, ...] = ()
    traces: tuple[Trace, ...] = ()
    phases: tuple[float, ...] = ()
    selected: float | None = None
    cells: tuple[Cell, ...] = ()
    texts: tuple[Text, ...] = ()
    upright: bool = False
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def line_chart(
    title: str,
    rounds: Sequence[int],
    series: Sequence[Series],
    phases: Sequence[int] = (),
    selected: int | None = None,
) -> Chart | None:
    """Return a chart of lines over rounds, broken where a value is None; None if there is no value at all.

    Args:
        title: the quantity, with its unit.
        rounds: round numbers, ascending.
        series: values for each of `rounds`.
        phases: the first round of each phase after the first.
        selected: the round to mark.
    """
    values = [v for s in series for v in s.values if v is not None]
    if not values:
        return None
    values += [bound for s in series for pair in s.band for bound in pair]
    ticks, y = _y_axis(min(values), max(values))
    left = _left(ticks)
    x = _x_scale(rounds, 0.25, left)
    xs = [x(r) for r in rounds]
    traces = tuple(
        Trace(s.name, tone, runs=_runs(xs, s.values, y), band=_outline(xs, s.band, y))
        for tone, s in enumerate(series)
    )
    starts = tuple(x(first - 0.5) for first in phases)
    mark = x(selected) if selected in rounds and selected is not None else None
    return Chart(title, _x_ticks(rounds, x), ticks, traces, starts, mark, left=left)


def round_charts(run: Run, history: Sequence[Round], series: Mapping[str, Sequence[Series]]) -> list[Chart]:
    """Return a chart of lines over the rounds of a run for each title that has a value."""
    rounds, starts = [r.round for r in history], [first for first, _ in phases_of(history)[1:]]
    charts = (line_chart(title, rounds, lines, starts, run.selected_round) for title, lines in series.items())
    return [chart for chart in charts if chart]


def phases_of(history: Sequence[Round]) -> list[tuple[int, str]]:
    """Return the first round and the name of each phase."""
    runs = itertools.groupby(history, key=lambda r: r.phase)
    return [(next(rounds).round, name) for name, rounds in runs]


def bar_chart(title: str, rounds: Sequence[int], series: Sequence[Series]) -> Chart | None:
    """Return a chart of bars from 0, those of one round side by side; None if there is no value at all."""
    values = [v for s in series for v in s.values if v is not None]
    if not values:
        return None
    ticks, y = _y_axis(0.0, max(values))
    left = _left(ticks)
    x = _x_scale(rounds, 0.5, left)
    width = (x(1) - x(0)) * 0.7 / len(series)
    traces = tuple(
        Trace(s.name, tone, bars=_bars([x(r - 0.35) + tone * width for r in rounds], s.values, y, width))
        for tone, s in enumerate(series)
    )
    return Chart(title, _x_ticks(rounds, x), ticks, traces, left=left)


def scatter_chart(title: str, points: Mapping[str, Sequence[tuple[float, float]]]) -> Chart | None:
    """Return a chart of dots over a logarithmic axis of counts; None if there is no dot at all.

    Args:
        title: the quantity, with its unit.
        points: the dots of each series: a count of at least 1, and a value.
    """
    dots = [dot for series in points.values() for dot in series]
    if not dots:
        return None
    counts = [x for x, _ in dots]
    low, high = math.floor(math.log10(min(counts))), math.ceil(math.log10(max(counts)))
    marks, y = _y_axis(min(v for _, v in dots), max(v for _, v in dots))
    left = _left(marks)
    x = Scale(low - 0.1, high + 0.2, left, WIDTH - RIGHT)
    traces = tuple(
        Trace(name, tone, runs=tuple(((x(math.log10(n)), y(v)),) for n, v in series))
        for tone, (name, series) in enumerate(points.items())
    )
    below = tuple(Tick(x(d), count(10**d)) for d in range(low, high + 1))
    return Chart(title, below, marks, traces, left=left)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[Tick]:
    """Return round numbers that cover low to high, all written with the same number of decimals.

    Args:
        most: number of steps between them.
        whole: whether all are integers.
    """
    # A span below the smallest normal number has no tenths that a step could be written in.
    high = high if high - low >= most * sys.float_info.min else low + 1.0
    power = math.floor(math.log10((high - low) / most))
    for step in (m * 10.0**p for p in range(power, power + 3) for m in (1, 2, 2.5, 5)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most and (not whole or step == round(step)):
            break
    values = [round(n * step, 12 - power) for n in range(first, last + 1)]
    decimals = max(len(f"{v:g}".partition(".")[2]) for v in values)
    return [Tick(v, f"{v:.{decimals}f}") for v in values]


def _left(ticks: Sequence[Tick]) -> float:
    """Return the left edge of a plot that leaves room for the ticks of y: 7 for each digit, and a gap."""
    return min(max(LEFT, 7.0 * max(len(t.text) for t in ticks) + 7.0), WIDTH / 3)


def _x_scale(rounds: Sequence[int], margin: float, left: float) -> Scale:
    return Scale(rounds[0] - margin, rounds[-1] + margin, left, WIDTH - RIGHT)


def _x_ticks(rounds: Sequence[int], x: Scale) -> tuple[Tick, ...]:
    if len(rounds) <= 10:
        return tuple(Tick(x(r), str(r)) for r in rounds)
    nice = ticks(rounds[0], rounds[-1], most=8, whole=True)
    return tuple(Tick(x(t.at), t.text) for t in nice if rounds[0] <= t.at <= rounds[-1])


def _y_axis(low: float, high: float) -> tuple[tuple[Tick, ...], Scale]:
    if low == high:
        low, high = (0.0, 1.0) if high == 0 else (min(low, 0.0), max(high, 0.0))
    found = ticks(low, high, most=4)
    y = Scale(found[0].at, found[-1].at, HEIGHT - BOTTOM, TOP)
    return tuple(Tick(y(t.at), t.text) for t in found), y


def _runs(xs: Sequence[float], values: Sequence[float | None], y: Scale) -> tuple[tuple[Point, ...], ...]:
    runs: list[list[Point]] = [[]]
    for x, value in zip(xs, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x, y(value)))
    return tuple(tuple(run) for run in runs if run)


def _outline(xs: Sequence[float], band: Sequence[Point], y: Scale) -> tuple[Point, ...]:
    """Return the points along the upper bounds and back along the lower ones."""
    points = list(zip(xs, band, strict=True)) if band else []
    return (*((x, y(high)) for x, (_, high) in points), *((x, y(low)) for x, (low, _) in reversed(points)))


def _bars(xs: Sequence[float], values: Sequence[float | None], y: Scale, width: float) -> tuple[Bar, ...]:
    return tuple(
        (round(x, 2), y(v), round(width, 2), round(y(0) - y(v), 2))
        for x, v in zip(xs, values, strict=True)
        if v is not None
    )
