"""Decisions beside predictions: calibrated probabilities, and on which side of its threshold an image is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from suture.core.errors import ConfigError, unknown
from suture.core.files import read_json
from suture.core.validation import parse
from suture.learning.calibration import calibrated
from suture.protocol.decisions import Decisions

NOT_VALIDATED = "not validated"

ALL = "all"
"""In place of a site's name: the thresholds of all sites together."""


def read_decisions(folder: Path, site: str = ALL) -> Decisions:
    """Return by what a saved model decides.

    Args:
        site: whose thresholds are wanted, or `ALL`.

    Raises:
        ConfigError: the model has no operating points, or none of that site.
    """
    found = read_json(folder / "model.json").get("decisions")
    if found is None:
        raise ConfigError(
            f"{folder} has no operating points: its job counted no scores. Train it with "
            "--set decision.sensitivity=0.9, or predict without --decide"
        )
    decisions = parse(Decisions, found, f"{folder / 'model.json'}: decisions")
    if site not in (ALL, *decisions.sites):
        raise unknown("site", site, (ALL, *decisions.sites))
    return decisions


def decider(folder: Path, site: str | None) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what adds the decisions of a saved model to predictions; without a site's name, nothing.

    Raises:
        ConfigError: as `read_decisions`.
    """
    if site is None:
        return lambda frame: frame
    return partial(with_decisions, decisions=read_decisions(folder, site), site=site)


def with_decisions(frame: pd.DataFrame, decisions: Decisions, site: str = ALL) -> pd.DataFrame:
    """Return predictions with three more columns for each class.

    - ``CLASS calibrated``: the calibrated probability, empty where there is none;
    - ``CLASS decision``: ``above`` or ``below`` the threshold of the job's rule, or ``not validated``;
    - ``CLASS threshold``: whose it is: the name of the site, or ``all sites``.

    Args:
        frame: probabilities, a column for each class.
        site: whose thresholds are used; of a class that it has none of, those of all.
    """
    columns: dict[str, object] = {}
    for label in frame.columns:
        columns |= {label: frame[label]} | _decided(frame[label], label, decisions, site)
    found = pd.DataFrame(columns, index=frame.index)
    found.attrs = frame.attrs
    return found


def threshold_of(label: str, decisions: Decisions, site: str = ALL) -> tuple[str, float | None]:
    """Return whose threshold decides a class at a site, and its value; ("", None) where there is none."""
    found, rule = decisions.of(site, label), decisions.settings.rule
    for whose, point in ((site, found.own), ("all sites", found.pooled)):
        if point and rule in point.thresholds:
            return whose, point.thresholds[rule]
    return "", None


def _decided(p: pd.Series[float], label: str, decisions: Decisions, site: str) -> dict[str, object]:
    found = decisions.of(site, label)
    line = found.fitted.calibration if found.fitted else None
    better = calibrated(np.asarray(p, dtype=np.float64), line) if line else np.nan
    by, threshold = threshold_of(label, decisions, site)
    decision = NOT_VALIDATED if threshold is None else np.where(p >= threshold, "above", "below")
    return {f"{label} calibrated": better, f"{label} decision": decision, f"{label} threshold": by}
