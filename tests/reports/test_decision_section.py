"""suture.reports.decision_section: what the rule of a job aims at, in words."""

from __future__ import annotations

import pytest

from suture.protocol.decisions import DecisionSettings, Rule
from suture.reports.decision_section import target_of


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
