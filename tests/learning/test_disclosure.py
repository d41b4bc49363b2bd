"""What follows from figures of a site and of groups: by hand, and for who reads all that leaves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import linprog
from torch import Tensor

from fixed import Fixed
from hypothesis_profiles import examples
from suture.core.labels import LabelSet, LabelType
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Augmentation, Samples
from suture.learning.decisions import decided_classes, decided_groups, shown_groups
from suture.learning.evaluation import (
    NOTHING,
    Measurement,
    by_attribute,
    class_scores,
    entropy,
    influence_on_means,
    label_counts,
    measure,
    overall,
    without_withheld,
)
from suture.learning.metrics import auroc, multiclass_metrics
from suture.learning.training import SiteContext
from suture.models import ModelSpec
from suture.protocol.decisions import Decided, DecidedGroup, Decision, Operating, Rule
from suture.protocol.egress import (
    BOUND,
    bound_losses,
    complementary,
    influence_without_one,
    largest_share,
    near,
    on_grid,
    training_loss,
)
from suture.protocol.messages import ClassScore, Metrics
from suture_papers.fedlsm.fedlsm import FedLSM

NAMES = ("A", "B", "C", "D")
LIMITS = PrivacyConfig()


@given(st.integers(0, 30), st.integers(1, 80), st.integers(0, 300))
def test_a_count_that_is_shown_is_never_rounded_to_zero(least: int, step: int, count: int) -> None:
    """`PrivacyConfig` refuses exactly the roundings that would."""
    if near(max(least, 1), step) == 0:
        with pytest.raises(ValidationError, match="as 0; set it to at most"):
            PrivacyConfig(min_count=least, round_counts=step)
        return
    PrivacyConfig(min_count=least, round_counts=step)
    assert near(count, step) > 0 or count < max(least, 1)
    assert abs(near(count, step) - count) <= step / 2
    assert (
        near(torch.tensor([count]), step).tolist()
        == near(np.array([count]), step).tolist()
        == [near(count, step)]
    )


RULE: Rule = "sensitivity"


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
    return scores, overall(without_withheld(part, scores, labels), logits, "multiclass", limits)


def explained(
    n: int, scores: dict[str, ClassScore], figures: dict[str, float] | None = None
) -> Iterator[dict[str, int]]:
    """Every table of counts that fits what was published: n, the counts shown and, of six digits, the means.

    On a grid, figures are those of the classes that are shown, whatever the others are; see below.
    """
    shown = {name: s for name, s in scores.items() if s != NOTHING}
    hidden = [name for name in scores if name not in shown]
    rest = n - sum(s.positives or 0 for s in shown.values())
    for values in itertools.product(range(rest + 1), repeat=len(hidden)):
        if sum(values) != rest:
            continue
        counts = dict(zip(hidden, values, strict=True))
        if figures and hidden:
            occurring = [v for v in values if v]
            known = sum(s.recall or 0 for s in shown.values())
            total = figures["balanced_accuracy"] * (len(shown) + len(occurring)) - known
            means = {sum(h) for h in itertools.product(*([k / v for k in range(v + 1)] for v in occurring))}
            if not any(abs(mean - total) < 1e-5 for mean in means):
                continue
        yield counts


TABLES = st.lists(st.integers(0, 14), min_size=2, max_size=4)


@pytest.mark.complete
@examples(150)
@given(TABLES, st.integers(0, 9))
def test_no_withheld_count_follows_from_all_that_is_published(counts: list[int], seed: int) -> None:
    """Whoever knows that every image is labelled still finds `min_count` values for it."""
    n = sum(counts)
    if not n:
        return
    scores, _ = scores_of(counts, seed)
    fitting = list(explained(n, scores))
    for name in (name for name, score in scores.items() if score == NOTHING):
        assert len({found[name] for found in fitting}) >= min(LIMITS.min_count, n + 1)
    own, (part, _) = LabelSet(NAMES[: len(counts)], "multiclass"), table(counts)
    train = label_counts(own, part, LIMITS)
    hidden = [c for c, name in zip(counts, own.names, strict=True) if train[name] is None]
    assert not hidden or (len(hidden) > 1 and (sum(hidden) >= LIMITS.min_count or sum(hidden) == n))


def test_withheld_alone_a_count_of_two_would_follow() -> None:
    """The attacker above finds it where a class is withheld for itself alone, and the means are exact."""
    exact = PrivacyConfig(min_count=0)
    scores, figures = scores_of([9, 8, 2], 3, exact)
    alone = {name: NOTHING if name == "C" else score for name, score in scores.items()}
    assert {found["C"] for found in explained(19, alone, figures)} == {2}
    scores, _ = scores_of([9, 8, 2], 3)
    assert [name for name, score in scores.items() if score == NOTHING] == ["B", "C"]
    assert {found["C"] for found in explained(19, scores)} == set(range(11))


def measured(
    part: Samples, logits: Tensor, labels: LabelSet, split: Any, decisions: dict[str, Decision] | None = None
) -> Metrics:
    model: Any = Fixed(labels)
    part = replace(part, inputs={"logits": logits})
    prepare = ModelSpec("cnn", size=16).preprocessing
    site = SiteContext("a", model, {split: part}, prepare, Augmentation(), torch.device("cpu"))
    how = Measurement(FedLSM().loss, labels, LIMITS, 1, decisions or {})
    return measure(site, how, split, 3, bootstrap=10)


def test_a_server_that_decides_one_class_at_a_time_finds_no_small_cell_by_subtraction() -> None:
    """Group x has 9, 9 and 2 images of A, B and C; y and z have 9 of each. The sizes of groups are known."""
    counts, labels = [27, 27, 20], LabelSet(NAMES[:3], "multiclass")
    part, logits = table(counts)
    groups = ["x", "y", "z"] * 18 + ["x"] * 2 + ["y", "z"] * 9
    part, decision = (
        replace(part, attributes=tuple(groups)),
        Decision(None, Operating({RULE: 0.5}, None, 0.5)),
    )
    asked = [measured(part, logits, labels, "test", {name: decision}) for name in labels.names]
    assert asked[0].attributes.keys() == {"x", "y", "z"}
    for name, found in zip(labels.names, asked, strict=True):
        assert found.decided[name].groups.keys() == {"z"}  # not x, nor y, from which x would follow


@pytest.mark.complete
@given(st.integers(0, 10**6), st.sampled_from(["validation", "test"]))
def test_no_model_makes_a_figure_depend_on_the_labels_of_a_withheld_class(seed: int, split: str) -> None:
    """Multilabel: any other labels of a class that stays below the limit give the same answer."""
    rng = np.random.default_rng(seed)
    n, labels = 40, LabelSet(("A", "B"))
    logits = torch.from_numpy(rng.choice([0.0, 3.0, 1e4], (n, 2)) * rng.normal(size=(n, 2))).float()
    answers = []
    for few in rng.integers(0, 5, 2):
        rare = rng.permutation(np.arange(n) < few)
        y = np.column_stack([np.arange(n) % 2, rare]).astype(np.float32)
        part = Samples({}, torch.from_numpy(y), tuple(map(str, range(n))))
        answers.append(measured(part, logits, labels, split))
    assert answers[0] == answers[1]
    assert answers[0].loss is not None
    assert answers[0].classes["B"] == NOTHING


@pytest.mark.complete
@given(st.integers(0, 10**6), st.sampled_from(["validation", "test"]))
def test_no_model_tells_withheld_classes_of_a_multiclass_task_apart(seed: int, split: str) -> None:
    """Which of the withheld classes an image is of, and so how many are of each, changes no answer."""
    rng = np.random.default_rng(seed)
    labels = LabelSet(NAMES, "multiclass")
    part, logits = table([20, 18, 4, 3], seed)
    y = part.y.clone()
    where = torch.arange(38, 45)
    y[where] = torch.eye(4)[torch.from_numpy(rng.permutation([2, 2, 2, 2, 3, 3, 3, 3])[:7])]
    answers = [measured(p, logits * 1e3, labels, split) for p in (part, replace(part, y=y))]
    assert answers[0] == answers[1]
    assert {name for name, score in answers[0].classes.items() if score == NOTHING} == {"C", "D"}
    assert answers[0].loss is not None
    assert answers[0].overall.keys() >= {"accuracy", "balanced_accuracy"}


@given(st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 20)), st.integers(0, 8))
def test_complementary_suppression(counts: dict[str, int], least: int) -> None:
    shown = complementary(counts, [n for n, c in counts.items() if c >= least], least)
    hidden = {name: c for name, c in counts.items() if name not in shown}
    assert all(counts[name] >= least for name in shown)
    if hidden and shown:
        assert len(hidden) > 1
        assert sum(hidden.values()) >= least
    assert bool(hidden) == any(c < least for c in counts.values())


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


@given(st.integers(0, 10**6))
def test_figures_without_one_patient_differ_by_no_more_than_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(12, 40))
    y, s = rng.integers(0, 2, n).astype(np.float32), rng.normal(size=n).round(1)
    patients = rng.integers(int(rng.integers(6, 30)), size=n)
    patients = np.unique(patients, return_inverse=True)[1]
    most, before = influence_without_one(patients, y), auroc(y, s)
    for patient in range(int(patients.max()) + 1):
        rest = patients != patient
        if np.isfinite(most):
            assert abs(auroc(y[rest], s[rest]) - before) <= most + 1e-9


@pytest.mark.complete
@given(st.integers(0, 10**6), st.sampled_from(["multilabel", "multiclass"]))
def test_labels_of_one_patient_move_figures_by_no_more_than_a_step(seed: int, label_type: LabelType) -> None:
    """Other labels and other scores, as extreme as they may be; the loss of logits without bounds, too."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(4, 12, size=3).tolist()
    part, logits = table(counts, seed, patients=int(rng.integers(8, 40)))
    patients = part.patient_numbers
    rows = torch.from_numpy(patients == rng.integers(patients.max() + 1))
    y, other = part.y.clone(), logits * 5
    y[rows] = torch.eye(3)[torch.from_numpy(rng.integers(3, size=int(rows.sum())))]
    other[rows] = torch.from_numpy(rng.choice([-1e4, 0.0, 1e4], size=(int(rows.sum()), 3)).astype(np.float32))
    changed = replace(part, y=y)
    most = largest_share(patients, np.ones(len(part)))
    losses = [
        entropy(p, bound_losses(o, label_type), label_type) or 0
        for p, o in ((part, logits * 5), (changed, other))
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
    assert entropy(part, bound_losses(logits, label_type), label_type) == pytest.approx(
        entropy(part, logits, label_type), abs=1e-6
    )
    wrong = torch.where(part.y == 1, -1e6, 1e6)
    assert entropy(part, bound_losses(wrong, label_type), label_type) == pytest.approx(BOUND, abs=0.02)


def test_a_site_bounds_what_one_image_adds_to_its_loss() -> None:
    """One label of 40 that is surely wrong: 5/40, on a grid of 0.2 that it moves by less than a step."""
    labels = LabelSet(("A",))
    y = torch.arange(40).remainder(2).float()[:, None]
    part, right = Samples({}, y, tuple(map(str, range(40)))), (y * 2 - 1) * 1e6
    wrong = right.clone()
    wrong[0] *= -1
    for split in ("validation", "test"):
        assert measured(part, right, labels, split).loss == 0.0
        assert measured(part, wrong, labels, split).loss == 0.2
        assert measured(part, -right, labels, split).loss == 5.0


def test_training_loss() -> None:
    for value, samples, min_loss, sent in (
        (0.3456789, 400, 20, 0.34),
        (0.3456789, 400, 0, 0.345679),
        (0.3456789, 19, 20, None),
        (1e6, 400, 20, 5.0),
        (None, 400, 20, None),
    ):
        assert training_loss(value, samples, PrivacyConfig(min_loss=min_loss)) == sent


# Groups


OPEN = PrivacyConfig.of_public_data("own")
FIVE = OPEN.model_copy(update={"min_count": 5})
ONE = LabelSet(("Mass",))


def samples(y: np.ndarray, groups: list[str]) -> Samples:
    return Samples(
        {}, torch.tensor(y).float(), tuple(f"p{i}" for i in range(len(y))), attributes=tuple(groups)
    )


def test_rates_of_a_group_by_hand() -> None:
    """F: positives .9 and .2, negative .1; M: positive .6, negatives .7 and .4. The threshold is .5."""
    y = np.array([[1], [1], [0], [1], [0], [0], [np.nan], [1]])
    p = np.array([[0.9], [0.2], [0.1], [0.6], [0.7], [0.4], [0.9], [0.9]])
    part = samples(y, ["F", "F", "F", "M", "M", "M", "M", ""])
    found = decided_groups(part, p, ONE, {"Mass": 0.5}, ["F", "M"], OPEN)
    assert found == {
        "Mass": {
            "F": DecidedGroup(2, 1, 0.5, 1.0),
            "M": DecidedGroup(1, 2, 1.0, 0.5),
        }
    }


def test_which_groups_are_shown() -> None:
    for cells, shown in (
        ({"F": (9, 9), "M": (9, 9)}, ["F", "M"]),
        ({"F": (9, 9), "M": (4, 9)}, []),  # the positives of M would be the total less those of F
        ({"F": (9, 9), "M": (4, 9), "X": (7, 9)}, ["F"]),  # so X, the next smallest, is withheld as well
        ({"F": (9, 9), "M": (9, 2), "X": (8, 7)}, ["F"]),
        ({"F": (9, 9), "M": (2, 9), "X": (2, 9)}, []),  # the two together have too few
        ({"F": (9, 9), "M": (3, 9), "X": (3, 9)}, ["F"]),
        ({"F": (9, 9), "M": (8, 9), "": (1, 0)}, ["F"]),  # an image without a value is of a group, too
    ):
        assert shown_groups([cells], [value for value in cells if value], 5) == shown
        assert shown_groups([cells], cells, 0) == sorted(cells)


Labels = st.dictionaries(
    st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from([0, 1, 2])),
    st.integers(1, 12),
    min_size=5,
).map(lambda cells: [cell for cell, n in cells.items() for _ in range(n)])
"""The group and the kind of each image, from numbers of images on both sides of `min_count`."""

