"""Keeps the fast tests fast: in CI one that needs over a second of CPU must be marked `complete`.

A test is fast if it needs at most about 0.2 CPU seconds and starts no process. Those in `BY_NAME` are dearer,
and fast nevertheless for what they show.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator

import pytest
from _pytest.runner import runtestprotocol

SECONDS = 1.0
TRIES = 3
"""The first run of a test may be the one that imports a library, or that prepares what others share."""

BY_NAME: tuple[str, ...] = ()
"""Beginnings of the node ids of tests that stay in the fast tier whatever they cost."""


def cpu_seconds() -> float:
    """What this process and the children that it has waited for have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
    """Run a dear test again, and fail it if it stays dear."""
    before = cpu_seconds()
    result = yield
    least = cpu_seconds() - before
    if "CI" not in os.environ or item.get_closest_marker("complete") or item.nodeid.startswith(BY_NAME):
        return result
    for _ in range(TRIES - 1):
        if least <= SECONDS:
            return result
        before = cpu_seconds()
        item._initrequest()  # type: ignore[attr-defined]
        runtestprotocol(item, log=False, nextitem=nextitem)
        least = min(least, cpu_seconds() - before)
    if least > SECONDS:
        text = f"{least:.1f} CPU seconds in the best of {TRIES} runs: mark it `complete`, or make it cheaper"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "teardown")
        item.ihook.pytest_runtest_logreport(report=report)
    return result
