"""FLARE's simulator in a process of its own: what it says where it fails, and that all of it ends."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from small_job import SMALL
from suture.core.errors import ConfigError, FederationError, InUse
from suture.core.files import hold, write_json
from suture.execution import simulator
from suture.execution.run import run_job
from suture.execution.simulator import (
    _OVER,
    LOG,
    MESSAGES,
    Simulator,
    end,
    first_logged,
    open_to_others,
    simulate,
    tell_over,
    with_first_error,
)
from suture.federation.server.record import SERVER_LOCK, Record
from world import refused

START = subprocess.Popen
WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
SLEEP = "import time; time.sleep(60)"

PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
out, messages = Path(sys.argv[1]), Path(os.environ["SUTURE_MESSAGES"])
turn = len(list(out.glob("turn-*")))
(out / f"turn-{turn}").touch()
assert not any(messages.iterdir())
(messages / "left").touch()
if LOGGED:
    print("2026-11-22 23:42:40,044 - Runner - ERROR - run_client_thread error: reset by peer")
present, heard, answered = TURNS[turn]
sleep = [sys.executable, "-c", "import time; time.sleep(60)", WORKER, "--client"]
sites = [subprocess.Popen([*sleep, site], start_new_session=True) for site in present]
(out / f"pids-{turn}").write_text(json.dumps([site.pid for site in sites]))
events = out / "events.jsonl"
events.write_text(events.read_text().rpartition("\\n")[0] + "\\n")

def tell(**event):
    with events.open("a") as file:
        file.write(json.dumps(event) + "\\n")

[tell(event="fetched", site=site) for site in heard]
[tell(event="answer", site=site) for site in answered]
if min(map(len, TURNS[turn])) < 2:
    time.sleep(60)
tell(event="begin")
[site.kill() for site in sites]
time.sleep(1.5)  # the sites are gone for longer than the patience of the test, but the run had begun
(out / "run.json").write_text('{"status": "finished"}')
if LAST:
    from suture.execution.simulator import tell_over
    tell_over()
    time.sleep(300)
    (out / 'went on').touch()
"""
WHOLE, WITHOUT_B, DEAF, MUTE = ("ab", "ab", "ab"), ("a", "ab", "ab"), ("ab", "a", "ab"), ("ab", "ab", "a")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let another program take the place of the simulator: at each turn these sites start, fetch, answer."""
    write_json(tmp_path / "job.json", {"sites": ["a", "b"]})
    write_json(tmp_path / "run.json", {"status": "running"})
    earlier = '{"event": "fetched", "site": "b"}\n{"event": "begin"}\n'
    (tmp_path / "events.jsonl").write_text(earlier + '{"event": "ro')  # of an earlier job of the run
    for name, value in (("ABSENCE", 1.0), ("STILL", 20), ("UNANSWERED", 30), ("_WATCH_LOOK", 0.05)):
        monkeypatch.setattr(simulator, name, value)

    def start(*turns: tuple[str, str, str], logged: bool = True, last: bool = False) -> Path:
        script = f"TURNS, LOGGED, LAST, WORKER = {turns!r}, {logged}, {last}, {WORKER!r}\n{PROGRAM}"
        other = lambda command, **how: START([sys.executable, "-c", script, *command[3:]], **how)  # noqa: E731
        monkeypatch.setattr(subprocess, "Popen", other)
        return tmp_path

    return start


def _runs(pid: int) -> bool:
    """Whether a process works; the simulator's are orphans when it has ended, and may wait to be fetched."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def turns(out: Path) -> int:
    return len(list(out.glob("turn-*")))