STEPS = (1, 2, 7, 10)
"""What counts are rounded to: with `min_count` 5, to 10 at most."""


def ranges(
    small: set[tuple[str, int]],
    groups: set[str],
    totals: Mapping[int, int],
    sizes: Mapping[str, int],
    known: Mapping[tuple[str, int], int],
    n: int,
    classes: int,
    step: int,
) -> dict[tuple[str, int], tuple[float, float]]:
    """Between which numbers each small cell (group, class) may lie, from all that leaves a site.

    That is numbers of images of classes (`totals`) and of large cells (`known`), rounded to `step`, and of
    groups (`sizes`), of `n` in all; somebody may know the names of groups that do not leave.
    """
    cells = [(group, kind) for group in sorted(groups) for kind in range(classes)]
    rows = [([cell[0] == group for cell in cells], size) for group, size in sizes.items()]
    rows += [([True] * len(cells), n)]
    near = [([cell[1] == kind for cell in cells], total) for kind, total in totals.items()]
    near += [([cell == one for cell in cells], count) for one, count in known.items()]
    down, up = step // 2, (step - 1) // 2  # halves are rounded up
    sums = np.array([row for row, _ in near], dtype=float).reshape(-1, len(cells))
    rounded = np.array([count for _, count in near], dtype=float)
    bounds = {
        "A_eq": np.array([row for row, _ in rows], dtype=float),
        "b_eq": [value for _, value in rows],
        "A_ub": np.concatenate([sums, -sums]),
        "b_ub": np.concatenate([rounded + up, -np.maximum(rounded - down, FIVE.min_count)]),
    }
    found = {}
    for cell in small:
        c = np.zeros(len(cells))
        c[cells.index(cell)] = 1
        low, high = (linprog(sign * c, **bounds, bounds=(0, None)) for sign in (1, -1))
        assert low.status == 0
        found[cell] = (low.fun, -high.fun)
    return found


