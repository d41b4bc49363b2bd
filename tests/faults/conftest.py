"""Faults: each case is tried several times, and a try that was good is not made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger import Found, Ledger, repeats


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attempt" in metafunc.fixturenames:
        metafunc.parametrize("attempt", range(repeats()))


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    """The tries so far."""
    return Ledger()


@pytest.fixture
def note(request: pytest.FixtureRequest, ledger: Ledger) -> Callable[[Found], None]:
    """Keeps what the test found, for the case that its marker names; skips what has been done."""
    case = request.node.get_closest_marker("case").args[0]
    name = request.node.name
    if ledger.done(case, name):
        pytest.skip("done before")
    return lambda found: ledger.note(case, name, found)
