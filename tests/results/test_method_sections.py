"""What a method adds to a page, by hand: pseudo-labels, shares, weights, divergences, curves of decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from example_run import SITES, history_records, run_record, with_pseudo_labels
from suture.federation.server.selection import weighting
from suture.learning.metrics import wilson
from suture.protocol.decisions import DecisionSettings, Diagrams
from suture.protocol.records import Diagnostic, PseudoLabels, Round, Run, Weighting, parse
from suture_results.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Scale
from suture_results.decision_section import class_charts, class_curves, target_of
from suture_results.method_sections import (
    Checked,
    checked_pseudo_labels,
    divergence_charts,
    pseudo_label_charts,
    row_share_charts,
    row_shares,
    total,
    weight_charts,
)
from suture_results.notes import run_away

RUN = parse(Run, run_record(), "run")
PLAIN = parse(list[Round], history_records(), "history")
HISTORY = parse(list[Round], with_pseudo_labels(history_records()), "history")


def test_a_chart_per_scalar_with_a_line_per_site() -> None:
    positive, negative = pseudo_label_charts(RUN, HISTORY)
    assert [c.title.split()[0] for c in (positive, negative)] == ["Positive", "Negative"]
    assert [t.name for t in positive.traces] == ["harbour", "hillside", "st-anne"]
    assert [len(t.runs) for t in positive.traces] == [1, 2, 1]  # hillside was missing in round 7
    history = [replace(r, phase="later") if r.round >= 3 else r for r in HISTORY]
    (chart,) = pseudo_label_charts(replace(RUN, label_type="multiclass"), history)
    assert chart.title.startswith("Positive")
    assert len(chart.phases) == 1


def test_pseudo_labels_are_summed_over_rounds() -> None:
    lines = [
        Diagnostic("b", 1, {"Mass": PseudoLabels(4, 1), "Edema": PseudoLabels(2, 2)}),
        Diagnostic("a", 1, {"Edema": PseudoLabels(0, 0)}),
        Diagnostic("b", 2, {"Mass": PseudoLabels(6, 4), "Edema": PseudoLabels(0, 0)}),
    ]
    found = checked_pseudo_labels(["Edema", "Mass"], lines)
    assert found == {"b": [Checked("Edema", 2, 2), Checked("Mass", 10, 5)]}
    assert [row.share for row in found["b"]] == [1.0, 0.5]
    assert total(found["b"]) == Checked("All classes", 12, 7)


def shares(history: list[Round]) -> tuple[int, dict[str, dict[str, float | None]]]:
    """The round, and the share of each site in the row of each class; `unchanged` is a site, too."""
    found = row_shares(RUN, history)
    assert found is not None
    number, (block,) = found
    assert block.unchanged <= {"Hernia"}
    return number, {s: dict(zip(block.labels, row, strict=True)) for s, row in block.sites.items()}


def two_rounds(**changes: Any) -> list[Round]:
    """With rows in which "harbour" has been changed in the last."""
    lines = with_pseudo_labels(history_records(2))
    lines[1]["sites"]["harbour"] |= changes
    return parse(list[Round], lines, "history")


def test_shares_of_rows_by_hand() -> None:
    number, found = shares(HISTORY)
    assert number == 8
    assert {site: row["Edema"] for site, row in found.items()} == {  # 1000 of the owner, 150 and 300
        "harbour": pytest.approx(1000 / 1450),
        "hillside": pytest.approx(150 / 1450),
        "st-anne": pytest.approx(300 / 1450),
    }
    assert {row["Hernia"] for row in found.values()} == {None}
    assert found["harbour"]["Fracture"] is None  # it gave the row no weight
    assert set(shares(two_rounds(status="rejected"))[1]["harbour"].values()) == {None}
    # A site that tells no weights counts once in its own rows.
    once = shares(two_rounds(rows={}))[1]["harbour"]
    assert (once["Hernia"], once["Fracture"]) == (1.0, None)
    unchanged = [HISTORY[0], replace(HISTORY[1], status="unchanged")]
    assert shares(unchanged)[0] == 1  # only committed rounds count


def test_shares_over_rounds_end_with_those_of_the_matrix() -> None:
    charts = {chart.title: chart for chart in row_share_charts(RUN, HISTORY)}
    assert set(charts) == {f"{label}, %" for label in RUN.labels if label != "Hernia"}  # its row is unchanged
    expected = {site: 100 * (row["Edema"] or 0) for site, row in shares(HISTORY)[1].items()}
    assert {name: found[-1] for name, found in values(charts["Edema, %"]).items()} == pytest.approx(
        expected, abs=0.1
    )


def test_what_a_method_does_not_send_is_not_drawn() -> None:
    for history in ([], PLAIN):
        assert pseudo_label_charts(RUN, history) == []
        assert row_shares(RUN, history) is None
        assert row_share_charts(RUN, history) == []
    assert row_share_charts(RUN, HISTORY[:1]) == []
    assert checked_pseudo_labels(RUN.labels, []) == {}


def counted(number: int, status: str = "accepted", **rows: dict[str, float]) -> Round:
    """A committed round in which each site counted so many of each class."""
    line = history_records(1)[0] | {"round": number, "status": "committed"}
    template = next(iter(line["sites"].values())) | {"status": status}
    line["sites"] = {site: template | {"rows": own} for site, own in rows.items()}
    return parse(Round, line, "history")


def test_a_row_that_other_sites_take_over_is_reported() -> None:
    """b and c do not annotate Mass: 31 are over ten times as many as the 3 of a, 30 are not."""
    owners = {"Mass": ("a",), "Edema": ("b", "c")}
    calm = counted(1, a={"Mass": 3, "Edema": 20}, b={"Mass": 30, "Edema": 2}, c={"Mass": 0, "Edema": 3})
    wild = counted(2, a={"Mass": 3, "Edema": 0}, b={"Mass": 31, "Edema": 2}, c={"Mass": 900, "Edema": 3})
    assert run_away([calm], owners) == []
    (note,) = run_away([calm, wild], owners)
    assert note.startswith("Mass: from round 2 ")
    assert "(in round 2: b, c)" in note
    # Without counts of an owner, or with counts of 0, ten of another site are still few.
    assert run_away([counted(1, b={"Mass": 10.0})], owners) == []
    assert len(run_away([counted(1, b={"Mass": 11.0})], owners)) == 1
    assert run_away([counted(1, "rejected", b={"Mass": 900.0})], owners) == []
    assert run_away(PLAIN, dict.fromkeys(RUN.labels, ())) == []


IMAGES = {name: site["n"]["train"] for name, site in SITES.items()}


def weighted(*weights: dict[str, float]) -> list[Round]:
    lines = history_records(len(weights))
    for line, given in zip(lines, weights, strict=True):
        for name, site in line["sites"].items():
            site |= {"weight": given.get(name), "status": "accepted" if name in given else "missing"}
    return parse(list[Round], lines, "history")


def values(chart: Chart) -> dict[str, list[float]]:
    """The values of a chart's points, read off its axis."""
    (low, at_low), (high, at_high) = ((float(t.text), t.at) for t in (chart.y[0], chart.y[-1]))
    per = (high - low) / (at_high - at_low)
    return {t.name: [low + (y - at_low) * per for run in t.runs for _, y in run] for t in chart.traces}


