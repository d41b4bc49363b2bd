"""Commands and options that messages and pages advise: each exists, and the option at that command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import suture
from suture.cli.app import app, documented

CODE, ROOT = Path(suture.__file__).parent, Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))

_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(r"(`|^\s*|\n\s*)?\bsuture((?: [a-z][\w-]*)+)([^`\n;|]*)")
FOREIGN = {
    *("--only", "--against", "--cases", "--start", "--prior", "--gamma"),  # programs of this repository
    *("--no-wait", "--force", "--client", "--once", "--property", "--value"),  # nvflare, systemd
    *("--profile", "--request-dir", "--fingerprint", "--valid-days"),  # nvflare cert and package
    "--torch-backend",  # uv
    *("--require-hashes", "--no-deps"),  # pip
    *("--export", "--export-dir", "--kit", "--method"),  # a job.py
}
"""Options of other programs, and of a job's own file."""


def commands() -> dict[str, set[str]]:
    """The options of each command, by its words."""
    found: dict[str, set[str]] = {}
    left = [("", typer.main.get_command(app)), *documented().items()]
    for name, command in left:
        options = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
        found[name] = options | {"--help"}
        left += [(f"{name} {word}".strip(), sub) for word, sub in getattr(command, "commands", {}).items()]
    return found


COMMANDS = commands()


def texts(path: Path) -> Iterator[str]:
    """What a reader sees of a file: a page's lines, or the texts of a module, with X for what it puts in."""
    if path.suffix != ".py":
        # Programs of this repository have options of their own.
        yield re.sub(r"\\\n\s*|`python benchmarks/[^`]*`", " ", path.read_text())
        return
    inner = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node)}
            parts = [p.value if isinstance(p, ast.Constant) else " X" for p in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def wrong(text: str) -> Iterator[str]:
    """What a text advises and the command line does not have."""
    anywhere = set().union(*COMMANDS.values())
    yield from (o for o in _OPTION.findall(text) if o not in anywhere | FOREIGN)
    for code, words, rest in _COMMAND.findall(text):
        names = words.split()
        command = next((" ".join(names[:n]) for n in (2, 1) if " ".join(names[:n]) in COMMANDS), None)
        if command:
            yield from (f"suture {command} {o}" for o in _OPTION.findall(rest) if o not in COMMANDS[command])
        elif code == "`":
            yield f"suture{words}"  # elsewhere it is a sentence about suture
        if command and len(names) > 1 and any(other.startswith(f"{command} ") for other in COMMANDS):
            yield f"suture{words}"  # a group without this command


@pytest.mark.parametrize("room", ["core", "protocol", "federation", "methods"])
def test_an_option_without_its_command_is_one_of_run(room: str) -> None:
    """What these rooms say is read after `suture run`; an option of another command stands beside it."""
    found = {
        (path.name, option)
        for path in (CODE / room).rglob("*.py")
        for text in texts(path)
        for option in _OPTION.findall(_COMMAND.sub("", text))
    }
    assert not {(name, option) for name, option in found if option not in COMMANDS["run"]}


@pytest.mark.complete
def test_what_is_advised_exists() -> None:
    paths = [*PAGES, *sorted(CODE.rglob("*.py"))]
    assert len(paths) > 100
    assert not [(path.name, found) for path in paths for text in texts(path) for found in wrong(text)]


@pytest.mark.parametrize(
    "text",
    ["see `suture polcy KIT`", "suture resume X --resume", "leave out --replace", "`suture poc start`"],
)
def test_the_scan_finds(text: str) -> None:
    assert list(wrong(text))
