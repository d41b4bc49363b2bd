"""Decisions: the counts of scores that a site releases, what is fitted to them, and how well it decides.

How the images with each value of a site's attribute are decided, as far as it may leave the site.

A group that is shown has at least `min_count` images with, and as many without, each class that is shown of
it. The groups make up the images of a class, whose number is known; so further groups are withheld where the
number of one would follow (`suture.protocol.egress.complementary`). Where each image has one label, the
classes make up a group as well: it is shown for all classes or for none, and must then also have `min_count`
images of the other classes together, or the site none. These are all classes that the site shows, decided or
not: else a server would ask for one class at a time, and subtract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.calibration import brier, calibrate, expected_calibration_error, fit, log_odds
from suture.learning.metrics import Curves, Floats, histogram, rates
from suture.learning.operating_points import thresholds
from suture.learning.steps import probabilities
from suture.protocol.decisions import (
    CELLS,
    Decided,
    DecidedClass,
    DecidedGroup,
    Decision,
    DecisionSettings,
    Operating,
    Rule,
)
from suture.protocol.egress import (
    complementary,
    influence_without_one,
    largest_share,
    near,
    on_grid,
    round_figure,
)
from suture.protocol.messages import Labels, few

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
    shown = [value for value in values if all(min(cell[value]) >= min_count for cell in cells)]
    before = -1
    while before != len(shown):
        before = len(shown)
        for cell in cells:
            for kind in (0, 1):
                counts = {value: pair[kind] for value, pair in cell.items()}
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
    influence = influence_without_one(patients, y) if limits.min_count else None
    sent = [round_figure(rate) if influence is None else on_grid(rate, influence) for rate in found]
    with_it, without = (near(int((y == kind).sum()), limits.round_counts) for kind in (1, 0))
    return DecidedGroup(with_it, without, sent[0], sent[1])


def score_counts(
    part: Samples, logits: Tensor, labels: LabelSet, names: Iterable[str], limits: PrivacyConfig
) -> tuple[Labels, dict[str, Tensor]]:
    """Return the histograms of a site's scores as they may leave it; see `suture.learning.metrics`.

    Args:
        part: the samples; the columns of their y, and of the logits ``[n, c]``, are those of `labels`.
        names: the classes that the site does not withhold.

    Returns:
        the classes that have histograms, and ``positives`` and ``negatives`` of each.
    """
    scores = log_odds(_probabilities(logits, labels))
    rows = {}
    for name in names:
        column = labels.index(name)
        kinds = [(part.y[:, column] == kind).numpy() for kind in (1, 0)]
        positives, negatives = (
            histogram(scores[kind, column], part.patient_numbers[kind], limits.min_count, limits.round_counts)
            for kind in kinds
        )
        if positives is not None and negatives is not None:
            rows[name] = positives, negatives
    sent = np.array(list(rows.values()), dtype=np.int32).reshape(-1, 2, CELLS)
    both = torch.from_numpy(sent)
    return tuple(rows), {"positives": both[:, 0].contiguous(), "negatives": both[:, 1].contiguous()}


def _probabilities(logits: Tensor, labels: LabelSet) -> Floats:
    return np.asarray(probabilities(logits.double(), labels.label_type).numpy())


def operating(curves: Curves, settings: DecisionSettings) -> Operating | None:
    """Return by what a class is decided; None with fewer than `FEW` positives or negatives."""
    if few(curves.positives.total, curves.negatives.total):
        return None
    found = thresholds(curves, settings.sensitivity, settings.specificity, settings.cost)
    return Operating(found, fit(curves, settings.calibration), curves.prevalence)


def decided_classes(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    decisions: Mapping[str, Decision],
    rule: Rule,
    limits: PrivacyConfig,
    values: Iterable[str] = (),
    visible: Iterable[str] = (),
) -> dict[str, DecidedClass]:
    """Return how well a site's images are decided, as far as it may leave the site.

    Args:
        part, logits, labels, limits: as for `score_counts`.
        decisions: of the classes that the site does not withhold.
        values: of the attribute, whose number of images leaves the site.
        visible: all classes that the site does not withhold, whatever a server has decisions of.
    """
    p = _probabilities(logits, labels)
    at: dict[str, float] = {}
    for name, one in decisions.items():
        for fitted in (one.pooled, one.own):  # its own threshold replaces that of all sites
            if (threshold := _threshold(fitted, rule)) is not None:
                at[name] = threshold
    groups = decided_groups(part, p, labels, at, values, limits, visible)
    decided = {}
    for name, decision in decisions.items():
        column = labels.index(name)
        y = part.y[:, column].numpy().astype(np.float64)
        whole = _disclose(decide(y, p[:, column], decision, rule), y, part.patient_numbers, limits)
        decided[name] = replace(whole, groups=groups.get(name, {}))
    return decided


def _disclose(
    figures: DecidedClass, y: Floats, patients: NDArray[np.intp], limits: PrivacyConfig
) -> DecidedClass:
    """Return figures of a class on the grids that one patient's influence permits; see `disclosure`.

    A patient with the share s of the images moves the Brier score by at most s, and the calibration error by
    at most 2 s.
    """
    rate: Callable[[float | None], float | None] = round_figure
    one = twice = rate
    if limits.min_count:
        part = largest_share(patients, ~np.isnan(y))
        rate = partial(on_grid, influence=influence_without_one(patients, y.astype(np.float32)))
        one, twice = partial(on_grid, influence=part), partial(on_grid, influence=2 * part)

    def at(point: Decided) -> Decided:
        return Decided(rate(point.sensitivity), rate(point.specificity))

    return DecidedClass(
        figures.own and at(figures.own),
        figures.pooled and at(figures.pooled),
        at(figures.half),
        (twice(figures.ece[0]), twice(figures.ece[1])),
        (one(figures.brier[0]), one(figures.brier[1])),
    )


def decide(y: Floats, p: Floats, decision: Decision, rule: Rule) -> DecidedClass:
    """Return how well images of one class are decided, with all digits.

    The calibration is the site's own, where it has one.

    Args:
        y: labels ``[n]``: 1, 0 or NaN, which is left out.
        p: the model's probabilities ``[n]``.
    """
    known = ~np.isnan(y)
    truth, guess = y[known], p[known]
    own, pooled = (_threshold(one, rule) for one in (decision.own, decision.pooled))
    fitted = decision.fitted
    better = calibrate(guess, fitted.calibration) if fitted and fitted.calibration else None
    ece, score = (
        (figure(truth, guess), None if better is None else figure(truth, better))
        for figure in (expected_calibration_error, brier)
    )
    return DecidedClass(
        None if own is None else Decided(*rates(truth, guess >= own)),
        None if pooled is None else Decided(*rates(truth, guess >= pooled)),
        Decided(*rates(truth, guess >= 0.5)),
        ece,
        score,
    )


def _threshold(one: Operating | None, rule: Rule) -> float | None:
    return one.thresholds.get(rule) if one else None
