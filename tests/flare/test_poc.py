"""A federation of processes with TLS: code that travels, the loop's figures, a policy's no in plain words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from own_poc import own_port, wait_until_joined
from small_hospitals import small_study
from suture.data.config import load_site_config
from suture.federation.loop import Loop, federate
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.flare.admin.kit import kits_in
from suture.flare.admin.poc import parties, place_configs, project_of, project_template, provision, simulate
from suture.flare.admin.policy import allow_classes, make_strict, missing_classes
from suture.flare.admin.processes import start, stop
from suture.simulation.job import load_job, with_settings
from suture.simulation.run import run_job

pytestmark = pytest.mark.flare

SETTINGS = ["rounds=1", "model.size=16", "epochs=1"]
STRICT = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
OPEN = {"gamma": ("Mass", "Hernia")}
"""A site with the policy that FLARE's provisioning gives it."""

SITES = STRICT | OPEN


def suture(*words: str, job: str = "demo") -> subprocess.CompletedProcess[str]:
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "suture", "run", job, "--env", "poc", *words, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_code_travels_or_is_installed_and_the_figures_are_the_loops(
    tmp_path: Path, hospital: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "poc"
    root.mkdir()
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(root))
    project = root / "project.yml"
    project.write_text(yaml.safe_dump(project_of(project_template(), list(SITES), own_port())))
    provision(project, root)
    kits = kits_in(root)
    server, sites = parties(kits)
    configs = {}
    for i, (name, kit) in enumerate(sites.items()):
        configs[name] = load_site_config(hospital(kit.folder, SITES[name], 25, i))
        if name in STRICT:
            make_strict(kit)
    try:
        begun = start(root, (server, *sites.values()))
        wait_until_joined(root, kits, begun)
        assert missing_classes(server)
        assert missing_classes(sites["gamma"])
        travelled = suture("--bundle", "--sites", "gamma", "--out", str(tmp_path / "travelled"))
        allow_classes(server)  # each job reads the list anew
        both = ("--sites", ",".join(STRICT))
        refused = suture("--bundle", *both, "--out", str(tmp_path / "refused"))
        allow_classes(sites["gamma"])
        secure = ("--set", "method=vanilla", "--set", "secure_aggregation={}")
        hidden = suture("--sites", ",".join(SITES), *secure, "--out", str(tmp_path / "secure"))
        study = small_study(tmp_path / "study", images=100, least=2)
        own = with_settings(load_job(study), SETTINGS)
        other = suture(*both, "--out", str(tmp_path / "poc" / "other"), job=str(study))
        place_configs(own, *simulate(own, root), kits)
        studied = suture(*both, "--out", str(tmp_path / "studied" / "same"), job=str(study))
    finally:
        stop(root)
    assert travelled.returncode == 0, travelled.stderr
    assert json.loads((tmp_path / "travelled" / "metrics.json").read_text())["auroc"]
    assert refused.returncode == 1
    assert "alpha refuses jobs that bring their code" in refused.stderr
    assert "permissions.lead in local/authorization.json" in refused.stderr
    assert not any(party.process() for party in begun)
    assert hidden.returncode == 0, hidden.stderr

    assert other.returncode == 2, "the sites have other data than the study"
    assert "alpha/local/suture.toml is not what" in other.stderr
    assert studied.returncode == 0, studied.stderr
    assert "round 1/1" in studied.stdout
    assert str(tmp_path / "studied" / "same" / "report.html") in studied.stdout
    (study / "gamma" / "suture.toml").unlink()  # which did not take part
    limited = with_settings(own, ["simulation.limits=true"])  # which always apply in a federation
    loop = run_job(limited, "local", tmp_path / "loop of the study" / "same")
    exact = run_job(own, "local", tmp_path / "exact loop" / "same")
    assert (exact / "metrics.json").read_bytes() != (loop / "metrics.json").read_bytes()
    for name in ("metrics.json", "model/model.safetensors"):
        assert (tmp_path / "studied" / "same" / name).read_bytes() == (loop / name).read_bytes(), name

    # The plain sum of what the sites hid.
    job = with_settings(load_job("demo"), [*SETTINGS, "method=vanilla"])
    plan = job.plan("loop")
    members = {name: Site(name, configs[name], plan, 1, tmp_path / "states" / name) for name in SITES}
    federate(open_server(plan, job.schedule(), None, tmp_path), Loop(members))
    folders = (tmp_path / "secure", tmp_path / "loop")
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert metrics[0]["auroc"] == pytest.approx(metrics[1]["auroc"], abs=1e-6)
    assert metrics[0]["auroc"]
