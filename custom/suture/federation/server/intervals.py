"""Intervals of means over the sites, from what each site sends: its AUROCs with their own 95 % intervals.

A site's interval is of a bootstrap over its own test patients. Patients of different sites are different
people, so the errors of the sites are independent and their variances add. The intervals are about other
patients of the same sites; about other sites they say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from suture.protocol.messages import ClassScore

Interval = tuple[float, float]


def of_class(scores: Sequence[ClassScore]) -> Interval | None:
    """Return the 95 % interval of the unweighted mean AUROC of one class over sites.

    Half its width is the root of the sum of the sites' squared half-widths, over their number: the normal
    approximation. The interval of a single site stands as it is.

    Args:
        scores: of the sites that define the AUROC.

    Returns:
        None without a score, or where one has no interval.
    """
    if len(scores) == 1 and (only := scores[0]).low is not None and only.high is not None:
        return only.low, only.high
    share = 1 / max(1, len(scores))
    return _around([[(score, share)] for score in scores])


def of_mean(sites: Mapping[str, Mapping[str, ClassScore]]) -> Interval | None:
    """Return an interval, of at least 95 %, of the mean over classes of their mean AUROCs over sites.

    The classes of one site are measured on the same patients, and how much their errors go together is not
    sent. The standard deviation of a weighted sum is at most the weighted sum of the standard deviations
    (Cauchy-Schwarz), which is taken for each site; over sites the variances add. So the interval is too wide
    rather than too narrow.

    Args:
        sites: the scores of each site by class; those without an AUROC do not count.

    Returns:
        None where no class, or not every defined one, has an interval.
    """
    defined = {site: {n: s for n, s in at.items() if s.auroc is not None} for site, at in sites.items()}
    names = {name for at in defined.values() for name in at}
    owners = {name: sum(name in at for at in defined.values()) for name in names}
    parts = [
        [(score, 1 / (len(names) * owners[name])) for name, score in at.items()] for at in defined.values()
    ]
    return _around(parts)


def _around(parts: Sequence[Sequence[tuple[ClassScore, float]]]) -> Interval | None:
    """Return the interval of a weighted sum of AUROCs; errors add within a part, variances over the parts.

    Args:
        parts: the scores of each part with their weights.
    """
    bounds = [(s.low, s.high, share) for part in parts for s, share in part]
    if not bounds or any(low is None or high is None for low, high, _ in bounds):
        return None
    middle = math.fsum((s.auroc or 0.0) * share for part in parts for s, share in part)
    width = math.hypot(*(math.fsum(_half(s) * share for s, share in part) for part in parts))
    return max(0.0, middle - width), min(1.0, middle + width)


def _half(score: ClassScore) -> float:
    """Return half the width of a score's interval, which it has."""
    return ((score.high or 0.0) - (score.low or 0.0)) / 2
