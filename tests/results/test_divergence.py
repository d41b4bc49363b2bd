"""Divergences against class counts: the right round and counts, and nothing of a class without images."""

from __future__ import annotations

from dataclasses import replace

from example_run import run_record
from suture.protocol.records import Diagnostic, Run, parse
from suture_results.charts import Chart, Scale
from suture_results.method_sections import divergence_charts

RUN = parse(Run, run_record() | {"selected_round": 2}, "run")


def line(site: str, round_: int, images: dict[str, float], divergence: dict[str, float]) -> Diagnostic:
    return Diagnostic(site, round_, {}, {"images": images, "divergence": divergence})


LINES = [
    line("a", 1, {"Edema": 90, "Mass": 10}, {"Edema": 1.5, "Mass": 2.0}),
    line("a", 2, {"Edema": 90, "Mass": 10}, {"Edema": 0.5, "Mass": 1.0}),
    line("b", 2, {"Edema": 910, "Mass": 0}, {"Edema": 0.25, "Mass": 0.0}),
    Diagnostic("a", 3, {}),
]


def counts(chart: Chart) -> dict[str, list[float]]:
    """Where the dots stand on the logarithmic axis."""
    first, last = chart.x[0], chart.x[-1]
    low, high = (len(tick.text.replace(",", "")) - 1 for tick in (first, last))
    back = Scale(first.at, last.at, low, high)
    return {t.name: [round(10 ** back(x)) for ((x, _),) in t.runs] for t in chart.traces}


def test_a_dot_for_each_class_of_each_site() -> None:
    found = divergence_charts(RUN, LINES)
    assert found is not None
    number, (everywhere, here) = found
    assert number == 2
    near = {"a": [1000, 10], "b": [1000]}
    assert {s: [round(v, -1) for v in x] for s, x in counts(everywhere).items()} == near
    at_site = counts(here)
    assert at_site["a"][1] == 10
    assert abs(at_site["a"][0] - 90) < 5
    assert abs(at_site["b"][0] - 910) < 45
    (_, high), (_, low) = (run[0] for run in here.traces[0].runs)
    assert low < high  # a larger divergence stands higher: at a smaller y


def test_the_last_round_stands_in_for_one_that_was_not_written_down() -> None:
    found = divergence_charts(replace(RUN, selected_round=7), LINES)
    assert found is not None
    assert found[0] == 2
    assert divergence_charts(RUN, []) is None
    assert divergence_charts(RUN, [Diagnostic("a", 1, {})]) is None
