"""The guard of a server's job, over FLARE's own cells: `job_guard_cases`, in a process of its own.

FLARE has the state of its cells once in a process; after those of the guard, no administrator can log in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.complete


def test_the_cases_hold_in_a_process_of_their_own() -> None:
    cases = Path(__file__).with_name("job_guard_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # It is 5 where nothing was collected.
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
