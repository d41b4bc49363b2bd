"""A site that loses its process at the start is noticed; one that is slow to start is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import FederationError
from suture.core.files import write_json
from suture.simulation import start_watch
from suture.simulation.simulator import simulate
from suture.simulation.start_watch import PATIENCE, SILENCE, Lost, RollCall

START = subprocess.Popen


@pytest.mark.parametrize(
    ("seen", "lost"),
    [
        ([(0, "")], None),
        ([(0, ""), (3600, "")], None),  # the simulator itself is slow
        ([(0, "ab"), (3600, "ab")], None),  # a site reads its images
        ([(0, "a"), (PATIENCE - 1, "a"), (PATIENCE, "ab"), (9 * PATIENCE, "ab")], None),
        ([(0, "a"), (PATIENCE, "a")], "b"),  # it never came
        ([(0, "ab"), (100, "b"), (100 + PATIENCE, "b")], "a"),  # it ended
        ([(0, "ab"), (100, "b"), (101, "ab"), (102, "b"), (100 + PATIENCE, "b")], None),
        ([(0, "ab"), (100, "b"), (101, ""), (100 + PATIENCE, "")], "a"),
        ([(0, "ab"), (100, ""), (100 + PATIENCE, "")], "a"),
    ],
)
def test_which_site_is_lost(seen: list[tuple[float, str]], lost: str | None) -> None:
    calls = RollCall(["a", "b"])
    said = [calls.lost(list(present), ["a", "b"], now) for now, present in seen]
    assert said[-1] == (Lost(lost, "ended") if lost else None)
    assert not any(said[:-1])


@pytest.mark.parametrize(
    ("seen", "lost"),
    [
        ([(0, ""), (8, "a"), (SILENCE - 1, "a"), (SILENCE, "ab"), (9_999, "ab")], None),
        ([(0, ""), (8, "a"), (SILENCE, "a")], "b"),
        ([(0, ""), (30, "a"), (SILENCE, "a"), (89, "a"), (90, "ab")], None),  # all are slow
        ([(0, ""), (30, "a"), (SILENCE, "a"), (89, "a"), (90, "a")], "b"),
        ([(0, ""), (119, "")], None),
        ([(0, ""), (119, ""), (120, "")], "a"),  # none of two on two cores was heard
        ([(100, ""), (219, ""), (219.5, "b"), (457, "b"), (458.5, "b")], "a"),  # from the first process
    ],
)
def test_which_site_is_silent(seen: list[tuple[float, str]], lost: str | None) -> None:
    calls = RollCall(["a", "b"])
    said = [calls.lost(["a", "b"], list(heard), now) for now, heard in seen]
    assert said[-1] == (Lost(lost, "fetched no task") if lost else None)
    assert not any(said[:-1])


def test_many_sites_on_few_cores_have_time_for_their_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_watch.os, "cpu_count", lambda: 2)
    sites = [f"s{i:02d}" for i in range(50)]
    calls = RollCall(sites)
    assert calls.lost(sites, [], 0) is None
    assert calls.lost(sites, [], 50 * 40 / 2 - 1) is None
    assert calls.lost(sites, [], 50 * 40 / 2) == Lost("s00", "fetched no task")


@given(
    st.lists(st.floats(0, 1e4), min_size=2, max_size=8),
    st.floats(1, 2.99),
)
def test_no_site_is_silent_that_takes_less_than_three_times_as_long_as_the_first(
    starts: list[float], slower: float
) -> None:
    """Whatever a process does after its first task, and however long the first one took."""
    first = min(1 + start / 100 for start in starts)  # of about 100 s at most, so that somebody is heard
    at = {f"s{i}": min(1 + start / 100, first * slower) for i, start in enumerate(starts)}
    calls = RollCall(list(at))
    for now in sorted({0.0, *at.values(), 1e5}):
        heard = [site for site, then in at.items() if then <= now]
        assert calls.lost(list(at), heard, now) is None


SIMULATOR = """
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
if len(present) < 2 or len(HEARD[turn]) < 2:
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
    monkeypatch.setattr(start_watch, "SILENCE", 2.0)
    monkeypatch.setattr(start_watch, "_SLOWER", 0.0)
    monkeypatch.setattr(start_watch, "_LOOK", 0.05)

    def start(*present: str, heard: Sequence[str] = ("ab",) * 3, logged: bool = True) -> Path:
        script = SIMULATOR.replace("PRESENT", repr(present)).replace("HEARD", repr(heard))
        script = script.replace("LOGGED", repr(logged))

        def other(command: list[str], **how: Any) -> Any:
            return START([sys.executable, "-c", script, *command[3:]], **how)

        monkeypatch.setattr(subprocess, "Popen", other)
        return tmp_path

    return start


def test_a_simulator_that_has_lost_a_site_is_started_again_and_leaves_no_process(started: Any) -> None:
    out = started("a", "ab")
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
    assert not (out / ".messages").exists()
    [left] = json.loads((out / "pids-0").read_text())
    assert not psutil.pid_exists(left)


def test_a_site_that_is_lost_twice_is_named_with_the_first_error(started: Any) -> None:
    out = started("a", "a", "ab")
    with pytest.raises(
        FederationError, match=r"^b: its process .* ended before the first round, twice; "
    ) as caught:
        simulate(out, 2)
    assert "run_client_thread error: reset by peer" in str(caught.value)
    assert len(list(out.glob("turn-*"))) == 2


def test_sites_that_share_processes_are_not_watched(started: Any) -> None:
    out = started("ab")
    write_json(out / "job.json", {"sites": ["a", "b", "c"]})
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 1


def test_a_simulator_in_which_a_site_is_silent_is_started_again(started: Any) -> None:
    out = started("ab", "ab", heard=("a", "ab"))
    simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
    assert not any(psutil.pid_exists(pid) for pid in json.loads((out / "pids-0").read_text()))


def test_a_site_that_is_silent_twice_is_named(started: Any) -> None:
    out = started("ab", "ab", "ab", heard=("a", "a", "ab"), logged=False)
    with pytest.raises(
        FederationError,
        match=r"^b: its process in FLARE's simulator fetched no task before the first round, twice; "
        r"\S+flare.log and the logs in \S+flare say more$",
    ):
        simulate(out, 2)
    assert len(list(out.glob("turn-*"))) == 2