@pytest.mark.complete
@pytest.mark.parametrize("first", [WITHOUT_B, DEAF])
def test_a_simulator_that_has_lost_a_site_is_started_again_and_leaves_no_process(
    first: tuple[str, str, str], started: Any
) -> None:
    out = started(first, WHOLE)
    write_json(out / "run.json", {"status": "failed", "error": "of an earlier job", "finished": "2026-11-22"})
    simulate(out, 2)
    assert turns(out) == 2
    assert not (out / ".messages").exists()
    assert not any(map(_runs, json.loads((out / "pids-0").read_text())))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("turn", "logged", "named"),
    [
        (WITHOUT_B, True, ["b: ", "ended", "run_client_thread error: reset by peer"]),
        (DEAF, False, ["b: ", "did not fetch", "flare.log"]),
        (MUTE, False, ["b: ", "did not answer"]),
        (("", "", "ab"), False, ["FLARE's simulator did not start"]),
    ],
)
def test_what_is_lost_twice_is_named_with_the_first_error(
    turn: tuple[str, str, str], logged: bool, named: list[str], started: Any
) -> None:
    out = started(turn, turn, WHOLE, logged=logged)
    with refused(*named, by=FederationError):
        simulate(out, 2)
    assert turns(out) == 2


@pytest.mark.complete
def test_a_run_whose_earlier_simulator_still_works_is_refused(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = started(WHOLE)
    monkeypatch.setattr(simulator, "SERVER_TAKEOVER", 0.0)
    with hold(out / SERVER_LOCK, 0), refused(f"process {os.getpid()}", by=InUse):
        simulate(out, 2)
    assert turns(out) == 0
    write_json(out / "job.json", {"sites": ["a", "b", "c"]})  # share processes, and are not watched
    simulate(out, 2)
    assert turns(out) == 1


@pytest.mark.complete
def test_a_simulator_is_ended_when_the_server_says_that_its_work_is_done(started: Any) -> None:
    """FLARE would go on for seconds; this one, for minutes."""
    out = started(WHOLE, last=True)
    simulate(out, 2)
    assert not (out / "went on").exists()
    assert not (out / ".messages").exists()


@pytest.mark.complete
def test_an_earlier_simulator_cannot_say_that_another_one_is_over(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that works on after `kill -9` of its run."""
    out = started(WHOLE)
    earlier, later = Simulator(out), Simulator(out)
    earlier.start()
    orphaned = earlier._messages
    later.start()
    orphaned.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(MESSAGES, str(orphaned))
    tell_over()
    assert (orphaned / _OVER).exists()
    assert not (later._messages / _OVER).exists()
    later.close()
    earlier.close()
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
    ending(monkeypatch, script)
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
    assert sorted(path.name for path in out.iterdir()) == [SERVER_LOCK, LOG]


@pytest.mark.complete
def test_a_simulator_whose_starter_has_ended_does_not_begin(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "suture.flare.simulate", str(tmp_path / "none")]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
    ended, beside = (START([sys.executable, "-c", SLEEP]) for _ in range(2))  # neither leads a session
    assert first.stdout is not None
    pids = [int(word) for word in first.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(_runs, pids))
    first.kill()
    first.wait()
    end(first)
    assert not any(map(_runs, pids))
    end(ended)
    assert ended.returncode == -signal.SIGKILL
    assert beside.poll() is None
    beside.kill()
    beside.wait()


TIME = "2026-11-22 23:42:40,044 - "
CAUGHT = f"""{TIME}Core - INFO - ERROR is only a word here
{TIME}Job - \x1b[31mERROR\x1b[0m - cannot start harbor
Traceback (most recent call last):
  File "x.py", line 1, in <module>
suture.core.errors.ConfigError: harbor: no suture.toml; write one
{TIME}Job - ERROR - a consequence
"""
FIRST = "cannot start harbor: harbor: no suture.toml; write one"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CAUGHT, FIRST),
        (f"{TIME}ERROR - too many threads.\n{TIME}ERROR - more", "too many threads."),
        ("Traceback (most recent call last):\n  File\nImportError: no 'x'", "ImportError: no 'x'"),
        (f"{TIME}Job - INFO - all is well\n", None),
        ("", None),
    ],
)
def test_the_first_error_of_a_log(text: str, says: str | None) -> None:
    assert first_logged(text) == says


def ending(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let another program take the place of the simulator."""

    def other(command: list[str], **how: Any) -> Any:
        simulates = "suture.flare.simulate" in command
        return START([sys.executable, "-c", script, *command[3:]] if simulates else command, **how)

    monkeypatch.setattr(simulator.subprocess, "Popen", other)


@pytest.mark.complete
def test_a_simulator_that_fails_says_why_in_one_line_and_nothing_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    for script, named in (
        (f"print({CAUGHT!r}); raise SystemExit(1)", FIRST),
        ("import os; os.kill(os.getpid(), 9)", "--workers"),  # memory was full
        ("raise SystemExit(7)", "code 7"),
    ):
        ending(monkeypatch, script)
        with refused(named, "flare.log", by=FederationError):
            run_job(SMALL, "sim", out, resume=out.exists())
        said = json.loads((out / "run.json").read_text())["error"]
        assert named in said
        assert "\n" not in said


def test_an_error_of_a_site_comes_first_unless_it_is_of_an_earlier_run(tmp_path: Path) -> None:
    Record(tmp_path).update(started="2026-11-22T10:00:00+00:00")
    state = tmp_path / "sites" / "harbor" / "state" / "experiments" / "r"
    before_it_opened = tmp_path / "flare" / "demo" / "lakeside" / "suture"
    for folder, time_, site, message in (
        (state, "2026-11-21T10:00:00+00:00", "harbor", "of yesterday"),
        (state, "2026-11-22T10:02:00+00:00", "harbor", "harbor: labels.csv, row 3"),
        (before_it_opened, "2026-11-22T10:01:00+00:00", "lakeside", "the method 'x' is not installed"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.jsonl").open("a") as file:
            file.write(json.dumps({"time": time_, "site": site, "message": message}) + "\n")
    assert with_first_error(tmp_path, "few") == "lakeside: the method 'x' is not installed (few)"
    (before_it_opened / "errors.jsonl").unlink()
    assert with_first_error(tmp_path, "few") == "harbor: labels.csv, row 3 (few)"
    (state / "errors.jsonl").unlink()
    assert with_first_error(tmp_path, "few") == "few"


@pytest.mark.complete
def test_processes_are_at_most_one_for_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def simulated(out: Path, processes: int, simulator: object) -> None:
        seen.append(processes)
        raise FederationError("enough")

    monkeypatch.setattr("suture.execution.run.simulate", simulated)
    for workers in (None, 2, 99):
        with refused("enough", by=FederationError):
            run_job(SMALL, "sim", tmp_path / str(workers), workers=workers)
    assert seen == [3, 2, 3]


@pytest.mark.parametrize("what", ["--out", "TMPDIR", "Python"])
def test_a_path_that_flare_would_tear_apart_is_refused_before_anything_is_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the simulator ends with `return code 2`, and no log says why."""
    blank = tmp_path / "my data"
    if what == "TMPDIR":
        monkeypatch.setattr("tempfile.tempdir", str(blank))
    if what == "Python":
        monkeypatch.setattr(sys, "executable", str(blank / "python"))
    with refused("my data", f"({what})", "--env local", by=ConfigError):
        run_job(SMALL, env="sim", out=(blank if what == "--out" else tmp_path) / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "shell", "listed", "said"),
    [
        (1001, "/bin/bash", True, True),
        (1001, "/bin/bash", False, True),  # of a directory service, with a process here
        (1001, "/usr/sbin/nologin", True, False),
        (33, "/bin/bash", True, False),
        (65534, "/bin/bash", True, False),
        (1000, "/bin/bash", True, False),  # who runs it
    ],
)
def test_whom_the_simulator_is_open_to_is_said(
    number: int, shell: str, listed: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pwd.struct_passwd(("mallory", "x", number, number, "", "/", shell))
    process = SimpleNamespace(info={"uids": SimpleNamespace(real=number)})
    monkeypatch.setattr(simulator.os, "getuid", lambda: 1000)
    monkeypatch.setattr(simulator.pwd, "getpwall", lambda: [entry] if listed else [])
    monkeypatch.setattr(simulator.pwd, "getpwuid", lambda _: entry)
    monkeypatch.setattr(simulator.psutil, "process_iter", lambda _: [] if listed else [process])
    assert ("mallory" in open_to_others()) is said
