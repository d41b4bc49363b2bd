"""Every setting of a run, as it was done and as its job is now."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from small_hospitals import small_study
from suture.core.files import write_json
from suture.execution.job import load_job, with_settings
from suture_papers.tables.results import find_change, settings_done, settings_now


def test_a_run_that_is_done_has_the_settings_of_its_job(tmp_path: Path) -> None:
    options = ["method=vanilla", "rounds=3"]
    job = with_settings(load_job("surgical_nih"), [*options, "simulation.root=/mnt/data/nih"])
    assert job.simulation is not None
    content = {"plan": job.plan("x").to_dict(), "schedule": job.schedule().to_dict()}
    write_json(tmp_path / "job.json", {**content, "simulation": asdict(job.simulation)})
    planned = settings_now("surgical_nih", [*options, "simulation.root={data}/nih"])
    done = settings_done(tmp_path, planned, Path("/mnt/data"))
    assert done == planned
    assert done["simulation.root"] == "{data}/nih"
    assert (done["method"], done["rounds"]) == ("vanilla", 3)
    assert "model.vocabulary" not in done
    assert (
        find_change(done, settings_now("surgical_nih", [*options, "method.local.lr=0.5"]))
        == "method.local.lr"
    )
    assert json.loads(json.dumps(done)) == done


def test_a_study_below_the_data_root_is_no_path_of_the_table(tmp_path: Path) -> None:
    small_study(tmp_path / "study")
    options = ["rounds=1", f"model.weights={tmp_path}/w.safetensors"]
    job = with_settings(load_job(tmp_path / "study"), options)
    content = {"plan": job.plan("x").to_dict(), "schedule": job.schedule().to_dict()}
    write_json(tmp_path / "job.json", {**content, "simulation": asdict(job.simulation)})  # type: ignore[arg-type]
    now = settings_now(str(tmp_path / "study"), options)
    done = settings_done(tmp_path, now, tmp_path)
    assert find_change(done, now) is None
    assert not any("{data}" in str(value) for value in done.values())
    assert "simulation.folder" not in done, "its path tells of a machine"
    planned = settings_now(str(tmp_path / "study"), ["rounds=1", "model.weights={data}/w.safetensors"])
    assert settings_done(tmp_path, planned, tmp_path)["model.weights"] == "{data}/w.safetensors"


def test_what_was_there_counts_and_what_is_new_does_not() -> None:
    assert find_change({"a": 1}, {"a": 1, "new": 2}) is None
    assert find_change({"a": 1, "b": {}}, {"a": 1, "b.nih": 2}) == "b"
    assert find_change({"a": None}, {"a.x": 1}) == "a"
