"""suture_results.decision_section: what the rule of a job aims at, in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_run import write_decided_run
from suture.protocol.decisions import DecisionSettings, Rule
from suture_results.decision_section import target_of
from suture_results.report import render_report


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("sensitivity", "a sensitivity of 95\N{NARROW NO-BREAK SPACE}%"),
        ("specificity", "a specificity of 90\N{NARROW NO-BREAK SPACE}%"),
        ("youden", "the largest sum of sensitivity and specificity"),
        ("cost", "the lowest cost, if a missed finding costs as much as 5 false alarms"),
    ],
)
def test_a_target_is_written_as_the_figures_beside_it(rule: Rule, words: str) -> None:
    assert target_of(DecisionSettings(rule=rule, sensitivity=0.95)) == words


@pytest.mark.complete
@pytest.mark.parametrize(
    ("rule", "target", "missed"),
    [
        ("sensitivity", 0.9, True),
        ("sensitivity", 0.854, False),
        ("specificity", 0.8, False),
        ("youden", 1.0, False),
    ],
)
def test_a_rate_below_its_target_is_marked(rule: str, target: float, missed: bool, tmp_path: Path) -> None:
    """The run of the example has 85 % and 80 % at each threshold."""
    folder = write_decided_run(tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    settings = metrics["decisions"]["settings"]
    settings |= {"rule": rule} | ({rule: target} if rule != "youden" else {})
    for found in (metrics["decisions"]["pooled"], *metrics["decisions"]["sites"].values()):
        for one in found.values():
            one["thresholds"] = {rule: 0.3}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    assert ('class="num missed"' in render_report(folder)) == missed
