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

from small_job import SMALL
from suture.core.errors import ConfigError
from suture.data.config import find_site_config, load_server_config, load_site_config
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.flare.recipe import export_job, recipe_of
from suture.flare.simulate import simulator_workspace
from suture.models import ModelSpec
from suture.protocol.packing import load
from world import exit_of, refused, suture


def listed(local: Path) -> Any:
    """The class_allow_list of a simulator's workspace."""
    return json.loads((local / "resources.json.default").read_text())["class_allow_list"]


def test_each_party_finds_its_own_configuration_in_the_one_local_folder(tmp_path: Path) -> None:
    own = tmp_path / "weights" / "own.pt"
    own.parent.mkdir()
    own.write_bytes(b"weights")
    given = replace(SMALL, model=ModelSpec("cnn", size=16, weights=str(own)))
    job, sites = simulator_workspace(given, tmp_path / "w")
    assert job == given
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
    server = load_server_config(find_site_config("server", local.parent))
    assert server.held_out
    assert (
        server.storage.files / "own.pt"
    ).read_bytes() == b"weights"  # to all, of a file that the job names
    assert "suture.flare." in listed(local)


@pytest.mark.parametrize(
    ("job", "folder", "named"),
    [
        (SMALL, "used", "used"),
        (SMALL, "with space", "--simulator"),
        (replace(SMALL, simulation=None), "w", "small"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is_written(
    job: Any, folder: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with refused(named, by=ConfigError):
        simulator_workspace(job, tmp_path / folder)
    places = ("--out", tmp_path / "o", "--simulator", tmp_path / "w")
    assert exit_of(monkeypatch, "export", "demo", *places, "--sites", "a") == 2  # they are the job's
    assert sorted(tmp_path.rglob("*")) == before


def given_of(job: Path) -> dict[str, dict[str, Any]]:
    """The files that each party gets of a job, and what FLARE is told of it; it orders tasks as it likes."""

    def content(path: Path) -> Any:
        return json.loads(path.read_text(), object_hook=lambda d: {**d, "tasks": sorted(d.get("tasks", ()))})

    meta = json.loads((job / "meta.json").read_text())
    return {"": meta} | {
        party: {str(f.relative_to(job / app)): content(f) for f in (job / app).rglob("*") if f.is_file()}
        for app, parties in meta.pop("deploy_map").items()
        for party in parties
    }


def test_a_recipe_runs_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SimEnv` starts FLARE's simulator with the workspace and the sites, as `nvflare simulator` does."""
    job, sites = simulator_workspace(SMALL, tmp_path / "w")
    parser, started = argparse.ArgumentParser(), []
    define_simulator_parser(parser)

    def start(command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        words = parser.parse_args(command[3:])
        started.append((words.workspace, words.clients, words.threads, given_of(Path(words.job_folder))))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("nvflare.job_config.fed_job_config.subprocess.Popen", start)
    run = recipe_of(job, "trial", sites).execute(SimEnv(clients=sites, workspace_root=str(tmp_path / "w")))
    assert run.get_result() == str(tmp_path / "w" / "small")
    parties = given_of(export_job(job, tmp_path / "o", "trial", sites))
    assert parties.keys() == {"", "server", *sites}
    assert started == [(run.get_result(), ",".join(sites), len(sites), parties)]
    assert "suture.flare." in listed(tmp_path / "w/small/local"), "FLARE has written its own list over ours"


@pytest.mark.complete
def test_flares_simulator_gives_what_the_loop_gives(tmp_path: Path) -> None:
    settings = ["rounds=3", "images=60", "held_out=90", "epochs=1"]
    settings += ["method=fedmas", "model.projection=128", "method.prior_view=plain"]
    words = ("export", "demo", "--out", tmp_path / "o", "--simulator", tmp_path / "w")
    said = suture(*words, *(word for s in settings for word in ("--set", s)))
    (command,) = [line.removeprefix("run it: ") for line in said.splitlines() if "run it" in line]
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
