"""The layout that docs/architecture.md describes; import-linter holds the order of the rooms."""

from __future__ import annotations

import ast
from importlib import import_module
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
    "privacy",
    "execution",
    "flare",
    "cli",
]

FLARE = (
    *("nvflare.apis", "nvflare.job_config", "nvflare.recipe", "nvflare.fuel.flare_api", "nvflare.widgets"),
    "nvflare.app_opt.pt.recipes",
    *("nvflare.app_common.abstract", "nvflare.app_common.app_constant", "nvflare.app_common.app_event_type"),
    *("nvflare.client", "nvflare.app_common.aggregators", "nvflare.app_common.utils.fl_model_utils"),
)
"""What FLARE offers to applications, by its documentation."""
FLARE_BESIDES = {"nvflare", "nvflare.fuel.common.excepts"}
"""The package itself, with its simulator; and what `nvflare.fuel.flare_api` raises."""


def test_there_are_these_rooms_and_nothing_lies_beside_them() -> None:
    package = ROOT / "custom" / "suture"
    assert sorted(p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__") == sorted(
        ROOMS
    )
    files = {p.name for p in package.iterdir() if p.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed", "sdk.py", "testing.py"}


def test_a_module_has_one_name() -> None:
    """With a second folder on a package's path, a class of one file would be two."""
    packages = [path.parent for path in (ROOT / "custom" / "suture").rglob("__init__.py")]
    assert packages
    for package in packages:
        name = ".".join(package.relative_to(ROOT / "custom").parts)
        assert list(import_module(name).__path__) == [str(package)]


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in page] == []


@pytest.mark.complete
def test_only_flare_compat_uses_what_is_inside_of_flare() -> None:
    """import-linter sees other distributions as a whole."""
    custom, found = ROOT / "custom", set()
    for path in custom.glob("suture*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            inside = [n for n in names if f"{n}.".startswith("nvflare.") and n not in FLARE_BESIDES]
            found |= {path.parent for n in inside if not f"{n}.".startswith(tuple(f"{p}." for p in FLARE))}
    assert found == {custom / "suture" / "flare" / "compat"}
