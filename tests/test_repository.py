"""The repository's own files agree: version, constraints, and what the workflows call."""

from __future__ import annotations

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
