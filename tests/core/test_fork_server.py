"""Forked processes: how they end is told, and none of them outlives the process that wanted it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from forked_work import answer

from suture.core.processes import ForkServer

pytestmark = pytest.mark.complete


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


def wait_for_end(*pids: int) -> None:
    while not gone(pids):
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_processes_are_of_one_server_and_tell_how_they_end(
    server: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    said = [line.recv() for line in server.lines]
    assert len({pid for pid, _, _ in said}) == 3
    assert {(parent, value) for _, parent, value in said} == {(said[0][1], "now")}
    assert said[0][1] != os.getpid()
    for line, word in zip(server.lines, ("fail", "die", "end"), strict=True):
        line.send(word)
    assert [server.exit_code(index) for index in (2, 0, 1, 0)] == [0, 1, -signal.SIGKILL, 1]
    with pytest.raises((EOFError, ConnectionResetError)):
        server.lines[0].recv()


def test_one_process_is_killed_and_the_others_work(server: ForkServer) -> None:
    said = [line.recv() for line in server.lines]
    server.kill(1)
    assert not psutil.pid_exists(said[1][0])
    assert [_runs(pid) for pid, _, _ in said] == [True, False, True]


def test_a_killed_server_is_told_and_its_processes_are_killed(server: ForkServer) -> None:
    said = [line.recv() for line in server.lines]
    server.wait()
    os.kill(said[0][1], signal.SIGKILL)
    assert server.exit_code(0) == -signal.SIGKILL
    server.close()
    wait_for_end(*(pid for pid, _, _ in said))


def test_a_server_may_be_closed_while_it_imports() -> None:
    before = set(psutil.Process().children(recursive=True))
    server = ForkServer(answer, 2)
    server.close()
    after = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in after if "spawn_main" in " ".join(_words(process))]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).with_name("forked_work.py")), str(tmp_path / "pids")]
    parent = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "pids").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3
        assert all(map(_runs, pids))
    finally:
        parent.send_signal(how)
        parent.wait()
    wait_for_end(*pids)


def test_processes_that_have_gone_before_they_were_known_do_not_hide_the_others() -> None:
    """The server and the first process are killed, and nobody is left who could say so."""
    made = ForkServer(answer, 2)
    while len(own := psutil.Process(made._server.pid).children()) < 2:  # type: ignore[arg-type]
        time.sleep(0.02)
    own.sort(key=lambda process: process.pid)
    made._server.kill()
    made._server.join()
    own[0].kill()
    wait_for_end(own[0].pid)
    made.close()
    wait_for_end(own[1].pid)
