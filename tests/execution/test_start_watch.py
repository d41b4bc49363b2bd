"""A site that loses its process at the start is noticed; one that is slow to start is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import FederationError, InUse
from suture.core.files import hold, write_json
from suture.execution import simulator
from suture.execution import simulator as start_watch
from suture.execution.simulator import (
    _OVER,
    LOG,
    LONGEST,
    MESSAGES,
    PATIENCE,
    SIMULATOR,
    STILL,
    UNANSWERED,
    Activity,
    Lost,
    Seen,
    Simulator,
    Standstill,
    StartupMonitor,
    end,
    simulate,
    tell_over,
)
from suture.federation.server.record import LOCK
from suture.federation.site.site import TAKEOVER

START = subprocess.Popen


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
        ([(0, "a"), (PATIENCE - 1, "a"), (PATIENCE, "ab"), (9 * PATIENCE, "ab")], None),
        ([(0, "a"), (PATIENCE, "a")], "b"),  # it never came
        ([(0, "ab"), (100, "b"), (100 + PATIENCE, "b")], "a"),  # it ended
        ([(0, "ab"), (100, "b"), (101, "ab"), (102, "b"), (100 + PATIENCE, "b")], None),
        ([(0, "ab"), (100, "b"), (101, ""), (100 + PATIENCE, "")], "a"),
        ([(0, "ab"), (100, ""), (100 + PATIENCE, "")], "a"),
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


def test_a_site_hangs_that_stands_still_together_with_the_simulator_for_long_enough() -> None:
    def lost(simulator: int, site: int, fetched: str) -> Lost | None:
        return StartupMonitor("ab").find_lost(
            Seen({SIMULATOR: simulator, "a": 0, "b": site}, fetched, "a"), 0
        )

    assert not lost(STILL - 1, 999, "a")
    assert not lost(999, STILL - 1, "a")
    assert lost(STILL, STILL, "a")
    assert not lost(UNANSWERED - 1, 999, "ab")
    assert not lost(999, UNANSWERED - 1, "ab")
    assert lost(UNANSWERED, UNANSWERED, "ab")


def test_a_site_waits_for_the_lock_of_its_folder_without_being_lost() -> None:
    assert UNANSWERED > TAKEOVER


def test_what_works_without_end_is_lost_after_all() -> None:
    sites = [f"s{i}" for i in range(20)]
    calls, last = StartupMonitor(sites), LONGEST + 20 * 30.0
    works = Seen(dict.fromkeys([SIMULATOR, *sites], 0), sites[:19])
    assert calls.find_lost(works, 0) is None
    assert calls.find_lost(works, last - 1) is None
    assert calls.find_lost(works, last) == Lost("s19", "did not fetch a task")
    assert StartupMonitor([]).find_lost(Seen({SIMULATOR: 0}), 0) is None
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


PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
out, *_ = sys.argv[1:]
out, turn = Path(out), len(list(Path(out).glob("turn-*")))
(out / f"turn-{turn}").touch()
assert not any(Path(os.environ["SUTURE_MESSAGES"]).iterdir())
(Path(os.environ["SUTURE_MESSAGES"]) / "left").touch()
if LOGGED:
    print("2026-11-22 23:42:40,044 - Runner - ERROR - run_client_thread error: reset by peer")
worker = "nvflare.private.fed.app.simulator.simulator_worker"
present = PRESENT[turn]
sites = [
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", worker, "--client", site],
        start_new_session=True,
    ) for site in present
]
(out / f"pids-{turn}").write_text(json.dumps([site.pid for site in sites]))
events = out / "events.jsonl"
events.write_text(events.read_text().rpartition("\\n")[0] + "\\n")
with (out / "events.jsonl").open("a") as file:
    for site in HEARD[turn]:
        file.write(json.dumps({"event": "fetched", "site": site}) + "\\n")
    for site in ANSWERED[turn]:
        file.write(json.dumps({"event": "answer", "site": site}) + "\\n")
if len(present) < 2 or len(HEARD[turn]) < 2 or len(ANSWERED[turn]) < 2:
    time.sleep(60)
with (out / "events.jsonl").open("a") as file:
    file.write('{"event": "begin"}\\n')
[site.kill() for site in sites]
time.sleep(1.5)  # the sites are gone for longer than the patience of the test, but the run had begun
(out / "run.json").write_text('{"status": "finished"}')
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let another program take the place of the simulator: it starts these sites, at each turn."""
    write_json(tmp_path / "job.json", {"sites": ["a", "b"]})
    write_json(tmp_path / "run.json", {"status": "running"})
    earlier = '{"event": "fetched", "site": "b"}\n{"event": "begin"}\n'
    (tmp_path / "events.jsonl").write_text(earlier + '{"event": "ro')  # of an earlier job of the run
    monkeypatch.setattr(start_watch, "PATIENCE", 1.0)
    monkeypatch.setattr(start_watch, "STILL", 20)
    monkeypatch.setattr(start_watch, "UNANSWERED", 30)
    monkeypatch.setattr(start_watch, "_LOOK", 0.05)

    def start(
        *present: str,
        heard: Sequence[str] = ("ab",) * 3,
        answered: Sequence[str] = ("ab",) * 3,
        logged: bool = True,
    ) -> Path:
        values = {"PRESENT": present, "HEARD": heard, "ANSWERED": answered, "LOGGED": logged}
        script = PROGRAM
        for name, value in values.items():
            script = script.replace(name, repr(value))

        def other(command: list[str], **how: Any) -> Any:
            return START([sys.executable, "-c", script, *command[3:]], **how)

        monkeypatch.setattr(subprocess, "Popen", other)
        return tmp_path

    return start


