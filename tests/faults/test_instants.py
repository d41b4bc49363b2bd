"""Kill -9 of a federation at any instant, within a save too: it continues to the clean run's bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger import Found, rounds_lost
from poc import digest

import suture.core.files
import suture.federation.server.collector
import suture.protocol.packing
from killing import forked as start
from killing import killing
from suture.core.files import whole_lines
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
LIMITS = (0, 600_000, 2**27)
"""Bytes of updates in memory: none, those of one of three sites, all; the clean run has all."""
QUICK, ALL = range(4), range(4, 20)
CLEAN: dict[str, Any] = {}


def forked(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Does work in a process of its own; returns how it ended.

    Args:
        kill_after: seconds after which it is killed.
    """
    child = start(work)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(work: Callable[[], object], step: int) -> Callable[[], object]:
    """Work that is killed at the n-th step of its saves: before or after a write, a sync, a rename."""

    def run() -> None:
        counted = killing(step)
        suture.protocol.packing.save_file = counted(suture.protocol.packing.save_file)  # type: ignore[attr-defined]
        suture.core.files.os.fsync = counted(os.fsync)  # type: ignore[attr-defined]
        suture.core.files.os.replace = counted(os.replace)  # type: ignore[attr-defined]
        work()

    return run


def kill_and_continue(number: int, tiny: Any, tmp_path: Path) -> Found:
    federation = tiny(METHOD, rounds=4)
    if not CLEAN:
        begun = time.monotonic()
        assert forked(lambda: federation.run("clean")) == 0
        CLEAN.update(seconds=time.monotonic() - begun, model=digest(tmp_path / "runs" / "clean"))
    draw = random.Random(number)

    def work() -> object:
        suture.federation.server.collector.IN_MEMORY = LIMITS[number % 3]
        return federation.run("cut")

    if number % 2:
        code = forked(dying(work, draw.randrange(1, 120)))
    else:
        code = forked(work, kill_after=draw.uniform(0, CLEAN["seconds"]))
    assert code in (-signal.SIGKILL, 0)
    folder = tmp_path / "runs" / "cut"
    before = len(whole_lines(folder / "events.jsonl"))
    assert forked(lambda: federation.run("cut")) == 0
    model, lost = digest(folder), rounds_lost(folder, before)
    assert model == CLEAN["model"]
    assert lost <= 1
    return Found(rounds_lost=lost, model=model)


@pytest.mark.complete
@pytest.mark.case("instants")
@pytest.mark.parametrize("number", QUICK)
def test_a_killed_federation_continues_to_the_same_bytes(
    number: int, tiny: Any, tmp_path: Path, note: Any
) -> None:
    note(kill_and_continue(number, tiny, tmp_path))


@pytest.mark.faults
@pytest.mark.case("instants")
@pytest.mark.parametrize("number", ALL)
def test_at_more_instants(number: int, tiny: Any, tmp_path: Path, note: Any) -> None:
    note(kill_and_continue(number, tiny, tmp_path))
