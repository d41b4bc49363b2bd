"""Ctrl-C ends a run with code 130, says the command that continues it, and that command does."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from shadows import plant
from suture.cli.app import app
from suture.core.processes import wait_for_end
from suture.flare.kit import Kit
from suture_admin.job_commands import _follow

SMALL = ["--set", "images=40", "--set", "held_out=60"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [Path(sys.executable).with_name("suture"), "run", "demo", "--env", "local", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.complete
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_loop_says_the_command_that_continues_it(workers: int, tmp_path: Path) -> None:
    """No process of it imports a module of the working directory, which may be anybody's."""
    out, imported = tmp_path / "my runs" / "r", plant(tmp_path)
    process = start(tmp_path, "--rounds", "200", *SMALL, "--workers", str(workers), "--out", "my runs/r")
    events = out / "events.jsonl"
    while not (events.exists() and '"committed"' in events.read_text()):
        assert process.poll() is None, imported.exists() and imported.read_text()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    spawned = sum("spawn_main" in " ".join(child.cmdline()) for child in children)
    assert spawned == (0 if workers == 1 else 1 + workers)  # and the one that has forked them
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    said, _ = process.communicate()
    assert process.returncode == 130
    assert not imported.exists(), imported.read_text()
    wait_for_end(children, math.inf)  # Python's own tracker of processes ends after it
    assert "Traceback" not in said
    *_, before, command = said.splitlines()
    assert before == "interrupted; every committed round is saved. Continue with:"
    words = shlex.split(command)
    assert words[words.index("--workers") + 1] == str(workers)
    assert words[-3:] == ["--out", str(out), "--resume"]
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert list(out.rglob("*.tmp")) == []
    done = CliRunner().invoke(app, [*words[1:], "--set", f"rounds={rounds(out) + 1}"])
    assert done.exit_code == 0, done.output
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


def rounds(out: Path) -> int:
    return max(int(path.stem.rpartition("-")[2]) for path in (out / "state").glob("round-*.safetensors"))


def test_an_interruption_before_the_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("suture.execution.run._begin", stop)
    done = CliRunner().invoke(app, ["run", "demo", "--env", "local", "--out", str(tmp_path / "r")])
    assert done.exit_code == 130
    assert "no files are left" in done.output
    assert not (tmp_path / "r").exists()


def test_an_interruption_after_the_end_names_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        (tmp_path / "run.json").write_text('{"status": "finished"}')
        raise KeyboardInterrupt

    monkeypatch.setattr("suture.execution.run.run_job", stop)
    done = CliRunner().invoke(app, ["run", "demo", "--env", "local", "--out", str(tmp_path)])
    assert (done.exit_code, done.output.strip()) == (
        130,
        f"interrupted after the end of the run. Its table: suture report {tmp_path}",
    )


def test_every_option_of_the_run_is_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "run.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("suture.execution.run.run_job", stop)
    given = [
        "--env",
        "sim",
        "--device",
        "cpu",
        "--site-threads",
        "2",
        "--workers",
        "2",
        "--amp",
        "--seed",
        "3",
    ]
    given += ["--set", "title=two words", "--accept-labels", "all", "--overwrite"]
    done = CliRunner().invoke(app, ["run", "demo", *given, "--out", str(tmp_path / "r")])
    assert done.exit_code == 130
    assert done.output.splitlines()[-1] == (
        "suture run demo --env sim --set 'title=two words' --set seed=3 --set accept_labels=true "
        f"--device cpu --site-threads 2 --workers 2 --amp --out {tmp_path / 'r'} --resume"
    )


def test_a_job_that_is_no_longer_followed_goes_on_and_its_commands_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("suture_admin.remote.follow", stop)
    kit = Kit(Path("my kits/admin"), "admin", "admin@trial.org", "trial", "localhost", 8002)
    with pytest.raises(typer.Exit) as caught:
        _follow("demo", "poc", kit, tmp_path / "r", "j1", False)
    assert caught.value.exit_code == 130
    said = capsys.readouterr().out
    kit_option = "--startup-kit 'my kits/admin'"
    assert f"suture status j1 {kit_option}\n" in said
    assert f"suture results j1 --out {tmp_path / 'r'} {kit_option}\n" in said
    assert f"nvflare job abort j1 {kit_option}\n" in said
