"""The repository's own files agree: version, constraints, rooms, and what the workflows call."""

from __future__ import annotations

import ast
import re
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import suture

ROOT = Path(__file__).resolve().parents[1]
CALLERS = (".ci/run", ".ci/nightly", "README.md", "CONTRIBUTING.md", ".github/workflows/*.yml")


def test_the_citation_and_the_newest_entry_of_the_changelog_name_the_version() -> None:
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## ([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited == newest == suture.__version__


def installed_with(name: str, extras: set[str], found: set[str]) -> set[str]:
    """All distributions that one asks for, and these in turn, as far as they are installed here."""
    for line in distribution(name).requires or ():
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        key = canonicalize_name(wanted.name)
        try:
            distribution(key)
        except PackageNotFoundError:
            continue
        if (key, *wanted.extras) not in found:
            found.add((key, *wanted.extras))
            installed_with(key, wanted.extras, found)
    return found


def test_constraints_pin_all_that_is_installed() -> None:
    lines = re.findall(r"^([\w.-]+)==(.+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name) for name, _ in lines}
    if ("pytest", version("pytest")) not in lines:
        pytest.skip("installed without the constraints, as by `make lowest`")
    extras = set(distribution("suture").metadata.get_all("Provides-Extra", ()))
    found = {name for name, *_ in installed_with("suture", extras, set())} - {"suture"}
    assert len(found) > 50
    assert not found - pinned, "add these to constraints.txt, with their versions"


def test_all_targets_of_make_that_scripts_pages_and_workflows_call_exist() -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called: dict[str, set[str]] = {}
    for path in (path for pattern in CALLERS for path in ROOT.glob(pattern)):
        commands = re.findall(
            r"(?:^ *|part |=complete |run: |`)make ([a-z][^`#\n]*)", path.read_text(), re.MULTILINE
        )
        commands += re.findall(r"targets: ([^}]*)", path.read_text())
        words = {word for command in commands for word in command.split()}
        called[path.name] = {word for word in words if re.fullmatch("[a-z][a-z-]*", word)}
    assert all(called.values())
    assert not {name: words - known for name, words in called.items() if words - known}


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "custom" / "suture").glob("*/__init__.py")]
    assert len(rooms) > 10
    assert [room for room in rooms if f"`{room}`" not in page] == []


FLARE = (
    *("nvflare.apis", "nvflare.job_config", "nvflare.recipe", "nvflare.fuel.flare_api", "nvflare.widgets"),
    *("nvflare.client", "nvflare.app_opt.pt.recipes", "nvflare.app_common.aggregators"),
    *("nvflare.app_common.abstract", "nvflare.app_common.app_constant", "nvflare.app_common.app_event_type"),
    *("nvflare.app_common.utils.fl_model_utils", "nvflare.fuel.common.excepts"),
)
"""What FLARE offers to applications, by its documentation; and what `nvflare.fuel.flare_api` raises."""


@pytest.mark.complete
def test_only_flare_compat_uses_what_is_inside_of_flare() -> None:
    """import-linter sees other distributions as a whole."""
    custom, found = ROOT / "custom", set()
    for path in custom.glob("suture*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            inside = [f"{name}." for name in names if name.startswith("nvflare.")]
            found |= {path.parent for name in inside if not name.startswith(tuple(f"{p}." for p in FLARE))}
    assert found == {custom / "suture" / "flare" / "compat"}
