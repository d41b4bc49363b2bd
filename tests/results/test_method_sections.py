from dataclasses import replace
from typing import Any

import pytest

from example_run import history_records, run_record, with_pseudo_labels
from suture.protocol.records import Diagnostic, PseudoLabels, Round, Run, parse
from suture_results.method_sections import (
    Checked,
    checked_pseudo_labels,
    pseudo_label_charts,
    row_share_charts,
    row_shares,
    total,
)
from suture_results.notes import run_away

RUN = parse(Run, run_record(), "run")
PLAIN = parse(list[Round], history_records(), "history")
HISTORY = parse(list[Round], with_pseudo_labels(history_records()), "history")


def rounds(**changes: Any) -> list[Round]:
    """Two rounds with rows in which "harbour" has been changed in the last."""
    lines = with_pseudo_labels(history_records(2))
    lines[1]["sites"]["harbour"] |= changes
    return parse(list[Round], lines, "history")


def test_a_chart_per_scalar_with_a_line_per_site() -> None:
    positive, negative = pseudo_label_charts(RUN, HISTORY)
    assert [c.title.split()[0] for c in (positive, negative)] == ["Positive", "Negative"]
    assert [t.name for t in positive.traces] == ["harbour", "hillside", "st-anne"]
    assert [len(t.runs) for t in positive.traces] == [1, 2, 1]  # hillside was missing in round 7


def test_a_single_label_task_has_one_chart() -> None:
    history = [replace(r, phase="later") if r.round >= 3 else r for r in HISTORY]
    (chart,) = pseudo_label_charts(replace(RUN, label_type="multiclass"), history)
    assert chart.title.startswith("Positive")
    assert len(chart.phases) == 1


def test_other_methods_have_nothing_to_show() -> None:
    for history in ([], PLAIN):
        assert pseudo_label_charts(RUN, history) == []
        assert row_shares(RUN, history) is None
    assert checked_pseudo_labels(RUN.labels, []) == {}


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


def test_shares_by_hand() -> None:
    found = row_shares(RUN, HISTORY)
    assert found is not None
    number, (block,) = found
    assert number == 8
    assert block.unchanged == {"Hernia"}
    column = {site: row[block.labels.index("Edema")] for site, row in block.sites.items()}
    assert column == {  # 1000 of the owner, 150 and 300
        "harbour": pytest.approx(1000 / 1450),
        "hillside": pytest.approx(150 / 1450),
        "st-anne": pytest.approx(300 / 1450),
    }
    assert all(row[block.labels.index("Hernia")] is None for row in block.sites.values())
    assert block.sites["harbour"][block.labels.index("Fracture")] is None  # it gave the row no weight


def test_an_update_that_was_refused_has_no_share() -> None:
    found = row_shares(RUN, rounds(status="rejected"))
    assert found is not None
    assert set(found[1][0].sites["harbour"]) == {None}


def test_a_site_that_tells_no_weights_counts_once_in_its_own_rows() -> None:
    found = row_shares(RUN, rounds(rows={}))
    assert found is not None
    block = found[1][0]
    assert block.sites["harbour"][block.labels.index("Hernia")] == 1.0
    assert block.sites["harbour"][block.labels.index("Fracture")] is None


def test_shares_over_rounds() -> None:
    """A chart a class, a line a site; the last points are the shares of the matrix."""
    charts = {chart.title: chart for chart in row_share_charts(RUN, HISTORY)}
    assert set(charts) == {f"{label}, %" for label in RUN.labels if label != "Hernia"}  # its row is unchanged
    edema = charts["Edema, %"]
    assert [trace.name for trace in edema.traces] == list(RUN.sites)
    found = row_shares(RUN, HISTORY)
    assert found is not None
    block = found[1][0]
    heights = {trace.name: trace.runs[-1][-1][1] for trace in edema.traces}
    expected = {site: row[block.labels.index("Edema")] for site, row in block.sites.items()}
    low, high = edema.y[0], edema.y[-1]
    for site, y in heights.items():  # pixels back to per cent, along the axis
        at = (y - low.at) / (high.at - low.at)
        share = float(low.text) + at * (float(high.text) - float(low.text))
        assert share == pytest.approx(100 * expected[site], abs=0.1)
    assert row_share_charts(RUN, PLAIN) == []
    assert row_share_charts(RUN, HISTORY[:1]) == []


def test_only_committed_rounds_count() -> None:
    lines = with_pseudo_labels(history_records(3))
    lines[2]["status"] = "unchanged"
    found = row_shares(RUN, parse(list[Round], lines, "history"))
    assert found is not None
    assert found[0] == 2


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
