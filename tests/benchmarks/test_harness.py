"""What every benchmark has: its options, how it measures, and the commit that it states."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, Literal

import harness
import pytest
from harness import apart, command, every, in_turns, interval, recorded, table, tree_memory


def given(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What a benchmark is called with."""
    found: dict[str, Any] = {}

    def main(
        job: str,
        seeds: tuple[int, ...] = (1, 2),
        way: Literal["loop", "flare"] = "loop",
        at: float | None = None,
        exact_only: bool = False,
    ) -> None:
        found.update(locals())

    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    command(main, seeds=(1,))
    del found["found"]
    return found


def test_the_parameters_of_a_benchmark_are_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"job": "demo", "seeds": (1, 2), "way": "loop", "at": None, "exact_only": False}
    assert given(monkeypatch, "demo") == plain
    assert given(monkeypatch, "demo", "--quick") == {**plain, "seeds": (1,)}
    words = ("demo", "--quick", "--seeds", "4", "5", "--way", "flare", "--at", "2", "--exact-only")
    assert given(monkeypatch, *words) == {
        "job": "demo", "seeds": [4, 5], "way": "flare", "at": 2.0, "exact_only": True
    }  # fmt: skip


@pytest.mark.parametrize("words", [(), ("demo", "--way", "poc"), ("demo", "--seeds", "a"), ("demo", "--se")])
def test_what_a_benchmark_does_not_take_is_refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        given(monkeypatch, *words)
    assert ended.value.code == 2


def test_a_table_keeps_its_columns() -> None:
    assert [*table(("a", "b"), [("1|2", 3)])] == ["| a | b |", "|---|---|", "| 1 2 | 3 |"]


def test_an_interval_is_of_students_t() -> None:
    """Of 1, 2 and 3: mean 2, deviation 1, and 4.303 of 1 / sqrt(3) on either side."""
    assert interval([1, 2, 3]) == "+2.000 (-0.484 to +4.484)"
    assert interval([0.5]) == "+0.500"


def test_what_is_recorded_is_not_measured_again(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    assert recorded(records, {"seed": 1}, lambda: [0.5]) == [0.5]
    assert recorded(records, {"seed": 1}, lambda: [0.9]) == [0.5]
    assert recorded(records, {"seed": 2}, lambda: [0.9]) == [0.9]


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


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.complete
def test_the_commit_and_whether_the_tree_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.commit() == "no commit"
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "one")
    name = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert harness.commit() == f"commit {name}"
    (tmp_path / "new.py").write_text("")
    assert harness.commit() == f"commit {name}, changed"
