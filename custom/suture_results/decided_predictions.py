"""Decisions beside predictions: calibrated probabilities, and on which side of its threshold an image is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from suture.core.errors import ConfigError, check_known
from suture.core.files import read_json
from suture.core.validation import parse
from suture.learning.calibration import at_prevalence, calibrate
from suture.protocol.decisions import Decisions

NOT_VALIDATED = "not validated"

STATED = "stated prevalence"
"""In place of whose threshold decides: the cost of errors at a prevalence that the user states."""

ALL = "all"
"""In place of a site's name: the thresholds of all sites together."""


def decisions_of(folder: Path) -> Decisions | None:
    """Return by what a saved model decides; None where it has no operating points.

    Raises:
        ConfigError: there is no model, or its operating points are damaged.
    """
    found = read_json(folder / "model.json").get("decisions")
    return None if found is None else parse(Decisions, found, f"{folder / 'model.json'}: decisions")


def read_decisions(folder: Path, site: str = ALL) -> Decisions:
    """Return by what a saved model decides.

    Args:
        site: whose thresholds are wanted, or `ALL`.

    Raises:
        ConfigError: the model has no operating points, or none of that site.
    """
    decisions = decisions_of(folder)
    if decisions is None:
        raise ConfigError(
            f"{folder} has no operating points, because its job did not count scores. Train it with "
            "--set decision.sensitivity=0.9, or predict without --decide"
        )
    check_known("site", site, (ALL, *decisions.sites))
    return decisions


def blank_decisions(frame: pd.DataFrame) -> pd.DataFrame:
    """Return predictions as they are."""
    return frame


def decider(
    folder: Path, site: str | None, prevalence: Mapping[str, float] | None = None
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what adds the decisions of a saved model to predictions; without a site's name, nothing.

    Args:
        prevalence: see `with_decisions`.

    Raises:
        ConfigError: as `read_decisions`; or a prevalence without a site's name, outside of (0, 1), or of a
            class that the model lacks or does not calibrate.
    """
    stated = prevalence or {}
    if site is None:
        if stated:
            raise ConfigError("--prevalence corrects calibrated probabilities; name their site with --decide")
        return blank_decisions
    decisions = read_decisions(folder, site)
    for label, value in stated.items():
        _check_prevalence(label, value, decisions, site, read_json(folder / "model.json")["labels"])
    return partial(with_decisions, decisions=decisions, site=site, prevalence=stated)


def _check_prevalence(
    label: str, value: float, decisions: Decisions, site: str, labels: Sequence[str]
) -> None:
    check_known("class", label, labels)
    if not 0 < value < 1:
        raise ConfigError(f"the prevalence {value:g} of {label} is not between 0 and 1")
    fitted = decisions.of(site, label).fitted
    if fitted is None or fitted.calibration is None or not 0 < fitted.prevalence < 1:
        raise ConfigError(f"{label} is not calibrated, so a prevalence cannot correct it; leave it out")


def with_decisions(
    frame: pd.DataFrame,
    decisions: Decisions,
    site: str = ALL,
    prevalence: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Return predictions with three more columns for each class.

    - ``CLASS calibrated``: the calibrated probability, empty where there is none;
    - ``CLASS decision``: ``above`` or ``below`` the threshold of the job's rule, or ``not validated``;
    - ``CLASS threshold``: whose it is: the name of the site, or ``all sites``; or `STATED`.

    Where a prevalence is stated, calibrated probabilities are those of `at_prevalence`. Sensitivity and
    specificity do not depend on it, and neither do the decisions of the rules that look at them alone. The
    rule ``cost`` then decides by the calibrated probability: positive at and above 1 / (1 + cost), from
    where on the expected cost of a miss is not less than that of a false alarm (Elkan, IJCAI 2001, Eq. 2).

    Args:
        frame: probabilities, a column for each class.
        site: whose thresholds are used; of a class that it has none of, those of all.
        prevalence: of calibrated classes, where it is not that of the images that they were fitted to.
    """
    columns: dict[str, object] = {}
    for label in frame.columns:
        stated = (prevalence or {}).get(label)
        columns |= {label: frame[label]} | _decide(frame[label], label, decisions, site, stated)
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


def _decide(
    p: pd.Series[float], label: str, decisions: Decisions, site: str, stated: float | None
) -> dict[str, object]:
    found, rule = decisions.of(site, label), decisions.settings.rule
    fitted, better = found.fitted, None
    if fitted and fitted.calibration:
        better = calibrate(np.asarray(p, dtype=np.float64), fitted.calibration)
        if stated is not None:
            better = at_prevalence(better, fitted.prevalence, stated)
    by, threshold = threshold_of(label, decisions, site)
    decision: object = NOT_VALIDATED
    if threshold is not None:
        above = np.asarray(p >= threshold)
        if rule == "cost" and stated is not None and better is not None:
            above, by = better >= 1 / (1 + decisions.settings.cost), STATED
        decision = np.where(above, "above", "below")
    return {
        f"{label} calibrated": np.nan if better is None else better,
        f"{label} decision": decision,
        f"{label} threshold": by,
    }
