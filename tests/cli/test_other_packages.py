"""Commands of other packages, which are found by entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.complete


def test_a_command_of_another_package_is_added_and_replaces_none(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    names = ("count = other:count", "run = other:count", "plot = other:count", "broken = other:NUMBER")
    things = (
        "[suture.datasets]\nmeadow = farms:MEADOW\n[suture.priors]\ngrass = nowhere:GRASS\n"
        "[suture.simulations]\nFarm = farms:Farm\n"
    )
    (info / "entry_points.txt").write_text("[suture.commands]\n" + "\n".join(names) + "\n" + things)
    (tmp_path / "other.py").write_text(
        'print("imported")\nNUMBER = 3\ndef count():\n    """Count sheep."""\n    print("counted")\n'
    )
    (tmp_path / "farms.py").write_text(
        "from dataclasses import replace\nfrom suture.data.readers import DATASETS\n"
        "from suture_synthetic.phantom_hospitals import PhantomSites\n"
        'MEADOW = replace(DATASETS["hospital"], description="Pictures of cows.")\n'
        'class Farm(PhantomSites):\n    """Five farms."""\n'
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "300"}

    def suture(*words: str) -> str:
        command = [sys.executable, "-m", "suture", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
        return done.stdout + done.stderr

    assert suture("count") == "imported\ncounted\n"
    assert "Count sheep." in suture("--help")
    for own in ("run", "plot"):
        shown = suture(own, "--help")
        assert "imported" not in shown, "another package's command is imported when it is called"
        assert {"run": "--env", "plot": "labels"}[own] in shown
    listed = suture("list")
    for line in (
        "data set meadow Pictures of cows.",
        "prior grass not usable:",
        "simulation Farm Five farms.",
    ):
        assert line in " ".join(listed.split()), line
    broken = "error: the command 'broken' of other 1.0 (other:NUMBER) must be a function"
    assert suture("broken").startswith(f"imported\n{broken}")
