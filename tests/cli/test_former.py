"""A command or option of an earlier version is refused with the one that replaces it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from suture.cli.app import PANELS, app, documented
from suture.cli.common import guarded
from suture.cli.former import COMMANDS, OPTIONS

FORMER_OPTIONS = [
    (command, option, remedy) for command, table in OPTIONS.items() for option, remedy in table.items()
]
COMMAND = documented()


def options(words: str) -> set[str]:
    """The options of a command that exists."""
    first, *others = words.split()
    command = COMMAND[first]
    for word in others:
        command = command.commands[word]
    return {flag for one in command.params for flag in one.opts}


def refused(*words: str) -> str:
    """What a refusal says; its exit code is that of a wrong setting."""
    said = CliRunner().invoke(app, list(words)).exception
    with pytest.raises(SystemExit) as end:
        guarded(lambda: app(list(words)))
    assert end.value.code == 2
    return str(said)


@pytest.mark.parametrize(("former", "present"), COMMANDS.items())
def test_a_former_command_names_the_present_one(former: str, present: str) -> None:
    assert f"suture {present}" in refused(*former.split(), "x", "-o", "y")
    assert f"suture {present}" in refused(*former.split(), "--help")
    assert options(present)
    with pytest.raises(KeyError):
        options(former)


@pytest.mark.parametrize(("command", "option", "remedy"), FORMER_OPTIONS)
@pytest.mark.parametrize("value", ["", "=1"])
def test_a_former_option_names_its_remedy(command: str, option: str, remedy: str, value: str) -> None:
    said = refused(command, "x", option + value, "1")
    assert option in said
    assert remedy in said
    assert option not in options(command)
    if "--set" in remedy:
        assert "--set" in options(command)
    if named := re.search(r"suture run \w+ (--\w+)", remedy):
        assert named[1] in options("run")


def test_the_words_of_an_option_are_searched_at_its_own_command_only() -> None:
    done = CliRunner().invoke(app, ["run", "no-such-job", "--seed", "1"])
    assert "no-such-job" in str(done.exception)
    assert CliRunner().invoke(app, ["evaluate", "latent", "x"]).exit_code != 0


def test_every_command_is_in_a_panel_of_the_help() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(panel in shown for panel in PANELS)
    panels = {command.rich_help_panel for command in COMMAND.values()}
    assert panels == set(PANELS)
