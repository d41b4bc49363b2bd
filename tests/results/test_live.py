"""`suture watch`, and the option of `suture run` that does the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from example_run import history_records, metrics_record, run_record, write_run
from suture.cli.app import app
from suture_results import watch
from suture_results.live_commands import accompany


@pytest.mark.complete
def test_ctrl_c_ends_watching_cleanly(tmp_path: Path) -> None:
    write_run(tmp_path, run_record(), history_records(), metrics_record())
    command = [sys.executable, "-m", "suture", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        url = process.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        assert process.stdout.readline() == "the run has ended: finished\n"
        assert b"st-anne" in urlopen(url, timeout=20).read()
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "no longer served" in said


def test_a_run_is_served_while_it_works_and_no_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = []

    @contextmanager
    def served(folder: Path) -> Iterator[watch.LivePage]:
        with real(folder, 0) as page:
            pages.append(page)
            yield page

    real = watch.serve
    monkeypatch.setattr(watch, "serve", served)
    with accompany(tmp_path / "run"):
        assert b"has no run.json yet" in urlopen(pages[0].url, timeout=20).read()
    with pytest.raises(OSError, match="refused"):
        urlopen(pages[0].url, timeout=20)
    assert not (tmp_path / "run").exists()  # a folder that is not empty would stop the run


def test_a_page_that_cannot_be_served_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(97, "Address family not supported")

    monkeypatch.setattr(watch, "LivePage", refuse)
    done = False
    with accompany(tmp_path):
        done = True
    assert done


def test_a_command_that_does_not_wait_cannot_follow() -> None:
    result = CliRunner().invoke(app, ["run", "demo", "--env", "poc", "--detach", "--watch"])
    assert result.exit_code == 2
    assert "leave out --detach" in " ".join(result.output.replace("│", " ").split())
