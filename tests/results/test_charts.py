"""Charts of a page and plots of a data set: what lies where, by hand; and classes as a tree of lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture.core.ontology import Relations
from suture_results.charts import Chart, Scale, Series, bar_chart, line_chart, ticks
from suture_results.class_tree import Node, class_tree, related_classes
from suture_results.cooccurrence import Contingency, Frequency
from suture_results.plots import (
    brief,
    embed,
    plot_contingencies,
    plot_cooccurrence,
    plot_embedding,
    plot_frequencies,
    text_width,
)
from world import refused

NAN = math.nan


def lines(*values: float | None, selected: int | None = None) -> Chart:
    chart = line_chart("loss", list(range(1, len(values) + 1)), [Series("a", values)], selected=selected)
    assert chart is not None
    return chart


def test_a_scale_and_ticks_by_hand() -> None:
    scale = Scale(0.5, 1.0, 10.0, 110.0)
    assert [scale(v) for v in (0.5, 0.75, 1.0)] == [10.0, 60.0, 110.0]
    assert [t.text for t in ticks(0.52, 0.78, most=4)] == ["0.5", "0.6", "0.7", "0.8"]


def test_a_line_rises_with_its_values_and_breaks_where_one_is_missing() -> None:
    assert [len(run) for run in lines(1.0, 2.0, None, 3.0).traces[0].runs] == [2, 1]
    chart = lines(1.0, 2.0, selected=2)
    first, second = chart.traces[0].runs[0]
    assert first[0] < second[0] == chart.selected
    assert first[1] > second[1]  # y grows downwards
    assert line_chart("loss", [1], [Series("a", [None])]) is None
    assert bar_chart("bytes", [1], []) is None


def test_bars_start_at_zero_and_stand_side_by_side() -> None:
    chart = bar_chart("bytes", [1, 2], [Series("down", [4.0, 2.0]), Series("up", [None, 2.0])])
    assert chart is not None
    down, up = chart.traces
    (x, y, width, height), (_, lower_y, _, half) = down.bars
    assert half == pytest.approx(height / 2, abs=0.02)
    assert y + height == pytest.approx(lower_y + half, abs=0.02)
    assert len(up.bars) == 1
    assert up.bars[0][0] == pytest.approx(down.bars[1][0] + width, abs=0.02)
    assert x > 0


@pytest.mark.parametrize(("low", "digits"), [(0.5, 3), (0.9985, 6), (0.99998, 8)])
def test_the_numbers_of_an_axis_fit_beside_it(low: float, digits: int) -> None:
    """A digit of 11 px is at most 7 wide, and the text ends 7 before the plot."""
    chart = lines(low, 1.0)
    assert max(len(tick.text) for tick in chart.y) == digits
    assert chart.left - 7 >= 7 * (digits - 1)
    assert all(chart.left <= tick.at <= chart.right for tick in chart.x)
    assert [tick.text for tick in lines(*range(20)).x] == ["5", "10", "15", "20"]  # rounds, not 2.5 of them


@given(st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=30))
@example([5e-324])
@example([-5e-324, 5e-324])
@example([1e-308, 3e-308])
@example([1.0, 1.0 + 2**-52])
def test_every_mark_lies_within_the_frame(values: list[float | None]) -> None:
    chart = line_chart("any", list(range(1, len(values) + 1)), [Series("a", values)], selected=1)
    if chart is None:
        assert all(v is None for v in values)
        return
    for x, y in (point for run in chart.traces[0].runs for point in run):
        assert chart.left <= x <= chart.right
        assert chart.top <= y <= chart.bottom


TABLES = {
    "NIH": {"Edema": Frequency(20, 80, 0), "Mass": Frequency(30, 70, 0)},
    "CheXpert": {"Edema": Frequency(1, 9999, 0), "Lung Lesion": Frequency(0, 0, 50)},
}
PAIR = Contingency("Mass", "Lung Lesion", ((1200, 300), (100, 400)))
NEVER = Contingency("Mass", "Lung Lesion", ((5, 1), (0, 0)), "never predicted: Mass")
BLANK = Contingency("Mass", "Edema", ((NAN, NAN), (NAN, NAN)), "no threshold: Edema")
POINTS = np.random.default_rng(0).normal(size=(12, 2))
SOURCES = ["NIH", "CheXpert", "MIMIC-LT"] * 4
SHARES = [[1, 0.25], [NAN, NAN]]


def parts(svg: bytes, tag: str) -> list[ElementTree.Element]:
    """The parts of a plot, which is whole XML."""
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def written(svg: bytes) -> list[str]:
    return [part.text or "" for part in parts(svg, "text")]


@pytest.mark.parametrize(
    "plot",
    [
        lambda: plot_frequencies(TABLES),
        lambda: plot_cooccurrence(("Edema", "Mass"), SHARES),
        lambda: plot_contingencies([PAIR, NEVER, BLANK]),
        lambda: plot_embedding(POINTS, SOURCES),
    ],
)
def test_the_same_input_gives_the_same_bytes(plot: Callable[[], bytes]) -> None:
    assert plot().startswith(b"<svg")
    assert plot() == plot()


def test_frequencies_are_in_percent_with_the_most_frequent_class_first() -> None:
    texts = written(plot_frequencies(TABLES))
    assert texts.index("Mass") < texts.index("Edema") < texts.index("Lung Lesion")
    assert {"NIH", "CheXpert", "30.0", "20.0", "<0.1"} <= set(texts)  # one in ten thousand is not none
    assert texts.count("–") == 3  # Mass at CheXpert, Lung Lesion at both
    assert "$\\frac$ & <b>" in written(plot_frequencies({"x": {"$\\frac$ & <b>": Frequency(1, 1, 0)}}))
    with refused(by=DataError):
        plot_frequencies({"NIH": {}})


def test_classes_that_all_of_several_data_sets_label_are_bold() -> None:
    skin = {"Melanoma": Frequency(1, 9, 0)}
    for tables, names in (
        (TABLES, {"Edema"}),
        ({"NIH": TABLES["NIH"]}, set()),
        ({"NIH": TABLES["NIH"], "HAM10000": skin}, set()),
    ):
        texts = parts(plot_frequencies(tables), "text")
        assert {part.text for part in texts if part.get("class") == "bold"} == names


def test_shares_and_contingencies_are_in_percent_and_what_is_undefined_is_no_number() -> None:
    texts = written(plot_cooccurrence(("Edema", "Mass"), SHARES))
    assert {"100", "25"} <= set(texts)
    assert (texts.count("–"), texts.count("Edema")) == (2, 2)
    text = "\n".join(written(plot_contingencies([PAIR])))
    assert "1,200\n80.0 %" in text
    assert "400\n80.0 %" in text
    assert "P(Lung Lesion | Mass) = 80.0 %" in text
    assert "P(Mass | Lung Lesion) = 57.1 %" in text
    text = "\n".join(written(plot_contingencies([NEVER, BLANK])))
    assert NEVER.why in text
    assert BLANK.why in text
    assert "nan" not in text


def test_every_source_has_a_colour_and_its_number_of_points() -> None:
    svg = plot_embedding(POINTS, SOURCES)
    size = ElementTree.fromstring(svg).get("height")
    key = [part for part in parts(svg, "text") if not part.get("class")]
    ends = [float(part.get("x", 0)) + text_width(part.text or "") for part in key]
    assert all(end < float(part.get("x", 0)) for end, part in zip(ends, key[1:], strict=False))
    assert all(float(part.get("y", 0)) < float(size or 0) for part in key)
    places = [[float(dot.get(axis, 0)) for dot in parts(svg, "circle")] for axis in ("cx", "cy")]
    assert [min(at) + max(at) for at in places] == pytest.approx([480, 480], abs=0.1)  # in the middle
    assert {"NIH (4)", "CheXpert (4)", "MIMIC-LT (4)"} <= set(written(svg))
    dots = [part.get("class") for part in parts(svg, "circle")]
    assert {tone: dots.count(tone) for tone in set(dots)} == {f"faint t{i}": 4 for i in range(3)}
    names = [f"hospital {i}" for i in range(10)]  # more than colours
    texts = written(plot_embedding(np.arange(2.0 * len(names)).reshape(-1, 2), names))
    assert {f"{name} (1)" for name in names} <= set(texts)
    assert set(names) <= set(written(plot_frequencies({n: {"Edema": Frequency(1, 1, 0)} for n in names})))


def test_a_long_name_does_not_drive_the_plot_away() -> None:
    long = "Zustand nach Versorgung einer Fraktur " * 5
    for plot in (
        plot_cooccurrence(["Mass", long], np.full((2, 2), 0.5)),
        plot_frequencies({"a": {"Mass": Frequency(1, 2, 3), long: Frequency(1, 2, 3)}}),
    ):
        (width,) = re.findall(r'<svg[^>]* width="(\d+)', plot.decode())
        assert int(width) < 900
        assert long not in plot.decode()
        assert brief(long) in plot.decode()


@pytest.mark.complete
@pytest.mark.parametrize("width", [2, 60])
def test_tsne_keeps_groups_apart_and_follows_the_seed(width: int) -> None:
    rng = np.random.default_rng(1)
    group = np.repeat([0, 1], 30)
    features = rng.normal(size=(60, width)) + 20 * group[:, None]
    at = embed(features, seed=0)
    assert at.shape == (60, 2)
    np.testing.assert_array_equal(at, embed(features, seed=0))
    away = np.linalg.norm(at[:, None] - at[None], axis=2) + np.diag([np.inf] * 60)
    assert (group[away.argmin(axis=1)] == group).all()


def test_features_that_cannot_be_laid_out_are_refused() -> None:
    assert np.isfinite(embed(np.eye(5), seed=0)).all()
    for features in (np.eye(4), np.ones((9, 1)), np.full((9, 3), NAN), np.ones((9, 3))):
        with refused(by=DataError):
            embed(features, seed=0)


def test_trees_come_first_and_a_class_with_two_parents_shows_its_children_once() -> None:
    relations = Relations({"B": ("A",), "C": ("A", "X"), "D": ("C",)})
    tree = [
        Node("A", "", 0),
        Node("B", "A", 1),
        Node("C", "A", 1),
        Node("D", "C", 2),
        Node("X", "", 0),
        Node("C", "X", 1, again=True),
    ]
    assert class_tree(["D", "B", "Alone"], relations) == [*tree, Node("Alone", "", 0)]
    assert related_classes(["D", "B", "Alone"], relations) == tree
    assert related_classes(["B", "Alone"], Relations()) == []


@given(st.lists(st.sets(st.integers(0, 8), max_size=3), min_size=1, max_size=9), st.sets(st.integers(0, 8)))
def test_every_class_and_ancestor_is_a_line_below_each_of_its_parents(
    above: list[set[int]], chosen: set[int]
) -> None:
    parents = {
        str(i): tuple(str(p) for p in sorted(some) if p < i)
        for i, some in enumerate(above)
        if min(some | {i}) < i
    }
    relations = Relations(parents)
    nodes = class_tree(map(str, chosen), relations)
    shown = relations.with_ancestors(map(str, chosen))
    found = {(node.name, node.parent) for node in nodes}
    assert found == {(name, parent) for name in shown for parent in parents.get(name) or ("",)}
    assert len(found) == len(nodes)
    assert {node.name for node in nodes if not node.again} == {*shown}
    for node, before in zip(nodes[1:], nodes, strict=False):
        assert node.depth <= before.depth + 1


@pytest.mark.complete
def test_a_chain_of_thousands_is_no_recursion() -> None:
    parents = {str(i): (str(i - 1),) for i in range(1, 1500)}
    assert class_tree(["1499"], Relations(parents))[-1].depth == 1499
