"""The commit that benchmarks state."""

from __future__ import annotations

import subprocess
from pathlib import Path

import machine
import pytest

pytestmark = pytest.mark.complete


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_the_tree_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.commit() == "no commit"
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "one")
    name = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert machine.commit() == f"commit {name}"
    (tmp_path / "new.py").write_text("")
    assert machine.commit() == f"commit {name}, changed"
