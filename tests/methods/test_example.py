"""examples/suture-fedprox-l1: a method in a package of its own, as short as the documentation says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import suture
import suture.testing
from suture.methods import _load
from suture.methods.source import _hash

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "suture-fedprox-l1"
SMALL = ("--set", "simulation.images=60", "--set", "simulation.held_out=60", "--set", "method.local.epochs=1")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds the example as pip installs it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    entry = "\n".join(f"{k} = {v}" for k, v in project["entry-points"]["suture.methods"].items())
    info = tmp_path / "site" / f"suture_fedprox_l1-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(f"[suture.methods]\n{entry}\n")
    (info.parent / "suture_fedprox_l1.py").write_text((EXAMPLE / "suture_fedprox_l1.py").read_text())
    monkeypatch.syspath_prepend(str(info.parent))
    for cached in (_load, _hash):
        cached.cache_clear()
    importlib.invalidate_caches()
    yield info.parent
    sys.modules.pop("suture_fedprox_l1", None)
    for cached in (_load, _hash):
        cached.cache_clear()


def test_it_has_at_most_25_lines_and_keeps_the_contract(installed: Path) -> None:
    assert len((EXAMPLE / "suture_fedprox_l1.py").read_text().splitlines()) <= 25
    kind = suture.known_methods()["fedprox_l1"]
    suture.testing.check_method(kind())


def test_it_runs_from_the_command_line(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "suture", "run", "demo", "--env", "local", "--rounds", "1"]
    command += ["--out", str(tmp_path / "r"), "--set", "method=fedprox_l1", "--set", "method.mu=10", *SMALL]
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    method = json.loads((tmp_path / "r" / "run.json").read_text())["method"]
    assert (method["name"], method["hyperparameters"]["mu"]) == ("fedprox_l1", 10)
    listed = [sys.executable, "-m", "suture", "list"]
    assert "fedprox_l1" in subprocess.run(listed, capture_output=True, text=True, env=env, check=True).stdout
