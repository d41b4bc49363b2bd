"""Batches that are made ahead of their use, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def prefetch(items: Iterable[_T], count: int) -> Iterator[_T]:
    """Yield the items in their order, while one thread makes the `count` next ones.

    An error of making an item is raised where that item would have been yielded. The thread has ended when
    the last item was yielded, an error was raised, or the iterator was closed.

    Args:
        count: of items that wait at most; 0 makes each when it is asked for, without a thread.
    """
    source = iter(items)
    if not count:
        yield from source
        return
    end = object()
    maker = ThreadPoolExecutor(1, "suture-batches")
    try:
        waiting = deque(maker.submit(next, source, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(maker.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        maker.shutdown(cancel_futures=True)
