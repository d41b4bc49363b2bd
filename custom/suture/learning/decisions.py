"""Decisions: the counts of scores that a site releases, what is fitted to them, and how well it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.calibration import brier, calibrated, expected_calibration_error, fit, log_odds
from suture.learning.conformal import conformal_set
from suture.learning.decided_groups import decided_groups
from suture.learning.losses import probabilities
from suture.learning.metrics import Floats, rates, share_true
from suture.learning.operating_points import thresholds
from suture.learning.score_counts import Curves, histogram
from suture.protocol.decisions import (
    CELLS,
    Decided,
    DecidedClass,
    Decision,
    DecisionSettings,
    Operating,
    Rule,
)
from suture.protocol.disclosure import on_grid, share, without_one
from suture.protocol.messages import Labels, few, rounded


def score_counts(
    part: Samples, logits: Tensor, labels: LabelSet, names: Iterable[str], limits: PrivacyConfig
) -> tuple[Labels, dict[str, Tensor]]:
    """Return the histograms of a site's scores as they may leave it; see `suture.learning.score_counts`.

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
    return Operating(
        found, fit(curves, settings.calibration), curves.prevalence, conformal_set(curves, settings.coverage)
    )


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
    found = {}
    for name, decision in decisions.items():
        column = labels.index(name)
        y = part.y[:, column].numpy().astype(np.float64)
        whole = _disclosed(decided(y, p[:, column], decision, rule), y, part.patient_numbers, limits)
        found[name] = replace(whole, groups=groups.get(name, {}))
    return found


def _disclosed(
    figures: DecidedClass, y: Floats, patients: NDArray[np.intp], limits: PrivacyConfig
) -> DecidedClass:
    """Return figures of a class on the grids that one patient's influence permits; see `disclosure`.

    A patient with the share s of the images moves Brier score and coverage by at most s, and the calibration
    error by at most 2 s.
    """
    rate: Callable[[float | None], float | None] = rounded
    one = twice = rate
    if limits.min_count:
        part = share(patients, ~np.isnan(y))
        rate = partial(on_grid, influence=without_one(patients, y.astype(np.float32)))
        one, twice = partial(on_grid, influence=part), partial(on_grid, influence=2 * part)

    def at(point: Decided) -> Decided:
        return Decided(rate(point.sensitivity), rate(point.specificity))

    return DecidedClass(
        figures.own and at(figures.own),
        figures.pooled and at(figures.pooled),
        at(figures.half),
        (twice(figures.ece[0]), twice(figures.ece[1])),
        (one(figures.brier[0]), one(figures.brier[1])),
        one(figures.sets),
    )


def decided(y: Floats, p: Floats, decision: Decision, rule: Rule) -> DecidedClass:
    """Return how well images of one class are decided, with all digits.

    Calibration and sets are the site's own, where it has them.

    Args:
        y: labels ``[n]``: 1, 0 or NaN, which is left out.
        p: the model's probabilities ``[n]``.
    """
    known = ~np.isnan(y)
    truth, guess = y[known], p[known]
    own, pooled = (_threshold(one, rule) for one in (decision.own, decision.pooled))
    fitted = decision.fitted
    better = calibrated(guess, fitted.calibration) if fitted and fitted.calibration else None
    ece, score = (
        (figure(truth, guess), None if better is None else figure(truth, better))
        for figure in (expected_calibration_error, brier)
    )
    covered = None
    if fitted and fitted.sets:
        covered = share_true(np.where(truth == 1, guess >= fitted.sets[0], guess <= fitted.sets[1]))
    return DecidedClass(
        None if own is None else Decided(*rates(truth, guess >= own)),
        None if pooled is None else Decided(*rates(truth, guess >= pooled)),
        Decided(*rates(truth, guess >= 0.5)),
        ece,
        score,
        covered,
    )


def _threshold(one: Operating | None, rule: Rule) -> float | None:
    return one.thresholds.get(rule) if one else None
