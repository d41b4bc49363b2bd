"""What follows from a site's figures, by brute force on small tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Samples
from suture.learning.evaluation import (
    NOTHING,
    by_attribute,
    class_counts,
    class_scores,
    entropy,
    influence_on_means,
    overall,
    patient_numbers,
)
from suture.learning.metrics import auroc, multiclass_metrics
from suture.protocol.disclosure import BOUND, bounded, complementary, on_grid, share, without_one
from suture.protocol.messages import ClassScore
from suture.protocol.privacy import PrivacyConfig

NAMES = ("A", "B", "C", "D")
LIMITS = PrivacyConfig()


def table(counts: list[int], seed: int = 0, patients: int | None = None) -> tuple[Samples, Tensor]:
    """Multiclass samples with these numbers of images, and random logits."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.eye(len(counts), dtype=np.float32), counts, axis=0)
    owners = range(len(y)) if patients is None else rng.integers(patients, size=len(y))
    logits = torch.from_numpy(rng.normal(size=y.shape).astype(np.float32))
    return Samples({}, torch.from_numpy(y), tuple(f"p{i}" for i in owners)), logits


def scores_of(
    counts: list[int], seed: int, limits: PrivacyConfig = LIMITS
) -> tuple[dict[str, ClassScore], Any]:
    part, logits = table(counts, seed)
    labels = LabelSet(NAMES[: len(counts)], "multiclass")
    scores = class_scores(part, logits, labels, labels.names, limits)
    return scores, overall(part, logits, "multiclass", limits, scores)


def right(score: ClassScore, limits: PrivacyConfig) -> list[int]:
    """The numbers of hits of a class that fit its recall."""
    assert score.positives is not None
    step = 1e-6 if not limits.min_count else 0.5
    return [k for k in range(score.positives + 1) if abs(k / score.positives - (score.recall or 0)) <= step]


def explained(
    n: int, scores: dict[str, ClassScore], figures: dict[str, float], limits: PrivacyConfig
) -> Iterator[dict[str, int]]:
    """Every table of counts that fits all that was published: n, the counts and recalls shown, the means."""
    shown = {name: s for name, s in scores.items() if s != NOTHING}
    hidden = [name for name in scores if name not in shown]
    rest = n - sum(s.positives or 0 for s in shown.values())
    tolerance = 1e-5 if not limits.min_count else 0.5
    for values in itertools.product(range(rest + 1), repeat=len(hidden)):
        if sum(values) != rest:
            continue
        counts = dict(zip(hidden, values, strict=True))
        if "balanced_accuracy" in figures and hidden:
            occurring = [v for v in values if v]
            known = sum(s.recall or 0 for s in shown.values())
            total = figures["balanced_accuracy"] * (len(shown) + len(occurring)) - known
            means = {sum(h) for h in itertools.product(*([k / v for k in range(v + 1)] for v in occurring))}
            if not any(abs(mean - total) < tolerance for mean in means):
                continue
        yield counts


TABLES = st.lists(st.integers(0, 14), min_size=2, max_size=4)


@settings(max_examples=150, deadline=None)
@given(TABLES, st.integers(0, 9))
def test_no_withheld_count_follows_from_all_that_is_published(counts: list[int], seed: int) -> None:
    """Whoever knows that every image is labelled still finds `min_count` values for it."""
    n = sum(counts)
    if not n:
        return
    scores, figures = scores_of(counts, seed)
    fitting = list(explained(n, scores, figures, LIMITS))
    for name in (name for name, score in scores.items() if score == NOTHING):
        assert len({found[name] for found in fitting}) >= min(LIMITS.min_count, n + 1)
    own, (part, _) = LabelSet(NAMES[: len(counts)], "multiclass"), table(counts)
    train = class_counts(own, part, LIMITS)
    hidden = [c for c, name in zip(counts, own.names, strict=True) if train[name] is None]
    assert not hidden or (len(hidden) > 1 and (sum(hidden) >= LIMITS.min_count or sum(hidden) == n))


def test_withheld_alone_a_count_of_two_would_follow() -> None:
    """The attacker above finds it where a class is withheld for itself alone, and the means are exact."""
    exact = PrivacyConfig(min_count=0)
    scores, figures = scores_of([9, 8, 2], 3, exact)
    alone = {name: NOTHING if name == "C" else score for name, score in scores.items()}
    assert {found["C"] for found in explained(19, alone, figures, exact)} == {2}
    scores, figures = scores_of([9, 8, 2], 3)
    assert [name for name, score in scores.items() if score == NOTHING] == ["B", "C"]
    assert figures.keys() <= {"accuracy"}
    assert {found["C"] for found in explained(19, scores, figures, LIMITS)} == set(range(11))


@given(st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 20)), st.integers(0, 8))
def test_complementary_suppression(counts: dict[str, int], least: int) -> None:
    shown = complementary(counts, [n for n, c in counts.items() if c >= least], least)
    hidden = {name: c for name, c in counts.items() if name not in shown}
    assert all(counts[name] >= least for name in shown)
    if hidden and shown:
        assert len(hidden) > 1
        assert sum(hidden.values()) >= least
    assert bool(hidden) == any(c < least for c in counts.values())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["", "f", "m", "x", "y"]), st.integers(1, 12), min_size=1))
