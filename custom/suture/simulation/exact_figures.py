"""What the sites' limits of disclosure would do with the figures of a study that runs on one machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from suture.data.config import SiteConfig
from suture.data.readers import read_table
from suture.learning.evaluation import influences
from suture.protocol.disclosure import step_of


def without_limits(configs: Mapping[str, SiteConfig]) -> str:
    """Return the sentence that says so, of the validation figures of each site.

    Args:
        configs: of each site, with the limits that it has in a federation.
    """
    changes = "; ".join(f"{site} {change}" for site, config in configs.items() if (change := _change(config)))
    here = "Figures are exact: all sites are on this machine."
    if not changes:
        return f"{here} The sites' limits of disclosure would change none."
    return f"{here} With the sites' limits of disclosure, as in a federation (or with --limits), {changes}."


def _change(config: SiteConfig) -> str:
    """What the limits of a site withhold and round of its validation figures; empty where nothing."""
    limits, part = config.privacy, read_table(config.data).table.of("validation")
    if not len(part) or not (limits.min_count or limits.min_loss):
        return ""
    _, patients = np.unique(np.asarray(part.patients), return_inverse=True)
    shown = influences(part.labels, part.y, patients, part.labels.label_type, limits)
    hidden = [name for name in part.labels if limits.min_count and name not in shown]
    steps = sorted({step for moved in shown.values() if (step := step_of(moved)) is not None})
    seen = [column for column, name in enumerate(part.labels) if name not in hidden]
    lossless = (~np.isnan(part.y[:, seen])).any(axis=1).sum() < limits.min_loss
    withheld = [*(["its loss"] if lossless else []), *hidden]
    said = [f"withholds {', '.join(withheld)}"] if withheld else []
    if limits.min_count and steps:
        between = f"{steps[0]:g}" if len(steps) == 1 else f"{steps[0]:g} to {steps[-1]:g}"
        said.append(f"rounds AUROC to steps of {between}")
    return " and ".join(said)
