"""A federation whose parties are all strict, and submitters who are not to be trusted."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from own_poc import ended, own_port, wait_until_joined
from suture.core.errors import FederationError
from suture.federation.ownership import OWNER
from suture.federation.store import EXPERIMENTS
from suture.flare.admin.doctor import examine
from suture.flare.admin.kit import Kit, kits_in
from suture.flare.admin.poc import _set_policies, parties, project_of, project_template, provision
from suture.flare.admin.policy import storages
from suture.flare.admin.processes import start, stop
from suture.flare.admin.remote import Submission, submit
from suture.flare.admin.session import connected
from suture.flare.recipe import export_job
from suture.simulation.job import Job, load_job, with_settings

pytestmark = pytest.mark.flare

SITES = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
MINE, THEIRS = "lead@suture.org", "lead@elsewhere.org"


def small() -> Job:
    return with_settings(load_job("demo"), ["rounds=1", "model.size=16", "epochs=1"])


def provisioned(root: Path, hospital: Callable[..., Path]) -> dict[str, Kit]:
    """The kits of a server, two sites and two leads of different organisations; all parties are strict."""
    project = project_of(project_template(), list(SITES), own_port())
    lead = {"name": THEIRS, "type": "admin", "org": "elsewhere", "role": "lead"}
    project["participants"].append(lead)
    path = root / "project.yml"
    path.write_text(yaml.safe_dump(project))
    provision(path, root)
    kits = kits_in(root)
    for i, (name, labels) in enumerate(SITES.items()):
        hospital(kits[name].folder, labels, 25, i)
    _set_policies(small(), kits, loose=False)
    return kits


def test_no_submitter_gets_anothers_model_runs_code_or_makes_the_server_fetch(
    tmp_path: Path, hospital: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "poc"
    root.mkdir()
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(root))
    kits = provisioned(root, hospital)
    server, sites = parties(kits)
    mine, theirs = kits[MINE], kits[THEIRS]
    bundled = Submission(bundle=True)
    requested: list[str] = []

    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_error(404)

    web = http.server.HTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        begun = start(root, (server, *sites.values()))
        wait_until_joined(root, kits, begun)
        found = {f.about: f.status for kit in (server, theirs) for f in examine(kit.folder)}
        first = ended(mine, submit(small(), "poc", mine, tmp_path / "mine", "trial"), tmp_path / "mine")
        assert first == ""
        model = digest(server)
        stolen = ended(theirs, submit(small(), "poc", theirs, tmp_path / "a", "trial"), tmp_path / "a")
        code = ended(theirs, submit(small(), "poc", theirs, tmp_path / "b", "c", bundled), tmp_path / "b")
        folder = export_job(small(), tmp_path / "jobs", "other", tuple(SITES))
        config = folder / "app_server" / "config" / "config_fed_server.json"
        include = f'include url("http://127.0.0.1:{web.server_port}/secret")'
        config.with_suffix(".conf").write_text(f"{{ {include}\n{config.read_text()[1:]}")
        config.unlink()
        with connected(theirs) as federation, pytest.raises(FederationError, match="not JSON"):
            federation.submit(folder)
    finally:
        stop(root)
        web.shutdown()
        web.server_close()
    assert found["jobs"] == found["storage of jobs"] == found["connection"] == "ok"
    assert storages(server)["jobs"].is_dir()
    for states in (server.folder / "suture", *(kit.folder / "state" for kit in sites.values())):
        owner = json.loads((states / EXPERIMENTS / "trial" / OWNER).read_text())
        assert (owner["name"], owner["org"]) == (MINE, "coordinator")
    assert "the experiment 'trial' is not this submitter's" in stolen
    assert not (tmp_path / "a" / "model").exists()
    assert digest(server) == model
    assert "server refuses jobs that bring their code" in code
    assert not requested


def digest(server: Kit) -> str:
    path = server.folder / "suture" / EXPERIMENTS / "trial" / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()
