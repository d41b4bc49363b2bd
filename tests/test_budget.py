"""How large the package may be. A change that needs more room makes it elsewhere, or says why it cannot.

Lower a figure whenever a change has made room. A larger change (another sort of data, of method, of
protection) may raise the engine by 800 lines, and its commit and its entry in the changelog say what for.
`benchmarks/structure.py` tells what each figure counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

BUDGET = {
    "lines of code, engine": 35_180,
    "lines of code, papers": 7_710,
    "settings": 384,
    "words of docs": 38_920,
}


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    """What the budget limits, as it is."""
    command = [sys.executable, "benchmarks/structure.py", "--no-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(": ")
        found[name] = json.loads(value)
    houses = {f"lines of code, {house}": lines for house, lines in found["lines of code"].items()}
    return {**houses, "settings": found["settings"]["values"], "words of docs": found["words of docs"]}


@pytest.mark.parametrize("name", BUDGET)
def test_the_package_keeps_its_budget(figures: dict[str, int], name: str) -> None:
    assert figures[name] <= BUDGET[name], f"{name}: see the top of {Path(__file__).name}"


def test_the_figures_are_measured(figures: dict[str, int]) -> None:
    assert figures.keys() == BUDGET.keys()
    assert figures["lines of code, engine"] > 10_000
    assert figures["settings"] > 100
    assert figures["words of docs"] > 10_000
