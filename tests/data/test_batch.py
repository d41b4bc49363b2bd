"""suture.data.batch: batches in order, at random, by class, and made ahead in a thread."""

from __future__ import annotations

import _thread
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suture.core.errors import DataError
from suture.data.batch import IN_A_ROW, Batch, Samples, class_aware, endless
from suture.learning.training import prefetch

NAMES = ("Mass", "Edema", "Nodule", "Hernia", "Fibrosis")
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def samples(n: int) -> Samples:
    y = torch.zeros(n, 2)
    y[:, 1] = float("nan")
    return Samples({"image": torch.arange(n).view(n, 1, 1, 1)}, y, tuple(str(i) for i in range(n)))


def test_unknown_is_a_mask_and_never_a_number() -> None:
    batch = samples(3).batch(torch.tensor([2, 0]))
    assert batch.known.tolist() == [[True, False], [True, False]]
    assert batch.y.tolist() == [[0, 0], [0, 0]]
    assert batch.inputs["image"].flatten().tolist() == [2, 0]


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_row_once_and_no_lone_last_row(n: int, size: int) -> None:
    rows = [b.inputs["image"].flatten().tolist() for b in samples(n).batches(size)]
    assert [i for batch in rows for i in batch] == list(range(n))
    if n > 1 and size > 1:
        assert min(map(len, rows)) > 1


def test_all_of_a_batch_moves_and_rows_keep_all_that_is_known_of_them() -> None:
    batch = Batch({"image": torch.ones(2, 1)}, torch.ones(2, 3), torch.ones(2, 3) == 1, torch.ones(2, 1))
    moved = batch.to("meta")
    assert moved.weight is not None
    assert moved.weight.shape == (2, 1)
    assert {t.device.type for t in (*moved.inputs.values(), moved.y, moved.known, moved.weight)} == {"meta"}
    assert samples(2).batch(torch.tensor([0])).to("meta").weight is None
    whole = Samples(
        {"x": torch.arange(3)}, torch.zeros(3, 1), ("p", "q", "r"), ("a", "b", "c"), ("light", "", "dark")
    )
    part = whole.rows(torch.tensor([2, 0]))
    assert (part.patients, part.names, part.attributes) == (("r", "p"), ("c", "a"), ("dark", "light"))
    assert part.inputs["x"].tolist() == [2, 0]


def shuffled(n: int, size: int, seed: int, steps: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [rows.tolist() for rows in islice(endless(n, size, generator), steps)]


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_endless_batches_are_full_and_run_across_whole_passes(n: int, size: int, seed: int) -> None:
    """Also where a batch is larger than a pass."""
    batches = shuffled(n, size, seed, steps=2 * n)
    assert {len(rows) for rows in batches} == {size}
    row_numbers = [i for rows in batches for i in rows]
    for start in range(0, 2 * n * size, n):  # 2 size passes
        assert sorted(row_numbers[start : start + n]) == list(range(n))
    assert batches == shuffled(n, size, seed, steps=2 * n)


def test_every_pass_has_an_order_of_its_own() -> None:
    first, second = shuffled(20, 20, 0, steps=2)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != shuffled(20, 20, 1, steps=1)[0]


def test_nothing_to_draw_from_ends() -> None:
    assert list(endless(0, 4, torch.Generator())) == []
    assert drawn([0, 0], 4) == drawn([0], 4, steps=3) == []


def one_hot(counts: list[int]) -> Tensor:
    """Labels of so many images of each class, one after the other."""
    return torch.eye(len(counts))[[c for c, n in enumerate(counts) for _ in range(n)]]


def drawn(
    counts: list[int], size: int, seed: int = 0, steps: int | None = None, order: list[int] | None = None
) -> list[list[int]]:
    """The batches by class; `order`: of the columns, by default as the counts."""
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
    assert len(rows) == max(counts) * sum(n > 0 for n in counts)
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
    ("counts", "size", "steps", "lengths"),
    [
        ([3, 1], 5, None, [6]),  # no last image alone: batch norm has no variance of one value
        ([3, 1], 4, None, [4, 2]),
        ([1], 4, None, [1]),
        ([3, 2], 4, 1, [4]),
        ([3, 2], 4, 50, [4] * 50),
    ],
)
def test_batches_by_class_are_full_but_the_last_of_an_epoch(
    counts: list[int], size: int, steps: int | None, lengths: list[int]
) -> None:
    assert [len(batch) for batch in drawn(counts, size, steps=steps)] == lengths


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


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("suture-batches")]


def numbers(made: list[int], until: threading.Semaphore | None = None) -> Iterator[int]:
    for i in range(100):
        made.append(i)
        if until:
            until.release()
        yield i


@pytest.mark.parametrize("count", [0, 2, 9])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_items_come_in_their_order_and_the_thread_ends(count: int, n: int) -> None:
    assert list(prefetch(range(n), count)) == list(range(n))
    assert threads() == []


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_are_made_ahead_and_no_more_and_closed_early_the_thread_ends(count: int) -> None:
    made: list[int] = []
    done = threading.Semaphore(0)
    items = prefetch(numbers(made, done), count)
    assert next(items) == 0
    for _ in range(count + 1):  # the item in use, and those that wait
        assert done.acquire(timeout=10)
    assert not done.acquire(timeout=0.05)
    assert made == list(range(count + 1))
    assert threads() == ["suture-batches_0"]
    items.close()  # type: ignore[attr-defined]
    assert threads() == []
    assert len(made) <= count + 1


def test_without_a_thread_each_is_made_when_it_is_asked_for() -> None:
    made: list[int] = []
    items = prefetch(numbers(made), 0)
    assert [next(items), next(items)] == [0, 1]
    assert made == [0, 1]
    assert threads() == []


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("error", [MemoryError("full"), DataError("cut off")])
def test_an_error_is_raised_in_place_of_its_item(count: int, error: Exception) -> None:
    def items() -> Iterator[int]:
        yield from (0, 1)
        raise error

    found = prefetch(items(), count)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(type(error)) as raised:
        next(found)
    assert raised.value is error
    assert threads() == []


def test_an_interrupt_is_heard_while_an_item_is_awaited() -> None:
    def slow() -> Iterator[int]:
        yield 0
        time.sleep(0.1)  # the main thread waits by then
        _thread.interrupt_main()
        time.sleep(0.1)
        yield 1

    items = prefetch(slow(), 1)
    assert next(items) == 0
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert threads() == []
