"""Figures of groups: by hand, and what somebody who reads all that leaves finds out about a small one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.decisions import decided_classes, decided_groups, shown_groups
from suture.learning.evaluation import NOTHING, by_attribute, class_scores
from suture.protocol.decisions import Decided, DecidedGroup, Decision, Operating
from suture.protocol.egress import near

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


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        ({"F": (9, 9), "M": (9, 9)}, ["F", "M"]),
        ({"F": (9, 9), "M": (4, 9)}, []),  # the positives of M would be the total less those of F
        ({"F": (9, 9), "M": (4, 9), "X": (7, 9)}, ["F"]),  # so X, the next smallest, is withheld as well
        ({"F": (9, 9), "M": (9, 2), "X": (8, 7)}, ["F"]),
        ({"F": (9, 9), "M": (2, 9), "X": (2, 9)}, []),  # the two together have too few
        ({"F": (9, 9), "M": (3, 9), "X": (3, 9)}, ["F"]),
        ({"F": (9, 9), "M": (8, 9), "": (1, 0)}, ["F"]),  # an image without a value is of a group, too
    ],
)
def test_which_groups_are_shown(cells: Mapping[str, tuple[int, int]], shown: list[str]) -> None:
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
    """Return between which numbers each small cell (group, class) may lie, from all that leaves a site.

    Args:
        small: the cells that are asked for.
        groups: their names, which somebody may know although not all leave.
        totals: images of each class whose number leaves, rounded to `step`.
        sizes: images of the groups whose number leaves.
        known: cells that leave, rounded to `step`, and of `min_count` images or more.
        n: number of images.
        classes: number of classes.
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
