"""Two studies of FLARE over the same site, in a federation of processes with TLS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from own_poc import ended, own_port, wait_until_joined
from suture.core.errors import ConfigError
from suture.federation.ownership import OWNER
from suture.federation.store import EXPERIMENTS
from suture.flare.admin.kit import kits_in, read_json
from suture.flare.admin.poc import _set_policies, parties, project_of, project_template, provision
from suture.flare.admin.processes import start, stop
from suture.flare.admin.remote import Submission, submit
from suture.flare.admin.session import connected
from suture.simulation.job import load_job, with_settings

pytestmark = pytest.mark.flare

LEAD = "lead@suture.org"
JOB = with_settings(load_job("demo"), ["rounds=1", "model.size=16", "epochs=1"])


def test_a_study_sees_neither_the_jobs_nor_the_experiments_of_another(
    tmp_path: Path, hospital: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "poc"
    root.mkdir()
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(root))
    enrolled = {"site_orgs": {"alpha": ["alpha"]}, "admins": [LEAD]}
    project = project_of(project_template(), ["alpha"], own_port())
    project |= {"api_version": 4, "studies": {"heart": enrolled, "lungs": enrolled, "closed": {}}}
    (root / "project.yml").write_text(yaml.safe_dump(project))
    provision(root / "project.yml", root)
    kits = kits_in(root)
    server, sites = parties(kits)
    hospital(sites["alpha"].folder, ("Mass", "Nodule"), 25, 0)
    _set_policies(JOB, kits, loose=False)
    heart, lungs, closed = (replace(kits[LEAD], study=study) for study in ("heart", "lungs", "closed"))
    how = Submission(sites=["alpha"])
    try:
        wait_until_joined(root, kits, start(root, (server, *sites.values())))
        first = submit(JOB, "poc", heart, tmp_path / "first", "trial", how)
        other = submit(JOB, "poc", lungs, tmp_path / "other", "own", how)
        assert ended(heart, first, tmp_path / "first") == ""
        second = submit(JOB, "poc", lungs, tmp_path / "second", "trial", how)
        assert ended(lungs, other, tmp_path / "other") == ""
        refused = ended(lungs, second, tmp_path / "second")
        with connected(heart) as federation:
            assert [job["job_id"] for job in federation.jobs()] == [first]
        with connected(lungs) as federation:
            assert {job["job_id"] for job in federation.jobs()} == {other, second}
        with pytest.raises(ConfigError), connected(closed):
            pass
    finally:
        stop(root)
    assert "the experiment 'trial' is not this submitter's" in refused
    for party in (server.folder / "suture", sites["alpha"].folder / "state"):
        owners = {name: read_json(party / EXPERIMENTS / name / OWNER) for name in ("trial", "own")}
        assert {name: owner["study"] for name, owner in owners.items()} == {"trial": "heart", "own": "lungs"}
