"""What no source file may do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("custom", "jobs", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

CHECKPOINTS = {"custom/suture/models/backbones.py", "custom/suture/models/priors/published.py"}
"""Where a file that the user named is read: of torch, and of tensors and plain values alone."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a file, as ``module.function``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(tree: ast.AST) -> Iterator[str]:
    """The first part of every module that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def faults(name: str, text: str) -> list[str]:
    """Every way in which a file could run code that somebody else wrote into its data."""
    tree = ast.parse(text)
    found = [f"imports {module}" for module in imported(tree) if module in PICKLES]
    for function, call in calls(tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if function in ("torch.load", "torch.jit.load", "torch.save"):
            safe = function == "torch.load" and given.get("weights_only") == "True" and name in CHECKPOINTS
            found += [] if safe else [f"calls {function}"]
        if function.endswith("read_pickle") or given.get("allow_pickle", "False") != "False":
            found.append(f"calls {function}")
        if function in ("eval", "exec", "__import__"):
            found.append(f"calls {function}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_unpickled(path: Path) -> None:
    """What crosses a boundary is safetensors and JSON."""
    assert not faults(path.relative_to(ROOT).as_posix(), path.read_text())


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
