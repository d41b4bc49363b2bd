"""How the parts of `make bench` measure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
from measuring import apart, every, in_turns, tree_memory


def test_works_take_turns_in_either_order_and_the_first_time_is_left_out() -> None:
    order: list[str] = []
    found = in_turns(2, {name: partial(partial, order.append, name) for name in "ab"})
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [len(times.cpu) for times in found.values()] == [2, 2]


@pytest.mark.complete
def test_work_apart_has_a_process_of_its_own_and_raises_here() -> None:
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(FileNotFoundError):
        apart(os.stat, "/no such file")


def test_a_look_is_taken_again_and_again_until_the_block_ends() -> None:
    seen = threading.Semaphore(0)
    with every(0.001, seen.release):
        assert all(seen.acquire(timeout=10) for _ in range(3))
    while seen.acquire(blocking=False):
        pass
    assert not seen.acquire(timeout=0.05)


def test_what_looking_raises_is_raised_when_the_block_ends() -> None:
    seen = threading.Event()

    def look() -> None:
        seen.set()
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"), every(0.001, look):
        assert seen.wait(timeout=10)


HOLDS = "import os, sys; held = bytearray(os.urandom(1 << 20)) * {}; print(len(held), flush=True); input()"


def _memory_of_one_that_holds(megabytes: int) -> float:
    command = [sys.executable, "-I", "-S", "-c", HOLDS.format(megabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(process.stdout.readline()) == megabytes << 20
        found = tree_memory(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
    return found


@pytest.mark.complete
def test_the_memory_of_a_process_has_its_pages_and_none_of_one_that_has_ended() -> None:
    more = _memory_of_one_that_holds(51) - _memory_of_one_that_holds(1)
    assert 50 < more < 60  # 50 MiB are 52.4 MB
    assert tree_memory(2**22 + 1) == 0
