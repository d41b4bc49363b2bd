"""The curves of a class as positions in an SVG."""

from __future__ import annotations

import pytest

from suture.protocol.decisions import Diagrams
from suture.reports.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from suture.reports.decision_charts import class_charts

FOUND = Diagrams(
    ((1.0, 0.0), (1.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 1.0)), 0.2, ((0.3, 0.5, 10),), (0.5, 0.5)
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
    assert data(roc.traces[2].runs[0][0]) == pytest.approx((0.5, 0.5), abs=1e-3)
    # Of recall 1 and specificity .5 at a prevalence of 20 %: .2 / (.2 + .4).
    curve = [data(point) for point in precision.traces[1].runs[0]]
    assert curve[1] == pytest.approx((1, 1 / 3), abs=1e-3)
    assert len(curve) == 4  # where no image is positive there is no precision
    bar, dot = reliability.traces[1].runs
    assert data(dot[0]) == pytest.approx((0.3, 0.5), abs=1e-3)
    assert [data(point)[1] for point in bar] == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_without_a_chosen_threshold_there_is_no_dot() -> None:
    charts = class_charts(Diagrams(FOUND.rates, 0.2, FOUND.reliability))
    assert [trace.name for trace in charts[0].traces] == ["no skill", "all sites"]
