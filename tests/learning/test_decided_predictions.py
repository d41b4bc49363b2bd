"""Decisions beside predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from suture.core.errors import ConfigError
from suture.learning.decided_predictions import read_decisions, with_decisions
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating


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


def test_what_cannot_decide_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no operating points"):
        read_decisions(tmp_path)
    from dataclasses import asdict

    (tmp_path / "model.json").write_text(json.dumps({"decisions": asdict(DECISIONS)}))
    assert read_decisions(tmp_path, "north") == DECISIONS
    with pytest.raises(ConfigError, match="unknown site 'nord'; did you mean 'north'"):
        read_decisions(tmp_path, "nord")
    (tmp_path / "model.json").write_text(json.dumps({"decisions": asdict(DECISIONS) | {"format": 2}}))
    with pytest.raises(ConfigError, match="decisions"):
        read_decisions(tmp_path)
