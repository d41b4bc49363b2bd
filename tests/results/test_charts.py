import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from suture_results.charts import Scale, Series, bar_chart, line_chart, ticks


def test_a_scale_maps_its_ends_onto_its_ends() -> None:
    scale = Scale(0.5, 1.0, 10.0, 110.0)
    assert [scale(v) for v in (0.5, 0.75, 1.0)] == [10.0, 60.0, 110.0]


def test_a_line_breaks_where_a_value_is_missing() -> None:
    chart = line_chart("loss", [1, 2, 3, 4], [Series("a", [1.0, 2.0, None, 3.0])])
    assert chart is not None
    assert [len(run) for run in chart.traces[0].runs] == [2, 1]


def test_a_higher_value_lies_higher() -> None:
    chart = line_chart("loss", [1, 2], [Series("a", [1.0, 2.0])], selected=2)
    assert chart is not None
    (first, second) = chart.traces[0].runs[0]
    assert first[0] < second[0]
    assert first[1] > second[1]  # y grows downwards
    assert chart.selected == second[0]


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
    chart = line_chart("AUROC", [1, 2], [Series("a", [low, 1.0])])
    assert chart is not None
    assert max(len(tick.text) for tick in chart.y) == digits
    assert chart.left - 7 >= 7 * (digits - 1)
    assert all(chart.left <= tick.at <= chart.right for tick in chart.x)


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart("loss", [1], [Series("a", [None])]) is None
    assert bar_chart("bytes", [1], []) is None


@given(st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=30))
@example([5e-324])
@example([-5e-324, 5e-324])
@example([1e-308, 3e-308])
@example([1.0, 1.0 + 2**-52])
def test_every_mark_lies_within_the_frame(values: list[float | None]) -> None:
    rounds = list(range(1, len(values) + 1))
    chart = line_chart("any", rounds, [Series("a", values)], selected=1)
    if chart is None:
        assert all(v is None for v in values)
        return
    for run in chart.traces[0].runs:
        for x, y in run:
            assert chart.left <= x <= chart.right
            assert chart.top <= y <= chart.bottom


def test_ticks_are_round_and_written_alike() -> None:
    assert [t.text for t in ticks(0.52, 0.78, most=4)] == ["0.5", "0.6", "0.7", "0.8"]
