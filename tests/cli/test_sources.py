"""What no source file may do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("custom", "jobs", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

SUSPECTS = {"load", "save", "read_pickle", "eval", "exec", "__import__"}
"""The last parts of the names of functions that read or write pickles, or run text."""

CHECKPOINTS = {"custom/suture/models/checkpoints.py"}
"""Where a file that the user named is read: of torch, and of tensors and plain values alone."""


def imported(node: ast.AST) -> Iterator[str]:
    """The first part of every module that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]


RUNS = {("custom/suture/simulation/job.py", "exec")}
"""Where the code is run that a user names or trusts."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of its function."""
    yield from ((ast.unparse(n.func), n) for n in ast.walk(tree) if isinstance(n, ast.Call))


def unsafe(name: str, call: ast.Call) -> bool:
    """Whether a call could run code that somebody else wrote into its data."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get("allow_pickle", "False") != "False":
        return True
    if getattr(call.func, "attr", getattr(call.func, "id", "")) not in SUSPECTS:
        return False
    function = ast.unparse(call.func)
    if function == "torch.load":
        return given.get("weights_only") != "True" or name not in CHECKPOINTS
    unpickles = function in ("torch.jit.load", "torch.save") or function.endswith("read_pickle")
    return unpickles or (function in ("eval", "exec", "__import__") and (name, function) not in RUNS)


def faults(name: str, text: str) -> list[str]:
    """Every way in which a file could run code that somebody else wrote into its data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        found += [f"{name} imports {module}" for module in imported(node) if module in PICKLES]
        if isinstance(node, ast.Call) and unsafe(name, node):
            found.append(f"{name} calls {ast.unparse(node.func)}")
    return found


def test_nothing_is_unpickled() -> None:
    """What crosses a boundary is safetensors and JSON."""
    assert len(FILES) > 100
    assert not [fault for p in FILES for fault in faults(p.relative_to(ROOT).as_posix(), p.read_text())]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "torch.save(x, path)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "eval(text)",
    ],
)
def test_the_scan_finds(text: str) -> None:
    assert faults("custom/suture/federation/site/site.py", text)
    assert not faults("custom/suture/models/checkpoints.py", "torch.load(p, weights_only=True)")


OPENERS = {"open", "gzip.open", "zipfile.ZipFile", "parquet.ParquetFile", "openpyxl.load_workbook"}
BY_NAME = {"load_file", "safe_open", "np.load", "torch.load", "Image.open", "pydicom.dcmread"}
"""They open by name. What `open_regular` has opened is called ``file``, ``opened`` or ``source``."""

MODES = {"mode", "newline", "encoding"}

CHECKED = ("file", "opened", "source", "io.BytesIO", "BytesIO", "f'/dev/fd/", "listed", "workbook")

OWN = {
    "core/plain.py": "opens for all others",
    "core/cores.py": "/sys",
    "core/codes.py": "a file of this package",
    "simulation/activity.py": "/proc",
    "simulation/partition.py": "a file of this package",
    "cli/catalogue.py": "files of this package",
    "data/embedding.py": "a file of this package",
    "tables/render.py": "figures that this process has drawn",
    "export/bundle.py": "files of this package",
    "export/bundle_files/inference.py": "travels alone, and looks at regular files of its folder",
    "methods/source.py": "files of packages",
}
"""The sources that open other files, and which."""


def opened(text: str) -> list[str]:
    """Every way in which a source opens a file for reading that could be a pipe or a device."""
    found = []
    for function, call in calls(ast.parse(text)):
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_regular_files_are_opened(path: Path) -> None:
    """A pipe that somebody has put in the place of a file would never end."""
    packages = ROOT / "custom"
    within = path.relative_to(packages).parts[1:] if path.is_relative_to(packages) else ()
    if within and "/".join(within) not in OWN:
        assert not opened(path.read_text())


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
