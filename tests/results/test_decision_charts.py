"""The curves of a class as positions in an SVG."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from example_run import write_decided_run
from suture.core.files import write_json
from suture.learning.metrics import wilson
from suture.protocol.decisions import Diagrams
from suture_results.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from suture_results.decision_section import class_charts, class_curves
from suture_results.report import render_report

FOUND = Diagrams(
    ((1.0, 0.0), (1.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 1.0)), 0.2, ((0.3, 0.5, 10),), (20, 80), (0.5, 0.5)
)


def data(point: tuple[float, float]) -> tuple[float, float]:
    """Back from a position to the data."""
    x, y = point
    return (x - LEFT) / (WIDTH - RIGHT - LEFT), (HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP)


def test_three_charts_by_hand() -> None:
    roc, precision, reliability = class_charts(FOUND)
    # Under the steps (0,0) (0,.5) (.5,.5) (.5,1) (1,1): .5 x .5 + .5 x 1.
    assert roc.title.endswith("area 0.75")
    assert [trace.name for trace in roc.traces] == ["no skill", "all sites", "threshold"]
    assert [data(point) for point in roc.traces[1].runs[0]] == [
        pytest.approx(point, abs=1e-3) for point in [(1, 1), (0.5, 1), (0.5, 0.5), (0, 0.5), (0, 0)]
    ]
    assert data(roc.traces[2].runs[-1][0]) == pytest.approx((0.5, 0.5), abs=1e-3)
    # Of recall 1 and specificity .5 at a prevalence of 20 %: .2 / (.2 + .4).
    curve = [data(point) for point in precision.traces[1].runs[0]]
    assert curve[1] == pytest.approx((1, 1 / 3), abs=1e-3)
    assert len(curve) == 4  # where no image is positive there is no precision
    bar, dot = reliability.traces[1].runs
    assert data(dot[0]) == pytest.approx((0.3, 0.5), abs=1e-3)
    assert [data(point)[1] for point in bar] == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_without_a_chosen_threshold_there_is_no_dot() -> None:
    charts = class_charts(replace(FOUND, chosen=None))
    assert [trace.name for trace in charts[0].traces] == ["no skill", "all sites"]


COUNTED = replace(FOUND, own=(1.0, 0.5))


def test_intervals_of_a_curve_by_hand() -> None:
    """Wilson's of 10 of 20 is .299 to .701, 40 of 80 .393 to .607, 20 of 60 .227 to .459."""
    roc, precision, _ = class_charts(COUNTED)
    band = [data(point) for point in roc.traces[1].band]
    assert band[2] == pytest.approx((0.5, 0.7007), abs=1e-3)
    assert band[-3] == pytest.approx((0.5, 0.2993), abs=1e-3)
    across, along, dot = roc.traces[2].runs
    assert [data(p) for p in across] == [pytest.approx(p, abs=1e-3) for p in [(0.3934, 0.5), (0.6066, 0.5)]]
    assert [data(p) for p in along] == [pytest.approx(p, abs=1e-3) for p in [(0.5, 0.2993), (0.5, 0.7007)]]
    assert data(dot[0]) == pytest.approx((0.5, 0.5), abs=1e-3)
    band = [data(point) for point in precision.traces[1].band]
    assert band[1] == pytest.approx((1, 0.4593), abs=1e-3)


def test_a_site_lies_over_all_sites_with_its_own_point_and_theirs() -> None:
    found = class_curves(FOUND, {"harbor": COUNTED}, ("harbor", "lakeside"))
    assert found.without == ["lakeside"]
    (harbor,) = found.sites
    assert (harbor.images, harbor.area) == ((20, 80), 0.75)
    assert harbor.own == (wilson(1.0, 20), wilson(0.5, 80))
    assert harbor.pooled == (wilson(0.5, 20), wilson(0.5, 80))
    roc, precision, reliability = harbor.plots  # positions are 4 + 100 times a rate
    under, line, own, ring = roc.traces
    assert line.path == "M104,4L54,4L54,54L4,54L4,104" == under.path
    assert (own.dots, ring.dots, ring.look) == ([(54.0, 4.0)], [(54.0, 54.0)], "ring")
    assert precision.traces[2].dots == [(104.0, 70.67)]
    _, bins = reliability.traces
    assert (bins.dots, bins.path) == ([(34.0, 54.0)], "M34,80.34L34,27.66")


def test_a_site_without_a_threshold_of_its_own_has_no_dot() -> None:
    (site,) = class_curves(FOUND, {"a": replace(COUNTED, own=None)}, ("a",)).sites
    assert site.own is None
    for plot in site.plots[:2]:
        cross, ring = plot.traces[2:]
        assert cross.path
        assert not cross.dots
        assert ring.look == "ring"
    (site,) = class_curves(FOUND, {"a": replace(COUNTED, own=None, chosen=None)}, ("a",)).sites
    assert [len(plot.traces) for plot in site.plots[:2]] == [2, 2], "the curves alone"


@pytest.mark.complete
def test_a_class_without_curves_is_named_and_sites_without_any_are_left_out(tmp_path: Path) -> None:
    folder = write_decided_run(tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    decisions = metrics["decisions"]
    del decisions["diagrams"]["Nodule"]
    write_json(folder / "metrics.json", metrics)
    page = render_report(folder)
    assert "with or without the class: Nodule." in page
    assert "<summary>Nodule at" not in page
    decisions["site_diagrams"] = {site: {} for site in decisions["site_diagrams"]}
    write_json(folder / "metrics.json", metrics)
    page = render_report(folder)
    assert "(ROC), area 0." in page
    assert "A small plot is of one site" not in page
