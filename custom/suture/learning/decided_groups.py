"""How the images with each value of a site's attribute are decided, as far as it may leave the site.

A group that is shown has at least `min_count` images with, and as many without, each class that is shown of
it. The groups make up the images of a class, whose number is known; so further groups are withheld where the
number of one would follow (`suture.protocol.disclosure.complementary`). Where each image has one label, the
classes make up a group as well: it is shown for all classes or for none, and must then also have `min_count`
images of the other classes together, or the site none. These are all classes that the site shows, decided or
not: else a server would ask for one class at a time, and subtract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.metrics import Floats, rates
from suture.protocol.decisions import DecidedGroup
from suture.protocol.disclosure import complementary, near, on_grid, without_one
from suture.protocol.messages import rounded

_Cells = Mapping[str, tuple[int, int]]
"""Images with and without a class in each group; the groups make up the class's images."""


def decided_groups(
    part: Samples,
    p: Floats,
    labels: LabelSet,
    thresholds: Mapping[str, float],
    values: Iterable[str],
    limits: PrivacyConfig,
    visible: Iterable[str] = (),
) -> dict[str, dict[str, DecidedGroup]]:
    """Return how well the images of each group are decided, by class.

    Args:
        part: the samples; the columns of their y, and of the probabilities ``[n, c]``, are those of `labels`.
        thresholds: of each class that is decided and not withheld.
        values: the groups whose number of images leaves the site.
        visible: all classes that are not withheld, decided or not.
    """
    values, columns = sorted(values), {name: labels.index(name) for name in thresholds}
    if labels.label_type == "multiclass":
        every = _partition(part, sorted({*columns.values(), *map(labels.index, visible)}))
        shown = dict.fromkeys(columns, shown_groups(every, values, limits.min_count))
    else:
        cells = {name: _cells(part.attributes, part.y[:, at].numpy()) for name, at in columns.items()}
        shown = {name: shown_groups([found], values, limits.min_count) for name, found in cells.items()}
    y, attributes = part.y.numpy(), np.asarray(part.attributes)
    rows = {value: attributes == value for value in values}
    return {
        name: {
            value: _group(y[own, at], p[own, at] >= thresholds[name], part.patient_numbers[own], limits)
            for value, own in rows.items()
            if value in shown[name]
        }
        for name, at in columns.items()
    }


def shown_groups(cells: Sequence[_Cells], values: Iterable[str], min_count: int) -> list[str]:
    """Return the groups whose numbers of images may be shown, for all of some classes.

    Args:
        cells: of each class, and of what else has a known total over the groups.
        values: the groups that may be shown at all.
    """
    shown = [value for value in values if all(min(found[value]) >= min_count for found in cells)]
    before = -1
    while before != len(shown):
        before = len(shown)
        for found in cells:
            for kind in (0, 1):
                counts = {value: pair[kind] for value, pair in found.items()}
                shown = complementary(counts, shown, min_count)
    return sorted(shown)


def _cells(attributes: Sequence[str], y: NDArray[np.float32]) -> _Cells:
    kinds = [Counter(compress(attributes, y == kind)) for kind in (1, 0)]
    return {value: (kinds[0][value], kinds[1][value]) for value in dict.fromkeys(attributes)}


def _partition(part: Samples, columns: Sequence[int]) -> list[_Cells]:
    """Return the cells of some classes, and of the images of all others, if there are any."""
    cells = [_cells(part.attributes, part.y[:, at].numpy()) for at in columns]
    labelled = (part.y == 1).any(dim=1)
    other = labelled & ~(part.y[:, columns] == 1).any(dim=1)
    if not bool(other.any()):
        return cells
    y = np.where(labelled.numpy(), other.numpy().astype(np.float32), np.nan)
    return [*cells, _cells(part.attributes, y.astype(np.float32))]


def _group(
    y: NDArray[np.float32], positive: NDArray[np.bool_], patients: NDArray[np.intp], limits: PrivacyConfig
) -> DecidedGroup:
    """Return how well the images of a group are decided; of each its label, decision and patient, ``[n]``."""
    found = rates(y.astype(np.float64), positive)
    influence = without_one(patients, y) if limits.min_count else None
    sent = [rounded(rate) if influence is None else on_grid(rate, influence) for rate in found]
    with_it, without = (near(int((y == kind).sum()), limits.round_counts) for kind in (1, 0))
    return DecidedGroup(with_it, without, sent[0], sent[1])
