"""What no source file may do; most of what would unpickle is found by ruff, see pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("custom", "jobs", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of its function."""
    yield from ((ast.unparse(n.func), n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))


def unpickles(text: str) -> list[str]:
    """The calls that read a pickle by an argument of theirs, which ruff does not see."""
    found = []
    for function, call in calls(text):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        trusting = function == "torch.load" and given.get("weights_only") != "True"
        if trusting or given.get("allow_pickle", "False") != "False" or function == "__import__":
            found.append(ast.unparse(call))
    return found


@pytest.mark.complete
def test_nothing_is_unpickled_by_an_argument() -> None:
    """What crosses a boundary is safetensors and JSON."""
    assert len(FILES) > 100
    assert {str(path): found for path in FILES if (found := unpickles(path.read_text()))} == {}
    for fault in ("np.load(path, allow_pickle=True)", "torch.load(path)", "__import__(name)"):
        assert unpickles(fault), fault
    assert not unpickles("torch.load(path, weights_only=True); np.load(path, allow_pickle=False)")


@pytest.mark.complete
def test_ruff_finds_what_unpickles() -> None:
    faults = {
        "import pickle": "TID251",
        "from joblib import load": "TID251",
        "import torch; torch.load(path, weights_only=True)": "TID251",
        "import torch; torch.save(x, path)": "TID251",
        "import pandas as pd; pd.read_pickle(path)": "TID251",
        "eval(text)": "S307",
        "exec(text)": "S102",
    }
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename",
        "custom/suture/federation/site/site.py",
    ]
    for text, rule in faults.items():
        done = subprocess.run(
            [*command, "-"], input=text, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert rule in done.stdout, text


OPENERS = {"open", "gzip.open", "zipfile.ZipFile", "parquet.ParquetFile", "openpyxl.load_workbook"}
BY_NAME = {"load_file", "safe_open", "np.load", "torch.load", "Image.open", "pydicom.dcmread"}
"""They open by name. What `open_regular` has opened is called ``file``, ``opened`` or ``source``."""

MODES = {"mode", "newline", "encoding"}

CHECKED = ("file", "opened", "source", "io.BytesIO", "BytesIO", "f'/dev/fd/", "listed", "workbook")

OWN = {
    "core/files.py": "opens for all others",
    "core/processes.py": "/sys",
    "core/vocabulary.py": "files of this package",
    "execution/simulator.py": "/proc",
    "execution/partition.py": "a file of this package",
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


def opened(text: str) -> list[str]:
    """Every way in which a source opens a file for reading that could be a pipe or a device."""
    found = []
    for function, call in calls(text):
        given = [ast.unparse(one) for one in call.args]
        name = function.rpartition(".")[2]
        first = given[0] if given else ""
        if name in ("read_text", "read_bytes") and "." in function:
            found.append(f"calls {function}")
        if (
            name == "open"
            and "." in function
            and function != "tarfile.open"
            and (first[1:2] == "r" or {one.arg for one in call.keywords} & MODES)
        ):
            found.append(f"calls {function}")
        if (function in OPENERS or function in BY_NAME) and not first.startswith(CHECKED):
            found.append(f"calls {function}({first})")
    return found


@pytest.mark.complete
def test_only_regular_files_are_opened() -> None:
    """A pipe that somebody has put in the place of a file would never end."""
    package = ROOT / "custom"
    sources = {p.relative_to(package).as_posix(): p for p in FILES if p.is_relative_to(package)}
    others = {name: path for name, path in sources.items() if name.partition("/")[2] not in OWN}
    assert {name: found for name, path in others.items() if (found := opened(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "path.read_text()",
        "(a / b).read_bytes()",
        "path.open('rb')",
        "path.open(newline='')",
        "open(path)",
        "gzip.open(path)",
        "load_file(path)",
        "np.load(path, mmap_mode='c')",
        "Image.open(path)",
    ],
)
def test_the_scan_finds_what_opens(text: str) -> None:
    assert opened(text)
    assert not opened("open_regular(path); load_file(opened); np.load(io.BytesIO(data)); self.open(x)")
