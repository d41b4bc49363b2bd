"""Processes: their cores, memory, signals and children, and how forked ones end."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_work import answer

from suture.core import processes as cores
from suture.core.processes import (
    ForkServer,
    keep_memory,
    keeping_memory,
    python_child,
    usable_cores,
    wait_for_end,
    without_interrupts,
)


def test_a_process_uses_no_more_cores_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(None, 8), ("max 100000", 8), ("150000 100000", 2), ("5000 100000", 1), ("1600000 100000", 8)]
    monkeypatch.setattr(cores, "_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    for limit, usable in [*limits, ("unknown", 8)]:
        if limit:
            (tmp_path / "cpu.max").write_text(limit + "\n")
        assert usable_cores() == usable
    monkeypatch.delattr(os, "sched_getaffinity")  # a system without affinity
    assert usable_cores() == 64


@pytest.mark.complete
def test_a_process_that_nobody_has_asked_for_its_exit_code_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        process, began = psutil.Process(child.pid), time.monotonic()
        wait_for_end([process], 0.2)
        assert time.monotonic() - began >= 0.2
        assert process.status() != psutil.STATUS_ZOMBIE
        child.kill()
        wait_for_end([process], math.inf)
        assert process.status() == psutil.STATUS_ZOMBIE
    finally:
        child.kill()
        child.wait()
    wait_for_end([process])


@pytest.mark.parametrize("other", [False, True], ids=["this thread", "a library's thread"])
def test_ctrl_c_waits_until_what_is_started_is_known(other: bool) -> None:
    """A thread that does not block the signal, as one of a library, receives it."""
    known, release = [], threading.Event()

    def start() -> None:
        with without_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            known.append("started")
        time.sleep(0.2)
        known.append("went on")

    if other:
        threading.Thread(target=release.wait).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        release.set()
    assert known == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="Darwin does not hold to limits of memory")
@pytest.mark.parametrize(
    ("limit", "work", "said"),
    [
        ("limit_memory(2**26)", "bytearray(2**27)", "MemoryError"),
        ("limit_memory(2**28)", "bytearray(2**27)", ""),
        ("limit_seconds(0)", "while True: pass", "killed"),
    ],
)
def test_a_process_limits_itself(limit: str, work: str, said: str) -> None:
    code = f"from suture.core.processes import limit_memory, limit_seconds\n{limit}\n{work}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == {"": 0, "MemoryError": 1, "killed": -signal.SIGXCPU}[said]
    assert said in (done.stderr or "killed")


@pytest.mark.complete
def test_a_child_ends_with_its_block() -> None:
    with python_child(
        "timeit", "-n", "1", "-s", "import time", "time.sleep(60)", stdin=subprocess.DEVNULL
    ) as child:
        assert child.poll() is None
    assert child.returncode == -signal.SIGKILL


# Forked processes: how they end is told, and none of them outlives the process that wanted it


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("SUTURE_TRIAL", "now")
    made = ForkServer(answer, 3)
    yield made
    started = psutil.Process().children(recursive=True)
    made.close()
    assert gone(p.pid for p in started if "resource_tracker" not in " ".join(_words(p)))


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def gone(pids: Iterable[int]) -> bool:
    """Whether processes have ended; what nobody has waited for yet has ended, too."""
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids: int) -> None:
    while not gone(pids):
        time.sleep(0.05)


@pytest.mark.complete
def test_processes_are_of_one_server_and_tell_how_they_end(server: ForkServer) -> None:
    said = [line.recv() for line in server.lines]
    assert len({pid for pid, _, _ in said}) == 3
    assert {(parent, value) for _, parent, value in said} == {(said[0][1], "now")}
    assert said[0][1] != os.getpid()
    for line, word in zip(server.lines, ("fail", "die", "end"), strict=True):
        line.send(word)
    assert [server.exit_code(index) for index in (2, 0, 1, 0)] == [0, 1, -signal.SIGKILL, 1]
    with pytest.raises((EOFError, ConnectionResetError)):
        server.lines[0].recv()


@pytest.mark.complete
def test_one_process_is_killed_alone_and_a_killed_server_takes_all(server: ForkServer) -> None:
    said = [line.recv() for line in server.lines]
    server.kill(1)
    assert [_runs(pid) for pid, _, _ in said] == [True, False, True]
    server.wait()
    os.kill(said[0][1], signal.SIGKILL)
    assert server.exit_code(0) == -signal.SIGKILL
    server.close()
    wait_until_gone(*(pid for pid, _, _ in said))


@pytest.mark.complete
def test_a_server_may_be_closed_while_it_imports() -> None:
    before = set(psutil.Process().children(recursive=True))
    ForkServer(answer, 2).close()
    after = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in after if "spawn_main" in " ".join(_words(process))]


@pytest.mark.complete
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).with_name("forked_work.py")), str(tmp_path / "pids")]
    parent = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "pids").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert [_runs(pid) for pid in pids] == [True] * 3
    finally:
        parent.send_signal(how)
        parent.wait()
    wait_until_gone(*pids)


@pytest.mark.complete
def test_processes_that_have_gone_before_they_were_known_do_not_hide_the_others() -> None:
    """The server and the first process are killed, and nobody is left who could say so."""
    made = ForkServer(answer, 2)
    while len(own := psutil.Process(made._server.pid).children()) < 2:  # type: ignore[arg-type]
        time.sleep(0.02)
    own.sort(key=lambda process: process.pid)
    made._server.kill()
    made._server.join()
    own[0].kill()
    wait_until_gone(own[0].pid)
    made.close()
    wait_until_gone(own[1].pid)


# Memory that was freed is used again, where the C library can be told so


# Takes and frees 64 MB twenty times, written to, and counts the pages that the kernel had to give.
FAULTS = """
import resource, threading
from suture.core.processes import keep_memory
{first}
def use():
    for _ in range(20):
        bytearray(64_000_000)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
{then}
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

IN_A_THREAD = "thread = threading.Thread(target=use); thread.start(); thread.join()"
PAGES = 64_000_000 // 4096

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")


def faults(first: str = "", then: str = "use()", environment: dict[str, str] | None = None) -> int:
    program = FAULTS.format(first=first, then=then)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain | (environment or {}), capture_output=True, check=True
    )
    return int(done.stdout)


@pytest.mark.complete
@glibc
def test_a_process_and_its_threads_use_freed_memory_again() -> None:
    assert faults() > 10 * PAGES  # else the next shows nothing
    assert faults(first="assert keep_memory()") < PAGES
    assert faults(then=IN_A_THREAD) > 10 * PAGES
    assert faults(then=IN_A_THREAD, environment=keeping_memory({})) < 2 * PAGES
    given = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what the user has set stays
    assert faults(first="assert not keep_memory()", environment=given) > 10 * PAGES


def test_the_environment_of_a_process_keeps_what_the_user_has_set() -> None:
    environment = keeping_memory({"MALLOC_ARENA_MAX": "4", "PATH": "/bin"})
    assert (environment["MALLOC_ARENA_MAX"], environment["PATH"]) == ("4", "/bin")
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(2**30)


@pytest.mark.parametrize("library", [object(), None], ids=["no glibc", "no C library"])
def test_another_system_is_left_as_it_is(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: None) -> Any:
        if library is None:
            raise OSError("no library")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not keep_memory()
