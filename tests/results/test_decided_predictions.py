"""Decisions beside predictions."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from suture.core.errors import ConfigError
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating
from suture_results.decided_predictions import decider, read_decisions, with_decisions


def point(threshold: float | None, calibration: Calibration | None = None) -> Operating:
    thresholds: Any = {} if threshold is None else {"sensitivity": threshold}
    return Operating(thresholds, calibration, 0.5)


DECISIONS = Decisions(
    DecisionSettings(),
    {"Edema": point(0.5, Calibration(1.0, 0.0)), "Mass": point(0.4)},
    {"north": {"Edema": point(0.2, Calibration(2.0, 0.0)), "Mass": point(None)}},
)
FRAME = pd.DataFrame(
    {"Edema": [0.3, 0.6], "Mass": [0.3, 0.4], "Hernia": [0.1, 0.9]}, index=["a.png", "b.png"]
)


def test_a_site_decides_by_its_own_threshold_where_it_has_one() -> None:
    found = with_decisions(FRAME, DECISIONS, "north")
    assert found["Edema decision"].tolist() == ["above", "above"]
    assert found["Edema threshold"].tolist() == ["north", "north"]
    assert found["Mass decision"].tolist() == ["below", "above"]
    assert found["Mass threshold"].tolist() == ["all sites", "all sites"]
    assert found["Hernia decision"].tolist() == ["not validated"] * 2
    assert found["Hernia threshold"].tolist() == ["", ""]
    odds = (0.3 / 0.7) ** 2
    assert found["Edema calibrated"].iloc[0] == pytest.approx(odds / (1 + odds))
    assert np.isnan(found["Mass calibrated"]).all()
    assert found[list(FRAME)].equals(FRAME)


def test_without_a_site_the_threshold_is_that_of_all() -> None:
    found = with_decisions(FRAME, DECISIONS)
    assert found["Edema decision"].tolist() == ["below", "above"]
    assert set(found["Edema threshold"]) == {"all sites"}


def test_another_prevalence_corrects_what_is_calibrated_and_moves_no_rate() -> None:
    # Fitted at a prevalence of 1/2; at 1/10 the odds are a ninth: .3/.7/9 = 1/21.
    stated = {"Edema": 0.1}
    plain, found = with_decisions(FRAME, DECISIONS), with_decisions(FRAME, DECISIONS, prevalence=stated)
    assert found["Edema calibrated"].tolist() == pytest.approx([1 / 22, 1 / 7])
    assert found["Edema decision"].equals(plain["Edema decision"])
    # By cost: a miss costs 5 false alarms, so 1/6 is where they are equal; 1/7 lies below, and 0.6 above.
    by_cost = replace(DECISIONS, settings=DecisionSettings(rule="cost", cost=5))
    with_rule = replace(by_cost, pooled={"Edema": Operating({"cost": 0.2}, Calibration(1.0, 0.0), 0.5)})
    assert with_decisions(FRAME, with_rule)["Edema decision"].tolist() == ["above", "above"]
    moved = with_decisions(FRAME, with_rule, prevalence=stated)
    assert moved["Edema decision"].tolist() == ["below", "below"]
    assert set(moved["Edema threshold"]) == {"stated prevalence"}


@pytest.mark.parametrize(
    ("site", "stated", "message"),
    [
        (None, {"Edema": 0.1}, "with --decide"),
        ("all", {"Oedema": 0.1}, "unknown class 'Oedema'; did you mean 'Edema'"),
        ("all", {"Edema": 1.0}, "the prevalence 1 of Edema is not between 0 and 1"),
        ("all", {"Edema": float("nan")}, "is not between 0 and 1"),
        ("all", {"Mass": 0.1}, "Mass is not calibrated"),
    ],
)
def test_a_prevalence_that_corrects_nothing_is_refused(
    tmp_path: Path, site: str | None, stated: dict[str, float], message: str
) -> None:
    content = {"labels": list(FRAME), "decisions": asdict(DECISIONS)}
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        decider(tmp_path, site, stated)


def test_what_cannot_decide_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no operating points"):
        read_decisions(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"decisions": asdict(DECISIONS)}))
    assert read_decisions(tmp_path, "north") == DECISIONS
    with pytest.raises(ConfigError, match="unknown site 'nord'; did you mean 'north'"):
        read_decisions(tmp_path, "nord")
    (tmp_path / "model.json").write_text(json.dumps({"decisions": asdict(DECISIONS) | {"format": 2}}))
    with pytest.raises(ConfigError, match="decisions"):
        read_decisions(tmp_path)