def check_small(
    cells: Counter[tuple[str, int]],
    kinds: Collection[int],
    totals: Mapping[int, int],
    sizes: Mapping[str, int],
    known: Mapping[tuple[str, int], int],
    step: int,
) -> None:
    """Check that a cell below `min_count` may have any of as many numbers; arguments as of `ranges`."""
    groups = {group for group, _ in cells}
    small = {(g, k) for g in groups for k in kinds if cells[g, k] < FIVE.min_count}
    may_be = ranges(small, groups, totals, sizes, known, cells.total(), len(kinds), step)
    for cell, (low, high) in may_be.items():
        assert low - 1e-6 <= cells[cell] <= high + 1e-6
        assert high - low >= FIVE.min_count - 1e-6


@pytest.mark.complete
@given(Labels, st.sampled_from(STEPS))
def test_who_reads_all_that_leaves_cannot_tell_a_small_cell(found: list[tuple[str, int]], step: int) -> None:
    """Every label is known: positives and negatives of a group are the images of the group, which leave too.

    A cell below `min_count` may then still have any of at least `min_count` + 1 numbers, and no group that is
    shown has 0 images.
    """
    limits = FIVE.model_copy(update={"round_counts": step})
    groups = [group for group, _ in found]
    truth = np.array([[kind == 0] for _, kind in found], dtype=np.float32)
    totals = {1: int(truth.sum()), 0: int((1 - truth).sum())}
    if min(totals.values()) < FIVE.min_count:
        return  # the class is withheld
    part = samples(truth, groups)
    sizes = {
        value: one.n
        for value, one in by_attribute(part, torch.zeros(len(truth), 1), ONE, ("Mass",), limits).items()
    }
    sent = decided_groups(part, truth.astype(np.float64), ONE, {"Mass": 0.5}, sizes, limits)["Mass"]
    known = {(g, kind): n for g, one in sent.items() for kind, n in ((1, one.positives), (0, one.negatives))}
    assert all(n >= step for n in known.values())
    cells = Counter(zip(groups, truth[:, 0].astype(int).tolist(), strict=True))
    told = {k: near(n, step) for k, n in totals.items()}
    check_small(cells, (1, 0), told, sizes, known, step)


