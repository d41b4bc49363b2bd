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

CHECKPOINTS = {"custom/suture/models/backbones.py", "custom/suture/models/priors/published.py"}
"""Where a file that the user named is read: of torch, and of tensors and plain values alone."""


def imported(node: ast.AST) -> Iterator[str]:
    """The first part of every module that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]


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
    return unpickles or function in ("eval", "exec", "__import__")


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
    assert not faults("custom/suture/models/backbones.py", "torch.load(p, weights_only=True)")
