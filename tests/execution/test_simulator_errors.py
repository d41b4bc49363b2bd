"""A run in the simulator that fails says its first real error, from whichever log has it."""

from __future__ import annotations

import json
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from small_job import SMALL
from suture.cli.app import app
from suture.core.errors import ConfigError, FederationError
from suture.execution import simulator
from suture.execution.run import run_job
from suture.execution.simulator import first_logged, with_first_error
from suture.federation.server.record import Record

TIME = "2026-11-22 23:42:40,044 - "
START = subprocess.Popen
CAUGHT = f"""{TIME}Core - INFO - ERROR is only a word here
{TIME}Job - \x1b[31mERROR\x1b[0m - cannot start harbor
Traceback (most recent call last):
  File "x.py", line 1, in <module>
suture.core.errors.ConfigError: harbor: no suture.toml; write one
{TIME}Job - ERROR - a consequence
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CAUGHT, "cannot start harbor: harbor: no suture.toml; write one"),
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
        if "suture.flare.simulate" not in command:
            return START(command, **how)
        return START([sys.executable, "-c", script, *command[3:]], **how)

    monkeypatch.setattr(simulator.subprocess, "Popen", other)


@pytest.mark.complete
def test_a_simulator_that_fails_says_why_in_one_line_and_nothing_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    ending(monkeypatch, f"print({CAUGHT!r}); raise SystemExit(1)")
    with pytest.raises(FederationError) as caught:
        run_job(SMALL, "sim", out)
    assert str(caught.value).startswith(
        "FLARE's simulator: cannot start harbor: harbor: no suture.toml; write one; "
    )
    assert "\n" not in str(caught.value)
    assert json.loads((out / "run.json").read_text())["error"] == str(caught.value)
    ending(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(FederationError, match=r"it was killed.* memory was full; try fewer --workers"):
        run_job(SMALL, "sim", out, resume=True)


@pytest.mark.complete
def test_the_command_ends_with_code_1_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending(monkeypatch, "raise SystemExit(7)")
    done = CliRunner().invoke(app, ["run", "demo", "--env", "sim", "--out", str(tmp_path / "r")])
    assert isinstance(done.exception, FederationError)
    assert "it ended with code 7" in str(done.exception)


def test_an_error_of_a_site_comes_first_unless_it_is_of_an_earlier_run(tmp_path: Path) -> None:
    Record(tmp_path).update(started="2026-11-22T10:00:00+00:00")
    state = tmp_path / "sites" / "harbor" / "state" / "experiments" / "r"
    before_it_opened = tmp_path / "flare" / "demo" / "lakeside" / "suture"
    for folder, time, text in (
        (state, "2026-11-21T10:00:00+00:00", "of yesterday"),
        (state, "2026-11-22T10:02:00+00:00", "harbor: labels.csv, row 3: write 0 or 1"),
        (before_it_opened, "2026-11-22T10:01:00+00:00", "the method 'x' is not installed; install it"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.jsonl").open("a") as file:
            file.write(
                json.dumps(
                    {
                        "time": time,
                        "site": folder.parts[-4] if folder is state else "lakeside",
                        "message": text,
                    }
                )
                + "\n"
            )
    assert with_first_error(tmp_path, "too few updates") == (
        "lakeside: the method 'x' is not installed; install it (too few updates)"
    )
    (before_it_opened / "errors.jsonl").unlink()
    assert with_first_error(tmp_path, "too few") == "harbor: labels.csv, row 3: write 0 or 1 (too few)"


@pytest.mark.complete
def test_processes_are_at_most_one_for_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def simulated(out: Path, processes: int, simulator: object) -> None:
        seen.append(processes)
        raise FederationError("enough")

    monkeypatch.setattr("suture.execution.run.simulate", simulated)
    for number, workers in enumerate((None, 2, 99)):
        with pytest.raises(FederationError, match="enough"):
            run_job(SMALL, "sim", tmp_path / str(number), workers=workers)
    assert seen == [3, 2, 3]


def test_workers_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workers 0: .*1"):
        run_job(SMALL, "local", tmp_path / "r", workers=0)
    done = CliRunner().invoke(app, ["run", "demo", "--env", "poc", "--workers", "2"])
    assert isinstance(done.exception, ConfigError)
    assert "--workers is for simulated sites" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [["--env", "local"], ["--env", "sim"], ["--compare", "vanilla"]])
@pytest.mark.parametrize(
    "option",
    [["--sites", "alpha"], ["--startup-kit", "kit"], ["--study", "lungs"], ["--bundle"], ["--detach"]],
)
def test_options_of_a_submission_are_not_ignored(where: list[str], option: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "demo", "--out", str(tmp_path / "r"), *where, *option])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{option[0]}: for a job submitted")
    assert not list(tmp_path.iterdir())


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
    out = (blank if what == "--out" else tmp_path) / "run"
    with pytest.raises(ConfigError, match=rf"my data.* \({what}\).* space.* --env local"):
        run_job(SMALL, env="sim", out=out)
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
@pytest.mark.parametrize("env", ["sim", "local"])
def test_whom_the_simulator_is_open_to_is_said_once(
    env: str, number: int, shell: str, listed: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pwd.struct_passwd(("mallory", "x", number, number, "", "/", shell))
    process = SimpleNamespace(info={"uids": SimpleNamespace(real=number)})
    monkeypatch.setattr(simulator.os, "getuid", lambda: 1000)
    monkeypatch.setattr(simulator.pwd, "getpwall", lambda: [entry] if listed else [])
    monkeypatch.setattr(simulator.pwd, "getpwuid", lambda _: entry)
    monkeypatch.setattr(simulator.psutil, "process_iter", lambda _: [] if listed else [process])
    monkeypatch.setattr("suture.execution.run.run_job", lambda *_, **__: None)
    monkeypatch.setattr("suture.cli.run.if_installed", lambda _: lambda *_: None)
    output = CliRunner().invoke(app, ["run", "demo", "--env", env]).output
    assert output.count("mallory") == (said and env == "sim")
