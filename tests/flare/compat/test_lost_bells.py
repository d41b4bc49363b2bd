"""A run whose every bell is lost ends with the same model: sites then find their tasks by polling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suture.simulation.job import load_job, with_settings
from suture.simulation.run import run_job

pytestmark = pytest.mark.flare

# Python runs a module of this name at the start of every process, so also in the one that FLARE's server has.
DEAF = """
import suture.flare.compat.bell
suture.flare.compat.bell.ring = lambda sites, fl_ctx: print("lost bell", list(sites), flush=True)
"""


def test_bells_that_are_lost_cost_polls_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_settings(load_job("demo"), ["rounds=1", "images=60", "held_out=90", "epochs=1"])
    run_job(job, "local", tmp_path / "same")
    (tmp_path / "same").rename(tmp_path / "loop")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(DEAF)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "start"), os.getenv("PYTHONPATH", "")]))
    run_job(job, "sim", tmp_path / "same")
    model = Path("model") / "model.safetensors"
    assert (tmp_path / "same" / model).read_bytes() == (tmp_path / "loop" / model).read_bytes()
    assert "lost bell" in (tmp_path / "same" / "flare.log").read_text(), "no bell was lost"