def _runs(pid: int) -> bool:
    """Whether a process works; the simulator's are orphans when it has ended, and may wait to be fetched."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.complete
def test_a_simulator_that_has_lost_a_site_is_started_again_and_leaves_no_process(started: Any) -> None:
    out = started("a", "ab")
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
    assert not (out / ".messages").exists()
    [left] = json.loads((out / "pids-0").read_text())
    assert not _runs(left)


@pytest.mark.complete
def test_a_site_that_is_lost_twice_is_named_with_the_first_error(started: Any) -> None:
    out = started("a", "a", "ab")
    with pytest.raises(
        FederationError, match=r"^b: its process .* ended before the first round, twice; "
    ) as caught:
        simulate(out, 2)
    assert "run_client_thread error: reset by peer" in str(caught.value)
    assert len(list(out.glob("turn-*"))) == 2


@pytest.mark.complete
def test_the_end_of_an_earlier_job_ends_no_watch(started: Any) -> None:
    out = started("a", "ab")
    write_json(out / "run.json", {"status": "failed", "error": "earlier", "finished": "2026-11-22"})
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2


@pytest.mark.complete
def test_a_simulator_that_starts_no_process_is_named(started: Any) -> None:
    out = started("", "", "ab", heard=("", "", "ab"), logged=False)
    with pytest.raises(FederationError, match=r"^FLARE's simulator did not start a client process, twice; "):
        simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2


@pytest.mark.complete
def test_a_run_whose_earlier_simulator_still_works_is_refused(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = started("ab")
    monkeypatch.setattr(simulator, "TAKEOVER", 0.0)
    with (
        hold(out / LOCK, 0),
        pytest.raises(InUse, match=f"another process is using .* .process {os.getpid()}"),
    ):
        simulate(out, 2)
    assert not list(out.glob("turn-*"))
    simulate(out, 2)


@pytest.mark.complete
def test_sites_that_share_processes_are_not_watched(started: Any) -> None:
    out = started("ab")
    write_json(out / "job.json", {"sites": ["a", "b", "c"]})
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 1


@pytest.mark.complete
def test_a_simulator_in_which_a_site_is_silent_is_started_again(started: Any) -> None:
    out = started("ab", "ab", heard=("a", "ab"))
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
    assert not any(_runs(pid) for pid in json.loads((out / "pids-0").read_text()))


@pytest.mark.complete
def test_a_site_that_is_silent_twice_is_named(started: Any) -> None:
    out = started("ab", "ab", "ab", heard=("a", "a", "ab"), logged=False)
    with pytest.raises(
        FederationError,
        match=r"^b: .* before the first round, twice; \S+flare.log and the logs in \S+flare have details$",
    ):
        simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2


@pytest.mark.complete
def test_a_simulator_is_ended_when_the_server_says_that_its_work_is_done(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE would go on for seconds; this one, for minutes."""
    out = started("ab")
    rest = "from suture.execution.simulator import tell_over\ntell_over()\ntime.sleep(300)\n"
    rest += "(out / 'went on').touch()\n"
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", PROGRAM + rest)
    simulate(out, 2)
    assert not (out / "went on").exists()
    assert not (out / ".messages").exists()


