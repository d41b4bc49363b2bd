"""What is made ahead in a thread: its order, its errors, and that the thread ends."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator

import pytest

from suture.core.errors import DataError
from suture.data.batch import prefetch


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("suture-batches")]


@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_items_come_in_their_order_and_the_thread_ends(count: int, n: int) -> None:
    assert list(prefetch(range(n), count)) == list(range(n))
    assert threads() == []


def numbers(made: list[int], until: threading.Semaphore | None = None) -> Iterator[int]:
    for i in range(100):
        made.append(i)
        if until:
            until.release()
        yield i


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_are_made_ahead_and_no_more(count: int) -> None:
    made: list[int] = []
    done = threading.Semaphore(0)
    items = prefetch(numbers(made, done), count)
    assert next(items) == 0
    for _ in range(count + 1):  # the item in use, and those that wait
        assert done.acquire(timeout=10)
    assert not done.acquire(timeout=0.05)
    assert made == list(range(count + 1))
    items.close()  # type: ignore[attr-defined]


def test_without_a_thread_each_is_made_when_it_is_asked_for() -> None:
    made: list[int] = []
    items = prefetch(numbers(made), 0)
    assert [next(items), next(items)] == [0, 1]
    assert made == [0, 1]
    assert threads() == []


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("error", [MemoryError("full"), DataError("cut off"), OSError(5, "read")])
def test_an_error_is_raised_in_place_of_its_item(count: int, error: Exception) -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise error

    found = prefetch(items(), count)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(type(error)) as raised:
        next(found)
    assert raised.value is error
    assert threads() == []


def test_closed_early_the_thread_ends() -> None:
    made: list[int] = []
    items = prefetch(numbers(made), 2)
    next(items)
    assert threads() == ["suture-batches_0"]
    items.close()  # type: ignore[attr-defined]
    assert threads() == []
    assert len(made) <= 3


def test_a_loop_that_fails_ends_the_thread() -> None:
    def loop() -> None:
        for item in prefetch(numbers([]), 2):
            raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        loop()
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
