"""Processes that stand still are told from those that compute, wait for a core, or read and write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from suture.core.files import MAKING, only_maker
from suture.execution.simulator import SIMULATOR, Activity, Standstill, end, look

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
SPIN = "while True: pass"
SLEEP = "import time; time.sleep(60)"
A_THREAD = f"import threading, time; threading.Thread(target=lambda: exec({SPIN!r})).start(); time.sleep(60)"
A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
MAKES = (
    "import pathlib, sys, time, suture.core.files as f\nwith f.only_maker(pathlib.Path({!r})): time.sleep(60)"
)
WRITES = "import time\nwhile True: open('/dev/null', 'wb').write(bytes(2**18)); time.sleep(0.01)"

Start = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process of a site, as FLARE's simulator does, below this one."""
    started: list[subprocess.Popen[bytes]] = []

    def site(name: str, code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, WORKER, "--client", name]))
        return started[-1]

    yield site
    for process in started:
        end(process)


def looks(wanted: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Look until the standstills are as wanted; the test's own limit of time ends it otherwise."""
    still = Standstill()
    while not wanted(found := dict(still.note(look(os.getpid())))):
        time.sleep(0.1)
    return found


@pytest.mark.complete
def test_who_sleeps_or_is_stopped_stands_still_and_who_works_does_not(start: Start) -> None:
    works = {"spins": SPIN, "thread": A_THREAD, "child": A_CHILD, "writes": WRITES}
    for name, code in {**works, "sleeps": SLEEP, "stopped": SPIN}.items():
        process = start(name, code)
    process.send_signal(signal.SIGSTOP)
    found = looks(lambda still: min(still.get("sleeps", 0), still.get("stopped", 0)) >= 20)
    assert {name: found[name] for name in works if found[name] >= 10} == {}
    process.send_signal(signal.SIGCONT)
    looks(lambda still: still["stopped"] == 0)


@pytest.mark.complete
def test_who_waits_until_another_process_has_made_a_file_does_not_stand_still(
    start: Start, tmp_path: Path
) -> None:
    lock = tmp_path / f".images{MAKING}"
    with only_maker(tmp_path / "images"):
        waits = start("waits", MAKES.format(str(tmp_path / "images")))
        start("sleeps", SLEEP)
        while not any(Path(file.path) == lock for file in psutil.Process(waits.pid).open_files()):
            time.sleep(0.1)
        assert looks(lambda still: still.get("sleeps", 0) >= 20)["waits"] < 10


@pytest.mark.complete
def test_a_site_without_a_process_has_no_activity(start: Start) -> None:
    process = start("gone", SLEEP)
    looks(lambda still: "gone" in still)
    process.kill()
    process.wait()
    assert look(os.getpid()).keys() == {SIMULATOR}
    assert look(process.pid) == {SIMULATOR: Activity()}


@pytest.mark.parametrize(
    ("course", "still"),
    [
        ([Activity({1})], 0),  # nothing is known at the first look
        ([Activity({1})] * 5, 4),
        ([Activity({1}), Activity({1}, 0.04), Activity({1}, 0.08)], 2),
        ([Activity({1}), Activity({1}, 0.04), Activity({1}, 0.12)], 0),
        ([Activity({1}), Activity({1}, 0.0, 1400), Activity({1}, 0.0, 2**17)], 0),
        ([Activity({1}), Activity({1, 2}), Activity({1, 2})], 1),
        ([Activity({1, 2}), Activity({1}), Activity({1})], 1),
        ([Activity({1}), Activity({1}, busy=True), Activity({1})], 2),
        ([Activity({1}), Activity({1}, busy=True), Activity({1}, busy=True)], 0),  # waits for a disk
    ],
)
def test_how_long_a_party_stands_still(course: list[Activity], still: int) -> None:
    counts = Standstill()
    assert [dict(counts.note({"a": activity})) for activity in course][-1] == {"a": still}