@pytest.mark.complete
def test_a_simulator_begins_when_it_is_told_and_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import os, sys, tempfile, time; print(tempfile.mkdtemp(), flush=True);"
        "print(repr(sys.stdin.readline()), flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: START([sys.executable, "-c", script, *command[3:]], **how)
    )
    out = tmp_path / "r"
    out.mkdir()
    made = Simulator(out)
    made.start()
    while not (out / LOG).read_text().endswith("\n"):
        time.sleep(0.05)
    [process] = [p for p in psutil.Process().children() if script in p.cmdline()]
    assert "'" not in (out / LOG).read_text(), "it has begun"
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("flare-")]) == 1
    made.close()
    assert not process.is_running()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]
    assert sorted(path.name for path in out.iterdir()) == [LOCK, LOG]


@pytest.mark.complete
def test_one_whose_first_process_was_killed_is_ended_with_all_that_it_has_started() -> None:
    """As where memory is full: the others would go on, and finish a run that has failed."""
    script = (
        "import os, subprocess, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(60)'];"
        "own = [subprocess.Popen(sleep).pid];"
        "inner = 'import subprocess, sys, time; print(subprocess.Popen(' + repr(sleep) +"
        "', start_new_session=True).pid, flush=True); time.sleep(60)';"
        "between = subprocess.Popen([sys.executable, '-c', inner], stdout=subprocess.PIPE, text=True);"
        "print(*own, between.pid, between.stdout.readline(), flush=True); time.sleep(60)"
    )
    first = START([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert first.stdout is not None
    pids = [int(word) for word in first.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(_runs, pids))
    first.kill()
    first.wait()
    end(first)
    assert not any(map(_runs, pids))


@pytest.mark.complete
def test_one_that_leads_no_session_is_ended_and_those_beside_it_are_not() -> None:
    ended, beside = (START([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2))
    end(ended)
    assert ended.returncode == -signal.SIGKILL
    assert beside.poll() is None
    beside.kill()
    beside.wait()


@pytest.mark.complete
def test_an_earlier_simulator_cannot_say_that_another_one_is_over(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that works on after `kill -9` of its run."""
    out = started("ab")
    earlier = Simulator(out)
    earlier.start()
    orphaned = earlier._messages
    later = Simulator(out)
    later.start()
    orphaned.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(MESSAGES, str(orphaned))
    tell_over()
    assert (orphaned / _OVER).exists()
    assert later._messages != orphaned
    assert not (later._messages / _OVER).exists()
    later.close()
    earlier.close()
    assert not (out / ".messages").exists()


@pytest.mark.complete
def test_a_simulator_whose_starter_has_ended_does_not_begin(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "suture.flare.simulate", str(tmp_path / "none")]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.complete
def test_a_site_whose_answer_never_comes_is_named(started: Any) -> None:
    out = started("ab", "ab", "ab", answered=("a", "a", "ab"), logged=False)
    with pytest.raises(
        FederationError, match=r"^b: its process .* did not answer its first task before the "
    ):
        simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
