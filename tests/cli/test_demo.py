"""The demo ends with what comes next: the commands for own data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from suture.cli import run
from suture.cli.app import app, documented

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


@pytest.mark.parametrize("found", ["/usr/bin/suture", None])
def test_the_last_lines_are_commands_for_own_data_that_exist(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "execute", lambda job, *_, **__: run.print_line(f"report of {job.name}"))
    monkeypatch.setattr(run, "which", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["a b/bin/suture", "demo"])
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    first, *lines = result.output.splitlines()
    assert first == "report of demo"
    lines = [line for line in lines if line.startswith("  ")]
    called = "suture" if found else "a b/bin/suture"
    words = [shlex.split(line) for line in lines]
    assert [line[:2] for line in words] == [[called, name] for name in ("demo", "init", "check", "run")]
    commands = documented()
    for _, name, *arguments in words:
        commands[name].make_context(name, arguments)  # refuses an option that does not exist


@pytest.mark.parametrize(
    ("cores", "given", "workers"), [(2, [], 3), (1, [], None), (2, ["--env", "sim"], None)]
)
def test_each_site_has_a_process_where_there_are_cores(
    cores: int, given: list[str], workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(run, "execute", lambda *_, workers, **__: seen.append(workers))
    monkeypatch.setattr(run, "usable_cores", lambda: cores)
    assert CliRunner().invoke(app, ["demo", *given]).exit_code == 0
    assert seen == [workers]


def test_make_demo_ends_with_the_demo() -> None:
    recipe = MAKEFILE.read_text().split("\ndemo: $(VENV)/.demo\n")[1].split("\n\n")[0]
    assert recipe == "\t$(BIN)/suture demo"
