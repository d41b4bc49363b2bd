"""The layout that docs/architecture.md describes; import-linter (make lint) holds the order of the rooms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [
    "core",
    "protocol",
    "data",
    "models",
    "learning",
    "methods",
    "federation",
    "reports",
    "export",
    "simulation",
    "flare",
    "experiments",
    "cli",
]


@pytest.fixture(scope="module")
def figures() -> dict[str, object]:
    """What benchmarks/structure.py measures."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import structure
    finally:
        sys.path.pop(0)
    found: dict[str, object] = structure.measure(ROOT)
    return found


def test_there_are_these_rooms_and_nothing_lies_beside_them() -> None:
    package = ROOT / "custom" / "suture"
    assert sorted(p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__") == sorted(
        ROOMS
    )
    files = {p.name for p in package.iterdir() if p.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed", "testing.py"}


def test_rooms_form_no_cycle(figures: dict[str, object]) -> None:
    assert figures["rooms"] == len(ROOMS)
    assert figures["root modules"] == ["testing"]
    assert figures["package cycles"] == []


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in page] == []
