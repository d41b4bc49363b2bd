"""Seven seconds of the fuzzer, the seeds that once found a fault, and what the fuzzer itself must notice.

SUTURE_FUZZ multiplies the number of cases; `make fuzz` runs a million of each target.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from targets import TARGETS

from fuzz import MEMORY, Target, case, fuzz, peak
from suture.core.errors import ConfigError, SutureError

CASES = {"messages": 2_500, "streams": 1_000, "states": 200, "models": 300, "configurations": 700}
CASES |= {"encoders": 100, "answers": 2_500}
"""As many as take about a second."""

FOUND: dict[str, list[int]] = json.loads(Path(__file__).with_name("found.json").read_text())
"""Seeds of cases that ended untyped when the fuzzer was written. A change of `mutate` makes other cases of
them, so each fault has a test by its name too, beside the tests of its reader.
"""

FIRST = 10**9
"""Other seeds than those of `make fuzz`."""


@pytest.mark.complete
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_ends_in_an_untyped_error(name: str) -> None:
    cases = int(CASES[name] * float(os.environ.get("SUTURE_FUZZ", "1")))
    assert [str(found) for found in fuzz(TARGETS[name], range(FIRST, FIRST + cases))] == []


@pytest.mark.complete
@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_stays_repaired(name: str) -> None:
    assert FOUND[name]
    assert [str(found) for found in fuzz(TARGETS[name], FOUND[name])] == []


@pytest.mark.parametrize("name", TARGETS)
def test_cases_reach_the_reader(name: str) -> None:
    """Some are read, and the others refused for many reasons: a fuzzer can test nothing without notice."""
    reasons: set[str] = set()
    read = 0
    for seed in range(400):
        if read >= 10 and len(reasons) >= 20:
            break
        try:
            TARGETS[name].read(case(TARGETS[name], seed))
            read += 1
        except SutureError as error:
            reasons.add("".join(c for c in str(error) if c.isalpha())[-60:])
    assert read >= 10
    assert len(reasons) >= 20


def raising(error: Exception) -> Callable[[object], None]:
    def read(_: object) -> None:
        raise error

    return read


@pytest.mark.complete
@pytest.mark.parametrize(
    ("read", "says"),
    [
        (raising(KeyError("labels")), "KeyError"),
        (raising(RecursionError()), "RecursionError"),
        (raising(ConfigError("")), "a message of 0 characters"),
        (raising(ConfigError("x" * 5_000)), "a message of 5000 characters"),
        (raising(ConfigError("\ud800")), "not printable"),
        (lambda _: time.sleep(60), "more than 0.2 s"),
        (lambda _: b"x" * (peak() + MEMORY), "MiB"),
    ],
    ids=["untyped", "deep", "silent", "long", "unprintable", "slow", "large"],
)
def test_the_fuzzer_notices(
    read: Callable[[object], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.SECONDS", 0.2 if "s" in says.split() else 30.0)
    (found,) = fuzz(Target("any", lambda _: None, read), [1])
    assert says in found.error
    assert found.seed == 1


def test_an_input_that_is_read_or_refused_is_no_finding() -> None:
    assert not list(fuzz(Target("any", lambda rng: rng.random(), lambda value: value), range(10)))
    assert not list(fuzz(Target("any", lambda _: None, raising(ConfigError("x: no table"))), range(10)))