@pytest.mark.complete
@given(Labels, st.sampled_from(STEPS))
def test_nor_where_the_classes_make_up_the_images(found: list[tuple[str, int]], step: int) -> None:
    """Not even by a server that asks for one class at a time."""
    limits = FIVE.model_copy(update={"round_counts": step})
    labels = LabelSet(("k", "l", "m"), "multiclass")
    groups = [group for group, _ in found]
    truth = np.eye(3, dtype=np.float32)[[kind for _, kind in found]]
    totals = {kind: int(truth[:, kind].sum()) for kind in range(3)}
    part = samples(truth, groups)
    scores = class_scores(part, torch.zeros(len(truth), 3), labels, labels.names, limits)
    large = [kind for kind in range(3) if scores[labels.names[kind]] != NOTHING]
    sizes = {
        value: one.n
        for value, one in by_attribute(part, torch.zeros(len(truth), 3), labels, labels.names, limits).items()
    }
    visible, p = [labels.names[kind] for kind in large], truth.astype(np.float64)
    sent = {
        name: decided_groups(part, p, labels, {name: 0.5}, sizes, limits, visible)[name] for name in visible
    }
    assert sent == decided_groups(part, p, labels, dict.fromkeys(visible, 0.5), sizes, limits)
    known = {(g, kind): one.positives for kind in large for g, one in sent[labels.names[kind]].items()}
    assert all(count >= step for count in known.values())
    told = {kind: near(totals[kind], step) for kind in large}
    check_small(Counter(found), range(3), told, sizes, known, step)


def test_a_group_is_decided_by_the_sites_own_threshold_where_it_has_one() -> None:
    part = samples(np.array([[1], [1], [0], [0]]), ["F", "M", "F", "M"])
    logits = torch.tensor([[1.0], [0.0], [-1.0], [0.0]])

    def at(threshold: float) -> Operating:
        return Operating(thresholds={"sensitivity": threshold}, calibration=None, prevalence=0.5)

    def rates(decision: Decision) -> dict[str, Decided]:
        found = decided_classes(part, logits, ONE, {"Mass": decision}, "sensitivity", OPEN, ["F", "M"])
        return {
            value: Decided(group.sensitivity, group.specificity)
            for value, group in found["Mass"].groups.items()
        }

    pooled = {"F": Decided(1.0, 1.0), "M": Decided(0.0, 1.0)}
    assert rates(Decision(None, at(0.6))) == pooled
    assert rates(Decision(at(0.0), at(0.6))) == {"F": Decided(1.0, 0.0), "M": Decided(1.0, 0.0)}
    assert rates(Decision(None, None)) == {}
