"""An exported job runs in FLARE's own simulator, with what `suture export --simulator` writes beside it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from small_job import SMALL
from suture.cli import app
from suture.core.errors import ConfigError
from suture.data.config import find_site_config, load_server_config, load_site_config
from suture.flare.simulate import simulator_workspace
from suture.models import ModelSpec
from suture.simulation.run import run_job


def test_each_party_finds_its_own_configuration_in_the_one_local_folder(tmp_path: Path) -> None:
    job, sites = simulator_workspace(SMALL, tmp_path / "w")
    assert job == SMALL
    local = tmp_path / "w" / "small" / "local"
    assert sites
    for name in sites:
        path = find_site_config(name, local.parent)
        assert path == local / "sites" / name / "suture.toml"
        config = load_site_config(path)
        # FLARE copies `local` for each party, and deletes the copies: the state goes with them, data stay.
        assert config.storage.state == path.parent / "state"
        assert config.data.table.is_relative_to(tmp_path / "w" / "sites" / name)
        assert config.storage.cache.is_relative_to(tmp_path / "w" / "sites" / name)
    assert load_server_config(find_site_config("server", local.parent)).held_out
    listed = json.loads((local / "resources.json.default").read_text())["class_allow_list"]
    assert "suture.flare." in listed


def test_a_file_that_the_job_names_is_given_to_all(tmp_path: Path) -> None:
    weights = tmp_path / "weights" / "own.pt"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    job = replace(SMALL, model=ModelSpec("cnn", size=16, weights=str(weights)))
    simulator_workspace(job, tmp_path / "w")
    assert (tmp_path / "w" / "files" / "own.pt").read_bytes() == b"weights"
    config = load_server_config(find_site_config("server", tmp_path / "w" / "small"))
    assert config.storage.files == tmp_path / "w" / "files"


@pytest.mark.parametrize(
    ("job", "folder", "says"),
    [
        (SMALL, "used", "is not empty; name another folder"),
        (SMALL, "with space", "FLARE's simulator cannot work with the path .*--simulator"),
        (replace(SMALL, simulation=None), "w", "small does not simulate its sites"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is_written(
    job: Any, folder: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=says):
        simulator_workspace(job, tmp_path / folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_sites_are_the_jobs(tmp_path: Path) -> None:
    places = ["--out", str(tmp_path / "o"), "--simulator", str(tmp_path / "w")]
    words = ["export", "demo", *places, "--sites", "a"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.flare
def test_flares_simulator_gives_what_the_loop_gives(tmp_path: Path) -> None:
    settings = ["rounds=2", "images=40", "held_out=60", "epochs=1"]
    words = ["export", "demo", "--out", str(tmp_path / "o"), "--simulator", str(tmp_path / "w")]
    done = CliRunner().invoke(app, [*words, *(word for s in settings for word in ("--set", s))])
    assert done.exit_code == 0, done.output
    (command,) = [line.removeprefix("run it: ") for line in done.output.splitlines() if "run it" in line]
    program = [sys.executable, "-m", "nvflare.cli", *shlex.split(command)[1:]]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads((tmp_path / "w/demo/server/simulate_job/metrics.json").read_text())
    from suture.simulation.job import load_job, with_settings

    loop = run_job(with_settings(load_job("demo"), settings), "local", tmp_path / "loop")
    expected = json.loads((loop / "metrics.json").read_text())
    assert found["auroc"] == pytest.approx(expected["auroc"], abs=1e-6)


PROGRAM = """
import dataclasses, sys
from pathlib import Path
from nvflare.recipe import SimEnv
from small_job import SMALL
from suture.flare.recipe import recipe_of
from suture.flare.simulate import simulator_workspace

job, sites = simulator_workspace(dataclasses.replace(SMALL, rounds=1), Path(sys.argv[1]))
run = recipe_of(job, sites=sites).execute(SimEnv(clients=sites, workspace_root=sys.argv[1]))
print("result:", run.get_result())
"""


@pytest.mark.flare
def test_a_program_executes_it_as_a_recipe(tmp_path: Path) -> None:
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "w")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, env=paths)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (result,) = [line.removeprefix("result: ") for line in ran.stdout.splitlines() if "result: " in line]
    (found,) = Path(result).rglob("simulate_job/metrics.json")
    loop = run_job(replace(SMALL, rounds=1), "local", tmp_path / "loop")
    expected = json.loads((loop / "metrics.json").read_text())
    assert json.loads(found.read_text())["auroc"] == pytest.approx(expected["auroc"], abs=1e-6)
