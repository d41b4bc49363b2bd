"""What no source file may do: unpickle, open what may be a pipe, or advise a command that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from suture.cli.app import app, documented

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "custom"
SOURCES = [path for room in ("custom", "jobs", "benchmarks") for path in (ROOT / room).rglob("*.py")]
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES += [path for folder in ("docs", "examples") for path in sorted((ROOT / folder).rglob("*.md"))]

pytestmark = pytest.mark.complete


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of its function."""
    yield from ((ast.unparse(n.func), n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))


def unpickles(text: str) -> list[str]:
    """The calls that read a pickle by an argument of theirs; ruff finds the others, see pyproject.toml."""
    found = []
    for function, call in calls(text):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        trusting = function == "torch.load" and given.get("weights_only") != "True"
        if trusting or given.get("allow_pickle", "False") != "False" or function == "__import__":
            found.append(ast.unparse(call))
    return found


def test_nothing_is_unpickled_by_an_argument() -> None:
    """What crosses a boundary is safetensors and JSON."""
    assert len(SOURCES) > 100
    assert {str(path): found for path in SOURCES if (found := unpickles(path.read_text()))} == {}
    assert len(unpickles("np.load(p, allow_pickle=True); torch.load(p); __import__(n)")) == 3


BY_NAME = {"open", "gzip.open", "zipfile.ZipFile", "parquet.ParquetFile", "openpyxl.load_workbook"}
BY_NAME |= {"load_file", "safe_open", "np.load", "torch.load", "Image.open", "pydicom.dcmread"}
CHECKED = ("file", "opened", "source", "io.BytesIO", "BytesIO", "f'/dev/fd/", "listed", "workbook")
"""What `open_regular` has opened is called so."""

OWN = {
    "core/files.py": "opens for all others",
    "core/processes.py": "/sys",
    "core/vocabulary.py": "files of this package",
    "execution/simulator.py": "/proc",
    "partition.py": "a file of this package",
    "execution/catalogue.py": "files of this package",
    "data/embedding.py": "a file of this package",
    "plots.py": "a file of this package",
    "tables/render.py": "figures that this process has drawn",
    "model_export/bundle.py": "files of this package",
    "model_export/bundle_files/inference.py": "travels alone, and looks at regular files of its folder",
    "methods/source.py": "files of packages",
    "flare/compat/__init__.py": "sources of this package and of FLARE",
    "federation/server/record.py": "the run.json that it has written",
}
"""The sources that open other files, and which."""


def opened(text: str) -> Iterator[str]:
    """Every way in which a source opens a file for reading that could be a pipe or a device."""
    for function, call in calls(text):
        first = ast.unparse(call.args[0]) if call.args else ""
        method = function.rpartition(".")[2] if "." in function and function != "tarfile.open" else ""
        named = {one.arg for one in call.keywords} & {"mode", "newline", "encoding"}
        reads = method == "open" and (first[1:2] == "r" or bool(named))
        if method in ("read_text", "read_bytes") or reads:
            yield function
        elif function in BY_NAME and not first.startswith(CHECKED):
            yield f"{function}({first})"


def test_only_regular_files_are_opened() -> None:
    """A pipe that somebody has put in the place of a file would never end."""
    names = {path: path.relative_to(CODE).as_posix().partition("/")[2] for path in CODE.rglob("*.py")}
    others = [path for path, name in names.items() if name not in OWN]
    assert {names[path]: found for path in others if (found := [*opened(path.read_text())])} == {}
    assert len([*opened("p.read_text(); p.open('rb'); p.open(newline=''); open(p); np.load(p)")]) == 5
    assert not [*opened("open_regular(path); load_file(opened); np.load(io.BytesIO(data)); self.open(x)")]


_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(r"(`|^\s*|\n\s*)?\bsuture((?: [a-z][\w-]*)+)([^`\n;|]*)")
FOREIGN = {
    *("--only", "--cases", "--start"),  # programs of this repository
    *("--no-wait", "--force", "--client", "--once", "--property", "--value"),  # nvflare, systemd
    *("--profile", "--request-dir", "--fingerprint", "--valid-days"),  # nvflare cert and package
    *("--torch-backend", "--require-hashes", "--no-deps"),  # uv, pip
    *("--export", "--export-dir", "--kit", "--method"),  # a job.py
    *("--no-index", "--find-links", "--extra", "--config", "--output"),  # pip, pip-compile, nvflare deploy
    *("--now", "--unit", "--build-arg", "--rm", "--detach"),  # systemd, docker
}
"""Options of other programs, and of a job's own file."""


def commands() -> dict[str, set[str]]:
    """The options of each command, by its words."""
    found: dict[str, set[str]] = {}
    left = [("", typer.main.get_command(app)), *documented().items()]
    for name, command in left:
        found[name] = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
        left += [(f"{name} {word}".strip(), sub) for word, sub in getattr(command, "commands", {}).items()]
    return found


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
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else " X" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def wrong(text: str, known: dict[str, set[str]]) -> Iterator[str]:
    """What a text advises and the command line does not have."""
    yield from (o for o in _OPTION.findall(text) if o not in set().union(*known.values()) | FOREIGN)
    for code, words, rest in _COMMAND.findall(text):
        names = words.split()
        command = next((" ".join(names[:n]) for n in (2, 1) if " ".join(names[:n]) in known), None)
        if command:
            yield from (f"suture {command} {o}" for o in _OPTION.findall(rest) if o not in known[command])
        elif code == "`":
            yield f"suture{words}"  # elsewhere it is a sentence about suture
        if command and len(names) > 1 and any(other.startswith(f"{command} ") for other in known):
            yield f"suture{words}"  # a group without this command


def test_what_is_advised_exists() -> None:
    """And what these rooms say is read after `suture run`: an option of another command stands beside it."""
    known, paths = commands(), [*PAGES, *sorted((CODE / "suture").rglob("*.py"))]
    assert [(path.name, one) for path in paths for text in texts(path) for one in wrong(text, known)] == []
    for text in (
        "see `suture polcy KIT`",
        "suture resume X --resume",
        "leave out --replace",
        "`suture poc start`",
    ):
        assert [*wrong(text, known)], text
    for room in ("core", "protocol", "federation", "methods"):
        said = {text for path in (CODE / "suture" / room).rglob("*.py") for text in texts(path)}
        options = {option for text in said for option in _OPTION.findall(_COMMAND.sub("", text))}
        assert options <= known["run"], room
