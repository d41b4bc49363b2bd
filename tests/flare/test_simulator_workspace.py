"""An exported job runs in FLARE's own simulator, with what `suture export --simulator` writes beside it."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.private.fed.app.simulator.simulator import define_simulator_parser
from nvflare.recipe import SimEnv
from typer.testing import CliRunner

from small_job import SMALL
from suture.cli import app
from suture.core.errors import ConfigError
from suture.data.config import find_site_config, load_server_config, load_site_config
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.flare.recipe import export_job, recipe_of
from suture.flare.simulate import simulator_workspace
from suture.models import ModelSpec
from suture.protocol.packing import load


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


def given(job: Path) -> dict[str, dict[str, Any]]:
    """The files that each party gets of a job, and what FLARE is told of it."""
    meta = json.loads((job / "meta.json").read_text())
    return {"": meta} | {
        party: {str(f.relative_to(job / app)): content(f) for f in (job / app).rglob("*") if f.is_file()}
        for app, parties in meta.pop("deploy_map").items()
        for party in parties
    }


def content(path: Path) -> Any:
    """What a file says; FLARE writes the tasks of a filter in any order."""
    return json.loads(path.read_text(), object_hook=lambda d: {**d, "tasks": sorted(d.get("tasks", ()))})


def test_a_recipe_runs_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SimEnv` starts FLARE's simulator with the workspace and the sites, as `nvflare simulator` does."""
    job, sites = simulator_workspace(SMALL, tmp_path / "w")
    parser, started = argparse.ArgumentParser(), []
    define_simulator_parser(parser)

    def start(command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        read = parser.parse_args(command[3:])
        started.append((read.workspace, read.clients, read.threads, given(Path(read.job_folder))))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("nvflare.job_config.fed_job_config.subprocess.Popen", start)
    run = recipe_of(job, "trial", sites).execute(SimEnv(clients=sites, workspace_root=str(tmp_path / "w")))
    assert run.get_result() == str(tmp_path / "w" / "small")
    parties = given(export_job(job, tmp_path / "o", "trial", sites))
    assert parties.keys() == {"", "server", *sites}
    assert started == [(run.get_result(), ",".join(sites), len(sites), parties)]
    listed = json.loads((tmp_path / "w/small/local/resources.json.default").read_text())["class_allow_list"]
    assert "suture.flare." in listed, "FLARE has written its own list over ours"


@pytest.mark.complete
def test_flares_simulator_gives_what_the_loop_gives(tmp_path: Path) -> None:
    settings = ["rounds=3", "images=60", "held_out=90", "epochs=1"]
    settings += ["method=fedmas", "model.projection=128", "method.prior_view=plain"]
    words = ["export", "demo", "--out", str(tmp_path / "o"), "--simulator", str(tmp_path / "w")]
    done = CliRunner().invoke(app, [*words, *(word for s in settings for word in ("--set", s))])
    assert done.exit_code == 0, done.output
    (command,) = [line.removeprefix("run it: ") for line in done.output.splitlines() if "run it" in line]
    program = [sys.executable, *shlex.split(command)[1:]]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "deprecated" not in (ran.stdout + ran.stderr).lower()
    found = tmp_path / "w/demo/server/simulate_job"
    loop = run_job(with_settings(load_job("demo"), settings), "local", tmp_path / "loop")
    auroc, expected = (json.loads((out / "metrics.json").read_text())["auroc"] for out in (found, loop))
    assert auroc == pytest.approx(expected, abs=1e-6)
    (state,) = found.parent.glob("local/sites/server/state/experiments/*/state/round-000003.safetensors")
    one, two = (load(path).tensors for path in (loop / "state" / state.name, state))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)
