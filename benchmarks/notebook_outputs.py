"""Runs the notebook of the documentation, and stores what its cells show.

python benchmarks/notebook_outputs.py

Jupyter is not needed: cells are executed one after the other, as `python` would, and their outputs written in
the format of notebooks (nbformat 4). A test runs it again and compares words, because figures of training
differ in their last digits between processors.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "own_hospitals.ipynb"


def executed(notebook: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Run all cells in the working directory, and return the notebook with their outputs.

    Args:
        names: is given what the cells define.
    """
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            with pd.option_context("display.max_colwidth", None, "display.width", 100):  # paths are not cut
                outputs = _outputs("".join(cell["source"]), number, names)
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line."""
    tree, said, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, f"cell {number}", "exec"), names)  # noqa: S102 - the cells of our own page
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307 - likewise
    printed = said.getvalue().replace(f"{Path.cwd()}/", "")
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).replace(f"{Path.cwd()}/", "").splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        shown = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
        outputs.append(shown)
    return outputs


def main() -> None:
    """Run the notebook in an empty folder, and write it with its outputs."""
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(Path(folder).resolve()):
        done = executed(notebook, {})
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