def test_weights_and_shares_by_hand() -> None:
    """A quarter and three quarters, then a quarter, a quarter and a half; the third round changed nothing."""
    three = {"harbour": 10.0, "hillside": 10.0, "st-anne": 20.0}
    history = weighted({"harbour": 22.0, "hillside": 66.0}, three, {"harbour": 9.0, "hillside": 1.0})
    history[2] = replace(history[2], status="unchanged")
    found = weighting(IMAGES, history)
    assert found == {
        "rounds": [1, 2],
        "weights": {"harbour": [22, 10], "hillside": [66, 10], "st-anne": [None, 20]},
        "shares": {"harbour": [0.25, 0.25], "hillside": [0.75, 0.25], "st-anne": [None, 0.5]},
        "mean_share": {"harbour": 0.25, "hillside": 0.5, "st-anne": 0.5},
    }
    assert parse(Weighting, found, "weighting").shares["st-anne"] == [None, 0.5]
    for chart, key, unit in zip(weight_charts(RUN, history), ("weights", "shares"), (1, 100), strict=True):
        drawn = {site: [v * unit for v in told if v is not None] for site, told in found[key].items()}
        assert values(chart) == {site: pytest.approx(told, abs=0.05) for site, told in drawn.items()}
        assert all(0 < y < HEIGHT for trace in chart.traces for run in trace.runs for _, y in run)
    site = replace(history[1].sites["hillside"], status="rejected")
    rejected = replace(history[1], sites=history[1].sites | {"hillside": site})
    _, share = weight_charts(RUN, [rejected])
    assert {name: told for name, told in values(share).items() if told} == {
        "harbour": pytest.approx([100 / 3], abs=0.05),
        "st-anne": pytest.approx([200 / 3], abs=0.05),
    }


@pytest.mark.parametrize("weights", [dict.fromkeys(SITES, 1.0), {s: float(n) for s, n in IMAGES.items()}])
def test_sites_that_count_once_or_by_their_images_say_nothing_new(weights: dict[str, float]) -> None:
    assert weighting(IMAGES, weighted(*[weights] * 3)) == {}
    assert weight_charts(RUN, weighted(*[weights] * 3)) == []
    assert weight_charts(RUN, []) == []


def divergence(site: str, round_: int, images: dict[str, float], own: dict[str, float]) -> Diagnostic:
    return Diagnostic(site, round_, {}, {"images": images, "divergence": own})


LINES = [
    divergence("a", 1, {"Edema": 90, "Mass": 10}, {"Edema": 1.5, "Mass": 2.0}),
    divergence("a", 2, {"Edema": 90, "Mass": 10}, {"Edema": 0.5, "Mass": 1.0}),
    divergence("b", 2, {"Edema": 910, "Mass": 0}, {"Edema": 0.25, "Mass": 0.0}),
    Diagnostic("a", 3, {}),
]


