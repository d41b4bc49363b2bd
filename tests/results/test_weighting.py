"""The charts of site weights, which exist only where the weights carry information."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from example_run import SITES, history_records, run_record
from suture.federation.server.selection import weighting
from suture.protocol.records import Round, Run, Weighting, parse
from suture_results.charts import HEIGHT, Chart
from suture_results.method_sections import meaning_of_weights, weight_charts

RUN = parse(Run, run_record(), "run")


def weighted(weights: list[dict[str, float]]) -> list[Round]:
    lines = history_records(len(weights))
    for line, given in zip(lines, weights, strict=True):
        for name, site in line["sites"].items():
            site |= {"weight": given.get(name), "status": "accepted" if name in given else "missing"}
    return parse(list[Round], lines, "history")


def values(chart: Chart) -> dict[str, list[float]]:
    """Return the values of a chart's points, read off its axis."""
    (low, at_low), (high, at_high) = ((float(t.text), t.at) for t in (chart.y[0], chart.y[-1]))
    per = (high - low) / (at_high - at_low)
    return {t.name: [low + (y - at_low) * per for run in t.runs for _, y in run] for t in chart.traces}


def test_weights_and_shares_by_hand() -> None:
    """22 and 66 are a quarter and three quarters; then three sites of 10, 10 and 20."""
    history = weighted(
        [
            {"harbour": 22.0, "hillside": 66.0},
            {"harbour": 10.0, "hillside": 10.0, "st-anne": 20.0},
        ]
    )
    weight, share = weight_charts(RUN, history)
    assert values(weight) == {
        "harbour": pytest.approx([22, 10], abs=0.05),
        "hillside": pytest.approx([66, 10], abs=0.05),
        "st-anne": pytest.approx([20], abs=0.05),
    }
    assert values(share) == {
        "harbour": pytest.approx([25, 25], abs=0.05),
        "hillside": pytest.approx([75, 25], abs=0.05),
        "st-anne": pytest.approx([50], abs=0.05),
    }
    assert all(0 < y < HEIGHT for trace in share.traces for run in trace.runs for _, y in run)


@pytest.mark.parametrize(
    "weights", [dict.fromkeys(SITES, 1.0), {s: float(v["n"]["train"]) for s, v in SITES.items()}]
)
def test_sites_that_count_once_or_by_their_images_are_not_drawn(weights: dict[str, float]) -> None:
    assert weight_charts(RUN, weighted([weights] * 3)) == []
    assert weight_charts(RUN, []) == []


def test_only_merged_updates_have_a_weight() -> None:
    """Of a rejected update, and of a round that changed nothing, no weight was used."""
    lines: list[dict[str, Any]] = history_records(2)
    for line in lines:
        line["sites"]["harbour"] |= {"weight": 30.0}
        line["sites"]["hillside"] |= {"weight": 10.0, "status": "rejected"}
        line["sites"]["st-anne"] |= {"weight": 10.0}
    lines[1]["status"] = "unchanged"
    _, share = weight_charts(RUN, parse(list[Round], lines, "history"))
    assert {name: found for name, found in values(share).items() if found} == {
        "harbour": pytest.approx([75], abs=0.05),
        "st-anne": pytest.approx([25], abs=0.05),
    }


IMAGES = {name: site["n"]["train"] for name, site in SITES.items()}


def test_the_same_as_numbers() -> None:
    """A quarter and three quarters, then a quarter, a quarter and a half; the third round changed nothing."""
    lines = weighted(
        [
            {"harbour": 22.0, "hillside": 66.0},
            {"harbour": 10.0, "hillside": 10.0, "st-anne": 20.0},
            {"harbour": 9.0, "hillside": 1.0, "st-anne": 1.0},
        ]
    )
    found = weighting(IMAGES, [*lines[:2], replace(lines[2], status="unchanged")])
    assert found == {
        "rounds": [1, 2],
        "weights": {"harbour": [22, 10], "hillside": [66, 10], "st-anne": [None, 20]},
        "shares": {"harbour": [0.25, 0.25], "hillside": [0.75, 0.25], "st-anne": [None, 0.5]},
        "mean_share": {"harbour": 0.25, "hillside": 0.5, "st-anne": 0.5},
    }
    assert parse(Weighting, found, "weighting").shares["st-anne"] == [None, 0.5]


@pytest.mark.parametrize("weights", [dict.fromkeys(SITES, 1.0), {s: float(n) for s, n in IMAGES.items()}])
def test_weights_that_say_nothing_new_are_not_written(weights: dict[str, float]) -> None:
    assert weighting(IMAGES, weighted([weights] * 3)) == {}


def test_the_method_says_what_a_weight_is() -> None:
    assert meaning_of_weights(RUN) == "the site's weight in the mean"
    assert meaning_of_weights(parse(Run, run_record() | {"egress": []}, "run")) is None
