"""What the command line says of itself: versions, completion, and help texts with all of their characters."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from suture.cli.app import PANELS, app, documented
from suture.cli.common import known_names, literal
from suture.core import VERSION

Command = tuple[list[str], Any]


def every_command(command: Any, words: list[str]) -> Iterator[Command]:
    """Every command with its words, groups included."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from every_command(inner, [*words, name])


COMMANDS = [
    ([], typer.main.get_command(app)),
    *(found for name, command in documented().items() for found in every_command(command, [name])),
]


def brackets(command: Any) -> set[str]:
    """What stands in square brackets in the texts of a command."""
    texts = [getattr(part, "help", None) or "" for part in (command, *command.params)]
    return {found for text in texts for found in re.findall(r"\[[^\]]*\]", text)}


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_no_bracket_of_a_help_text_is_lost(
    words: list[str], command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    literal(app).main([*words, "--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in brackets(command):
        assert text in shown
    assert "\\[" not in shown


def test_some_help_texts_have_brackets() -> None:
    found = {" ".join(words): brackets(command) for words, command in COMMANDS}
    assert "[training]" in found["finetune"]
    assert sum(map(bool, found.values())) >= 2


def suture(*words: str, **variables: str) -> str:
    command, env = [sys.executable, "-m", "suture", *words], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


@pytest.mark.complete
def test_the_versions_are_one_line() -> None:
    line = suture("--version")
    assert re.fullmatch(
        rf"suture {VERSION}, nvflare [\d.]+\S*, torch \S+, Python {platform.python_version()}\n", line
    )


@pytest.mark.complete
def test_a_shell_completes_the_names_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = suture(_SUTURE_COMPLETE="complete_bash", COMP_WORDS="suture run fedlsm_", COMP_CWORD="2").split()
    assert "fedlsm_nih" in found
    assert all(name.startswith("fedlsm_") for name in found)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert known_names("mi") == ["mine"]
    assert "--install-completion" in suture("--help")


def test_every_command_is_in_a_panel_of_the_help() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(panel in shown for panel in PANELS)
    assert {command.rich_help_panel for command in documented().values()} == set(PANELS)
