"""A site of FLARE's simulator that has lost its process, or hangs, is noticed; a slow one is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.files import MAKING, only_maker
from suture.execution.simulator import (
    ABSENCE,
    LONGEST,
    SIMULATOR,
    STILL,
    UNANSWERED,
    Activity,
    Lost,
    Seen,
    Standstill,
    StartupMonitor,
    end,
    look,
)
from suture.federation.site.site import SITE_TAKEOVER

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
SPIN, SLEEP = "while True: pass", "import time; time.sleep(60)"
WORKING = {
    "spins": SPIN,
    "thread": f"import threading as t; t.Thread(target=lambda: exec({SPIN!r})).start(); input()",
    "child": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])",
    "writes": "import time\nwhile True: open('/dev/null', 'wb').write(bytes(2**18)); time.sleep(0.01)",
}
MAKES = "import pathlib, suture.core.files as f\nwith f.only_maker(pathlib.Path({!r})): input()"

Start = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process of a site, as FLARE's simulator does, below this one."""
    started = list[subprocess.Popen[bytes]]()

    def site(name: str, code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, WORKER, "--client", name]))
        return started[-1]

    yield site
    for process in started:
        end(process)


def looks(wanted: Callable[[Mapping[str, int]], bool]) -> Mapping[str, int]:
    """Look until the standstills are as wanted; the test's own limit of time ends it otherwise."""
    still = Standstill()
    while not wanted(found := still.note(look(os.getpid()))):
        time.sleep(0.1)
    return found


@pytest.mark.complete
def test_who_sleeps_or_is_stopped_stands_still_and_who_works_or_waits_for_a_file_does_not(
    start: Start, tmp_path: Path
) -> None:
    lock = str(tmp_path / f".images{MAKING}")
    with only_maker(tmp_path / "images"):
        waits = start("waits", MAKES.format(str(tmp_path / "images")))
        for name, code in {**WORKING, "sleeps": SLEEP, "stopped": SPIN}.items():
            process = start(name, code)
        process.send_signal(signal.SIGSTOP)
        while lock not in [file.path for file in psutil.Process(waits.pid).open_files()]:
            time.sleep(0.1)
        found = looks(lambda still: min(still.get("sleeps", 0), still.get("stopped", 0)) >= 20)
        assert {name: found[name] for name in (*WORKING, "waits") if found[name] >= 10} == {}
    process.send_signal(signal.SIGCONT)
    looks(lambda still: still["stopped"] == 0)


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


def seen(present: str, fetched: str = "ab", answered: str = "", still: str = "") -> Seen:
    """What a look shows; each site that stands still does so for ever, as does the simulator, "-"."""
    looks = {SIMULATOR: 10_000 if "-" in still else 0, **{s: 10_000 * (s in still) for s in present}}
    return Seen(looks, fetched, answered)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        ([(0, "")], None),
        ([(0, ""), (LONGEST, "")], None),  # the simulator itself is slow
        ([(0, "ab"), (9_999, "ab")], None),  # a site reads its images
        ([(0, "a"), (ABSENCE - 1, "a"), (ABSENCE, "ab"), (9 * ABSENCE, "ab")], None),
        ([(0, "a"), (ABSENCE, "a")], "b"),  # it never came
        ([(0, "ab"), (100, "b"), (100 + ABSENCE, "b")], "a"),  # it ended
        ([(0, "ab"), (100, "b"), (101, "ab"), (102, "b"), (100 + ABSENCE, "b")], None),
        ([(0, "ab"), (100, "b"), (101, ""), (100 + ABSENCE, "")], "a"),
        ([(0, "ab"), (100, ""), (100 + ABSENCE, "")], "a"),
    ],
)
def test_which_site_has_ended(looks: list[tuple[float, str]], lost: str | None) -> None:
    calls = StartupMonitor("ab")
    said = [calls.find_lost(seen(present), now) for now, present in looks]
    assert said[-1] == (Lost(lost, "ended") if lost else None)
    assert not any(said[:-1])


@pytest.mark.parametrize(
    ("shown", "lost"),
    [
        (seen("ab", "", still=""), None),  # all import
        (seen("ab", "", still="ab"), None),  # the server reads its images
        (seen("ab", "", still="-"), None),
        (seen("ab", "", still="-ab"), Lost("a", "did not fetch a task")),
        (seen("ab", "", still="-b"), Lost("b", "did not fetch a task")),
        (seen("ab", "a", still="-"), None),
        (seen("ab", "a", still="-b"), Lost("b", "did not fetch a task")),
        (seen("ab", "ab", "a", still="-"), None),  # b reads its images
        (seen("ab", "ab", "a", still="-a"), None),
        (seen("ab", "ab", "ab", still="-ab"), None),  # the server alone has something to do
        (seen("ab", "ab", "a", still="-b"), Lost("b", "did not answer its first task")),
        (seen("", "", still="-"), Lost(None, "did not start")),
    ],
)
def test_which_site_hangs(shown: Seen, lost: Lost | None) -> None:
    assert StartupMonitor("ab").find_lost(shown, 0) == lost


@pytest.mark.parametrize(("fetched", "enough"), [("a", STILL), ("ab", UNANSWERED)])
def test_a_site_hangs_that_stands_still_together_with_the_simulator_for_long_enough(
    fetched: str, enough: int
) -> None:
    def lost(simulator: int, site: int) -> Lost | None:
        looks = {SIMULATOR: simulator, "a": 0, "b": site}
        return StartupMonitor("ab").find_lost(Seen(looks, fetched, "a"), 0)

    assert not lost(enough - 1, 999)
    assert not lost(999, enough - 1)
    assert lost(enough, enough)
    assert UNANSWERED > SITE_TAKEOVER, "a site waits for the lock of its folder without being lost"


def test_what_works_without_end_is_lost_after_all() -> None:
    sites = [f"s{i}" for i in range(20)]
    calls, last = StartupMonitor(sites), LONGEST + 20 * 30.0
    works = Seen(dict.fromkeys([SIMULATOR, *sites], 0), sites[:19])
    assert calls.find_lost(works, 0) is None
    assert calls.find_lost(works, last - 1) is None
    assert calls.find_lost(works, last) == Lost("s19", "did not fetch a task")
    calls = StartupMonitor([])  # they share processes
    assert calls.find_lost(Seen({SIMULATOR: 0}), 0) is None
    assert calls.find_lost(Seen({SIMULATOR: 0}), LONGEST) == Lost(None, "did not start")


@pytest.mark.complete
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "ab"]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_no_site_is_lost_that_works_at_every_other_look_or_has_answered(
    course: list[tuple[str, bool, bool]],
) -> None:
    """Whatever the others and the simulator do, in less than the longest time."""
    calls, still = StartupMonitor("ab"), Standstill()
    for now, (answered, rests, simulator_rests) in enumerate(course * 5):
        cpu = {SIMULATOR: 0.0 if simulator_rests else now, "a": 0.0 if rests else now, "b": now // 2}
        activities = {name: Activity({len(name)}, float(used)) for name, used in cpu.items()}
        lost = calls.find_lost(Seen(still.note(activities), answered, answered), now)
        assert lost is None or (lost.site == "a" and rests and "a" not in answered)
