"""A federation of processes with mutual TLS: the loop's figures, and a policy's no in plain words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from suture.config import load_site_config
from suture.deploy.kit import kits_in, project_admin
from suture.deploy.poc import free_port, parties, project_of, project_template
from suture.deploy.policy import allow_classes
from suture.deploy.processes import check_alive, start, stop
from suture.deploy.strict import make_strict
from suture.federation import Loop, federate
from suture.flare.provision import provision
from suture.flare.session import wait_for_sites
from suture.job import load_job, with_settings
from suture.server.open import open_server
from suture.site import Site

pytestmark = pytest.mark.flare

SETTINGS = ["rounds=1", "model.size=16", "epochs=1"]
SITES = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}


def suture(*words: str) -> subprocess.CompletedProcess[str]:
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "suture.cli", "run", "demo", "--env", "poc", *words, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_processes_with_tls_equal_the_loop_and_refuse_travelling_code(
    tmp_path: Path, hospital: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "poc"
    root.mkdir()
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(root))
    project = root / "project.yml"
    project.write_text(yaml.safe_dump(project_of(project_template(), list(SITES), free_port(8002))))
    provision(project, root)
    kits = kits_in(root)
    server, sites = parties(kits)
    configs = {}
    for i, (name, kit) in enumerate(sites.items()):
        configs[name] = load_site_config(hospital(kit.folder, SITES[name], 25, i))
        make_strict(kit)
    allow_classes(server)
    try:
        begun = start(root, (server, *sites.values()))
        assert not wait_for_sites(project_admin(root), set(sites), 120, lambda: check_alive(begun, kits))
        run = suture("--no-bundle", "--out", str(tmp_path / "run"))
        refused = suture("--out", str(tmp_path / "refused"))
    finally:
        stop(root)
    assert run.returncode == 0, run.stderr
    assert "round 1/1" in run.stdout
    assert str(tmp_path / "run" / "report.html") in run.stdout
    assert refused.returncode == 1
    assert "alpha refuses jobs that bring their code" in refused.stderr
    assert "permissions.project_admin in local/authorization.json" in refused.stderr
    assert not any(party.process() for party in begun)

    job = with_settings(load_job("demo"), SETTINGS)
    members = {
        name: Site(name, config, job.plan("loop"), 1, tmp_path / "states" / name)
        for name, config in configs.items()
    }
    federate(open_server(job.plan("loop"), job.schedule(), None, tmp_path), Loop(members))
    metrics = [json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("run", "loop")]
    assert metrics[0]["auroc"] == pytest.approx(metrics[1]["auroc"], abs=1e-6)
    assert metrics[0]["auroc"]
