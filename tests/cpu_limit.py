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

BY_NAME = (
    "tests/cli/test_cli.py::test_second_run_report_and_predict",
    "tests/prepare/test_own_hospitals.py::test_hospitals_as_they_come_give_a_model",
    "tests/flare/test_open_federation.py::test_what_sites_hide_sums_to_the_loops_plain_figures",
    "tests/flare/test_simulator.py::test_adapters_and_secure_aggregation_give_what_the_loop_gives",
    "tests/methods/test_conformance.py::test_a_federation_learns_and_shows_sites_what_is_declared",
    "tests/methods/test_conformance.py::test_its_half_at_the_sites_keeps_the_contract",
    "tests/methods/test_source.py::test_the_example_has_at_most_25_lines_and_keeps_the_contract",
)
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
