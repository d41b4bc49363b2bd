"""Class-aware sampling: every class of a site equally often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suture.data.batch import IN_A_ROW, class_aware

NAMES = ("Mass", "Edema", "Nodule", "Hernia", "Fibrosis")
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def one_hot(counts: list[int]) -> Tensor:
    """Labels of so many images of each class, one after the other."""
    return torch.eye(len(counts))[[c for c, n in enumerate(counts) for _ in range(n)]]


def drawn(
    counts: list[int], size: int, seed: int = 0, steps: int | None = None, order: list[int] | None = None
) -> list[list[int]]:
    """The batches; `order`: of the columns, by default as the counts."""
    y, columns = one_hot(counts), list(range(len(counts))) if order is None else order
    generator, names = torch.Generator().manual_seed(seed), [NAMES[c] for c in columns]
    return [rows.tolist() for rows in class_aware(y[:, columns], names, size, generator, steps)]


def test_the_numeric_example() -> None:
    """90 and 10 images: each has .005556 and .05 of the draws, over whole cycles."""
    rows = Counter(i for batch in drawn([90, 10], 24, steps=30) for i in batch)
    total = sum(rows.values())
    assert total == 720
    assert {i: n / total for i, n in rows.items()} == {i: 1 / 180 if i < 90 else 1 / 20 for i in range(100)}
    assert (pytest.approx(0.005556, abs=1e-6), 0.05) == (1 / 180, 1 / 20)


@given(COUNTS, st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_has_the_largest_class_times_the_classes_that_are_there(
    counts: list[int], size: int, seed: int
) -> None:
    batches = drawn(counts, size, seed)
    rows = [i for batch in batches for i in batch]
    present = [n for n in counts if n]
    assert len(rows) == max(counts) * len(present)
    assert batches == drawn(counts, size, seed)
    if len(rows) > 1 and size > 1:
        assert min(map(len, batches)) > 1
    # Of each class as often as of any other, but for the turns of the last cycle.
    classes = Counter(one_hot(counts)[rows].argmax(dim=1).tolist() if rows else ())
    each = [classes[c] for c, n in enumerate(counts) if n]
    assert max(each, default=0) - min(each, default=0) <= 4
    # Of each image as often as of any other of its class.
    times = Counter(rows)
    for c, n in enumerate(counts):
        start = sum(counts[:c])
        seen = [times[i] for i in range(start, start + n)]
        assert not seen or max(seen) - min(seen) <= 1


def test_four_images_of_a_class_in_a_row_and_every_class_before_one_comes_again() -> None:
    rows = [i for batch in drawn([9, 5, 1], 7) for i in batch]
    classes = one_hot([9, 5, 1])[rows].argmax(dim=1).tolist()
    assert IN_A_ROW == 4
    turns = [classes[i : i + 4] for i in range(0, len(classes), 4)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert all(len({turn[0] for turn in turns[i : i + 3]}) == 3 for i in (0, 3))
    assert len({tuple(t[0] for t in turns[i : i + 3]) for i in (0, 3)}) == 2  # each cycle has its own order


@pytest.mark.parametrize(
    ("counts", "size", "lengths"), [([3, 1], 5, [6]), ([3, 1], 4, [4, 2]), ([1], 4, [1])]
)
def test_a_last_image_does_not_stand_alone(counts: list[int], size: int, lengths: list[int]) -> None:
    """But where there is no other: batch norm has no variance of one value."""
    assert [len(batch) for batch in drawn(counts, size)] == lengths


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_steps_go_on_beyond_an_epoch_in_full_batches(steps: int) -> None:
    batches = drawn([3, 2], 4, steps=steps)
    assert [len(batch) for batch in batches] == [4] * steps


@given(COUNTS, st.permutations(range(5)), st.integers(1, 12), st.sampled_from([None, 7]))
def test_the_order_of_the_classes_does_not_matter(
    counts: list[int], order: list[int], size: int, steps: int | None
) -> None:
    """Nor does who else is there: the images of a class come in an order of its own."""
    order = [c for c in order if c < len(counts)]
    batches = drawn(counts, size, 3, steps)
    assert batches == drawn(counts, size, 3, steps, order)
    alone = [i for batch in drawn(counts, size, 3, steps, [0]) for i in batch]
    beside = [i for batch in batches for i in batch if i < counts[0]]
    both = min(len(alone), len(beside))
    assert alone[:both] == beside[:both]


def test_what_is_unknown_is_no_positive_and_several_classes_count_in_each() -> None:
    nan = float("nan")
    y = torch.tensor([[nan, 1.0], [1.0, 1.0], [0.0, nan], [nan, nan]])
    batches = class_aware(y, NAMES[:2], 4, torch.Generator().manual_seed(0), steps=4)
    rows = Counter(i for batch in batches for i in batch.tolist())
    assert rows == {0: 4, 1: 8 + 4}


def test_an_epoch_is_not_drawn_image_by_image() -> None:
    """Two classes take turns of four images, and a cycle of both is one operation."""

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    y = one_hot([400, 100])
    with Counting() as counting:  # type: ignore[no-untyped-call]
        images = sum(map(len, class_aware(y, NAMES[:2], 8, torch.Generator(), steps=1000)))
    assert images == 8000
    assert counting.number < images / 4


def test_nothing_to_draw_ends() -> None:
    assert drawn([0, 0], 4) == drawn([0], 4, steps=3) == []