def counts(chart: Chart) -> dict[str, list[float]]:
    """Where the dots stand on the logarithmic axis."""
    first, last = chart.x[0], chart.x[-1]
    low, high = (len(tick.text.replace(",", "")) - 1 for tick in (first, last))
    back = Scale(first.at, last.at, low, high)
    return {t.name: [round(10 ** back(x)) for ((x, _),) in t.runs] for t in chart.traces}


@pytest.mark.parametrize("selected", [2, 7])
def test_a_dot_for_each_class_of_each_site(selected: int) -> None:
    """Of the selected round, or the last one that was written down; none of a class without images."""
    found = divergence_charts(replace(RUN, selected_round=selected), LINES)
    assert found is not None
    number, (everywhere, here) = found
    assert number == 2
    near = {"a": [1000, 10], "b": [1000]}
    assert {s: [round(v, -1) for v in x] for s, x in counts(everywhere).items()} == near
    at_site = counts(here)
    assert at_site["a"] == [pytest.approx(90, abs=5), 10]
    assert at_site["b"] == [pytest.approx(910, abs=45)]
    (_, high), (_, low) = (run[0] for run in here.traces[0].runs)
    assert low < high  # a larger divergence stands higher: at a smaller y
    assert divergence_charts(RUN, LINES[-1:]) is divergence_charts(RUN, []) is None


STEPS = ((1.0, 0.0), (1.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 1.0))
FOUND = Diagrams(STEPS, 0.2, ((0.3, 0.5, 10),), (20, 80), (0.5, 0.5))
COUNTED = replace(FOUND, own=(1.0, 0.5))


def data(points: Any) -> list[Any]:
    """Back from positions to the data."""
    across, up = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    found = [((x - LEFT) / across, (HEIGHT - BOTTOM - y) / up) for x, y in points]
    return [pytest.approx(point, abs=1e-3) for point in found]


def test_curves_of_a_class_by_hand() -> None:
    roc, precision, reliability = class_charts(FOUND)
    # Under the steps (0,0) (0,.5) (.5,.5) (.5,1) (1,1): .5 x .5 + .5 x 1.
    assert roc.title.endswith("area 0.75")
    assert data(roc.traces[1].runs[0]) == [(1, 1), (0.5, 1), (0.5, 0.5), (0, 0.5), (0, 0)]
    assert data(roc.traces[2].runs[-1])[0] == (0.5, 0.5)
    # Of recall 1 and specificity .5 at a prevalence of 20 %: .2 / (.2 + .4).
    curve = data(precision.traces[1].runs[0])
    assert curve[1] == (1, 1 / 3)
    assert len(curve) == 4  # where no image is positive there is no precision
    bar, dot = reliability.traces[1].runs
    assert data(dot)[0] == (0.3, 0.5)
    assert data(bar) == [(0.3, 0.2366), (0.3, 0.7634)]
    without = class_charts(replace(FOUND, chosen=None))[0]
    assert [trace.name for trace in without.traces] == [trace.name for trace in roc.traces[:2]]


def test_intervals_of_a_curve_by_hand() -> None:
    """Wilson's of 10 of 20 is .299 to .701, 40 of 80 .393 to .607, 20 of 60 .227 to .459."""
    roc, precision, _ = class_charts(COUNTED)
    band = data(roc.traces[1].band)
    assert (band[2], band[-3]) == ((0.5, 0.7007), (0.5, 0.2993))
    across, along, dot = roc.traces[2].runs
    assert data(across) == [(0.3934, 0.5), (0.6066, 0.5)]
    assert data(along) == [(0.5, 0.2993), (0.5, 0.7007)]
    assert data(dot)[0] == (0.5, 0.5)
    assert data(precision.traces[1].band)[1] == (1, 0.4593)


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
    (site,) = class_curves(FOUND, {"a": replace(COUNTED, own=None)}, ("a",)).sites
    assert site.own is None
    for plot in site.plots[:2]:  # no dot of its own
        cross, ring = plot.traces[2:]
        assert cross.path
        assert not cross.dots
        assert ring.look == "ring"
    (site,) = class_curves(FOUND, {"a": replace(COUNTED, own=None, chosen=None)}, ("a",)).sites
    assert [len(plot.traces) for plot in site.plots[:2]] == [2, 2], "the curves alone"


def test_a_target_is_written_as_the_figures_beside_it() -> None:
    assert "95\N{NARROW NO-BREAK SPACE}%" in target_of(DecisionSettings(rule="sensitivity", sensitivity=0.95))
    assert "90\N{NARROW NO-BREAK SPACE}%" in target_of(DecisionSettings(rule="specificity"))
    assert "5 false alarms" in target_of(DecisionSettings(rule="cost"))
    assert target_of(DecisionSettings(rule="youden"))