def test_no_left_out_value_of_an_attribute_follows_from_the_total(images: dict[str, int]) -> None:
    n = sum(images.values())
    part, logits = table([n, 0])
    part = replace(part, attributes=tuple(v for v, count in images.items() for _ in range(count)))
    shown = by_attribute(part, logits, LabelSet(("A", "B"), "multiclass"), ("A",), LIMITS)
    left = {v: c for v, c in images.items() if v not in shown}
    assert {v: f.n for v, f in shown.items()} == {v: images[v] for v in shown}
    assert not left or not shown or (len(left) > 1 and sum(left.values()) >= LIMITS.min_count)


# Exact positives from n and AUROC


def rebuilt(n: int, value: float, steps: float) -> set[int]:
    """The numbers of positives among n images for which some whole number of pairs gives this AUROC."""
    found = set()
    for p in range(1, n):
        pairs = 2 * p * (n - p)  # ties count half
        nearest = round(value * pairs) / pairs
        if abs(nearest - value) <= steps / 2 + 1e-12:
            found.add(min(p, n - p))
    return found


def cases(number: int) -> Iterator[tuple[int, int, float]]:
    """Sites of random size and prevalence: images, positives, exact AUROC of scores without ties."""
    rng = np.random.default_rng(5)
    for _ in range(number):
        n = int(rng.integers(20, 120))
        p = int(rng.integers(5, n - 5))
        truth = np.repeat([1.0, 0.0], [p, n - p])
        yield n, p, auroc(truth, truth + rng.normal(scale=1.5, size=n))


def test_the_number_of_positives_does_not_follow_from_n_and_auroc() -> None:
    """With six digits it follows in most of 300 cases, on the grid in none."""
    pinned = Counter[str]()
    for n, p, area in cases(300):
        pinned["six digits"] += rebuilt(n, round(area, 6), 1e-6) == {min(p, n - p)}
        moved = 1 / (min(p, n - p) - 1)
        sent = on_grid(area, moved)
        assert sent is not None
        fitting = rebuilt(n, sent, moved)
        pinned["grid"] += len(fitting) < LIMITS.min_count and n // 2 >= LIMITS.min_count
    assert pinned["six digits"] > 150
    assert pinned["grid"] == 0


# One patient's influence


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_figures_without_one_patient_differ_by_no_more_than_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(12, 40))
    y, s = rng.integers(0, 2, n).astype(np.float32), rng.normal(size=n).round(1)
    patients = rng.integers(int(rng.integers(6, 30)), size=n)
    patients = np.unique(patients, return_inverse=True)[1]
    most, before = without_one(patients, y), auroc(y, s)
    for patient in range(int(patients.max()) + 1):
        rest = patients != patient
        if np.isfinite(most):
            assert abs(auroc(y[rest], s[rest]) - before) <= most + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["multilabel", "multiclass"]))
def test_labels_of_one_patient_move_figures_by_no_more_than_a_step(seed: int, label_type: LabelType) -> None:
    """Other labels and other scores, as extreme as they may be; the loss of logits without bounds, too."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(4, 12, size=3).tolist()
    part, logits = table(counts, seed, patients=int(rng.integers(8, 40)))
    patients = patient_numbers(part)
    rows = torch.from_numpy(patients == rng.integers(patients.max() + 1))
    y, other = part.y.clone(), logits * 5
    y[rows] = torch.eye(3)[torch.from_numpy(rng.integers(3, size=int(rows.sum())))]
    other[rows] = torch.from_numpy(rng.choice([-1e4, 0.0, 1e4], size=(int(rows.sum()), 3)).astype(np.float32))
    changed = replace(part, y=y)
    most = share(patients, np.ones(len(part)))
    losses = [
        entropy(p, bounded(o, label_type), label_type) or 0 for p, o in ((part, logits * 5), (changed, other))
    ]
    assert abs(losses[0] - losses[1]) <= (BOUND + 0.02) * most + 1e-6
    before, after = (
        multiclass_metrics(p.y.numpy(), o.numpy()) for p, o in ((part, logits * 5), (changed, other))
    )
    for name, influence in (influence_on_means(part) | {"accuracy": most}).items():
        assert abs((before[name] or 0) - (after[name] or 0)) <= influence + 1e-6, name


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_a_bounded_loss_is_that_of_ordinary_logits(label_type: LabelType) -> None:
    part, logits = table([20, 20, 20], 1)
    assert entropy(part, bounded(logits, label_type), label_type) == pytest.approx(
        entropy(part, logits, label_type), abs=1e-6
    )
    wrong = torch.where(part.y == 1, -1e6, 1e6)
    assert entropy(part, bounded(wrong, label_type), label_type) == pytest.approx(BOUND, abs=0.02)
