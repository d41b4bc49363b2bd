"""The rules by which figures leave a site: what is withheld, how far figures are rounded, bounded losses.

    share       s = k / m of the patient with the most, k of m images
    influence   this patient's labels move a mean over the m images by at most s; without the patient AUROC
                and recall of a class, means over its positives or negatives, differ by at most s / (1 - s),
                the two added
    grid        a figure is rounded to a multiple of the smallest g in {1, 2, 5} x 10^-j with g >= influence,
                and withheld where the influence is more than half of its range
    loss        a probability below e^-5 counts as e^-5, so that no label has a loss above 5
    withheld    what has fewer than `min_count` images; where the total is known, with it the next smallest,
                until at least two parts with `min_count` images together are left out; labels of a
                withheld class enter no figure of the others

Withholding the next smallest is complementary suppression (Cox, JASA 75:377, 1980). At a site with
`min_count` 0 (for losses: `min_loss` 0), as simulated ones are, figures have six digits and none is withheld.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from suture.core.labels import LabelType
from suture.core.privacy import PrivacyConfig
from suture.protocol.messages import rounded

Count = TypeVar("Count", int, NDArray[np.int64], Tensor)

BOUND = 5.0
"""The largest loss of a label."""

MOST = 0.5
"""The largest influence, in parts of a figure's range, that a patient may have on a figure that leaves."""

_GRIDS = tuple(m * 10.0**-j for j in range(6, -1, -1) for m in (1, 2, 5))


def share(patients: NDArray[np.intp], counted: ArrayLike) -> float:
    """Return the largest share that one patient has of what is counted; 1 where nothing is.

    Args:
        patients: number of the patient of each image, [n].
        counted: of each image, such as 1 where it is positive, or its number of known labels, [n].
    """
    found = np.bincount(patients, np.asarray(counted, dtype=np.float64))
    return float(found.max() / found.sum()) if found.sum() else 1.0


def without_one(patients: NDArray[np.intp], y: NDArray[np.float32]) -> float:
    """Return the influence of a patient on the figures of a class: s / (1 - s) of both kinds of images.

    Args:
        patients: as for `share`.
        y: labels of the class, [n]: 1, 0 or NaN.

    Returns:
        infinity where all positives or all negatives are of one patient, or there are none.
    """
    influence = 0.0
    for kind in (y == 1, y == 0):
        found = np.bincount(patients, kind)
        rest = found.sum() - found
        influence = influence + np.divide(found, rest, out=np.full(found.shape, math.inf), where=rest > 0)
    return float(np.max(influence))


def on_grid(value: float | None, influence: float, largest: float = 1.0) -> float | None:
    """Return a figure in [0, largest] rounded to its grid; None where a patient moves it too far."""
    step = step_of(influence, largest)
    return None if value is None or step is None else _nearest(value, step)


def step_of(influence: float, largest: float = 1.0) -> float | None:
    """Return the step to which a figure in [0, largest] is rounded; None where it is withheld."""
    return None if influence > MOST * largest else next(step for step in _GRIDS if step >= influence)


def near(count: Count, step: int) -> Count:
    """Return whole numbers rounded to multiples of a site's `round_counts`, halves up.

    What a site shows is never rounded to 0: it is at least `min_count`, and so half a step (`PrivacyConfig`).
    """
    return (2 * count + step) // (2 * step) * step


def may_be(value: float, influence: float) -> bool:
    """Whether a figure lies on some grid of a figure on which a patient has at least this influence."""
    return any(value == _nearest(value, step) for step in _GRIDS if step >= influence)


def is_multiple(value: float | None, step: float) -> bool:
    """Whether the step is one of a grid, and a figure, if there is one, on it."""
    return step in _GRIDS and (value is None or value == _nearest(value, step))


def _nearest(value: float, step: float) -> float:
    return rounded(round(value / step) * step)


def bounded(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return logits ``[n, c]`` whose losses are at most `largest_loss`; ordinary ones are unchanged."""
    if label_type == "multilabel":
        most = math.log(math.expm1(BOUND))  # its sigmoid is 1 - e^-5
        return logits.clamp(-most, most)
    return torch.log_softmax(logits, dim=1).clamp_min(-BOUND)


def largest_loss(label_type: LabelType, classes: int) -> float:
    """Return the largest loss of an image: bounded probabilities of several classes exceed 1 in sum."""
    return BOUND if label_type == "multilabel" else BOUND + math.log1p((classes - 1) * math.exp(-BOUND))


def training_loss(value: float | None, samples: int, limits: PrivacyConfig) -> float | None:
    """Return the mean loss of local steps as it may leave a site: at most `BOUND`, on its samples' grid.

    What a single sample adds to it is not bounded, which would change the training.
    """
    if value is None or samples < limits.min_loss:
        return None
    return on_grid(min(value, BOUND), BOUND / samples, BOUND) if limits.min_loss else rounded(value)


def complementary(counts: Mapping[str, int], large: Iterable[str], min_count: int) -> list[str]:
    """Return which parts of a known total may be shown; a hidden part fits the total with many values.

    Args:
        counts: of every part; they add up to the total.
        large: the parts that need not be withheld for themselves.
    """
    if not min_count:
        return list(large)
    shown = sorted(large, key=lambda name: counts[name])
    hidden = [name for name in counts if name not in shown]
    while hidden and shown and (len(hidden) < 2 or sum(counts[n] for n in hidden) < min_count):
        hidden.append(shown.pop(0))
    return shown
