"""Seven seconds of the fuzzer, and the seeds that once found a fault.

SUTURE_FUZZ multiplies the number of cases; `make fuzz` runs a million of each target.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from targets import TARGETS

from fuzz import case, fuzz
from suture.core.errors import SutureError

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
def test_no_input_ends_in_an_untyped_error_and_what_was_found_stays_repaired(name: str) -> None:
    cases = int(CASES[name] * float(os.environ.get("SUTURE_FUZZ", "1")))
    assert FOUND[name]
    assert [str(found) for found in fuzz(TARGETS[name], [*FOUND[name], *range(FIRST, FIRST + cases)])] == []


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
