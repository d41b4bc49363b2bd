"""A run whose every bell is lost ends with the same model: sites then find their tasks by polling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from suture.simulation.job import load_job, with_settings
from suture.simulation.run import run_job

pytestmark = pytest.mark.flare

START = subprocess.Popen
# The simulator forks its server, so that what is replaced here is replaced there.
DEAF = """
import sys
from pathlib import Path
from suture.flare import controller, simulate
controller.ring = lambda sites, fl_ctx: print("lost bell", list(sites), flush=True)
simulate.main(Path(sys.argv[1]), int(sys.argv[2]))
"""


def test_bells_that_are_lost_cost_polls_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_settings(load_job("demo"), ["rounds=1", "images=60", "held_out=90", "epochs=1"])

    def deaf(command: list[str], **how: Any) -> Any:
        if "suture.flare.simulate" in command:
            command = [sys.executable, "-c", DEAF, *command[3:]]
        return START(command, **how)

    monkeypatch.setattr(subprocess, "Popen", deaf)
    state = Path("state") / "round-000001.safetensors"
    for env, name in (("local", "loop"), ("sim", "sim")):
        run_job(job, env, tmp_path / "same", resume=False, overwrite=False, workers=None)
        (tmp_path / "same").rename(tmp_path / name)
    assert (tmp_path / "sim" / state).read_bytes() == (tmp_path / "loop" / state).read_bytes()
    assert "lost bell" in (tmp_path / "sim" / "flare.log").read_text(), "no bell was lost"
