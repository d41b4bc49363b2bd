"""A federation of processes with TLS; but for one strict site, with the policy of FLARE's provisioning."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flare_example import EXAMPLE, job_py
from outside_method import NAME, install, on_path
from own_poc import Federation, own_port, provisioned, with_keys_of_their_own
from small_hospitals import write_hospital
from suture.data.config import load_site_config
from suture.execution.job import Job, load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.models.weights import read_checkpoint
from suture_admin.kit_checks import check_connection
from suture_admin.kits import change_policy
from suture_admin.poc import project_of, project_template
from suture_admin.policy import SHARED, allow_classes, make_strict, missing_classes, storages, survive
from suture_admin.session import connect
from world import exit_of

pytestmark = pytest.mark.xdist_group("open federation")

HOSPITALS = {"alpha": ("Mass", "Nodule"), "site-1": ("Nodule", "Hernia"), "site-2": ("Mass", "Hernia")}
STRICT = "alpha"

VALUES = {"site-1": 1.0, "site-2": 2.0, "site-3": 6.0}
SCRIPT = f"""
import nvflare.client as flare
import sys

import torch

from suture.flare.client import receive, send

flare.init()
labels = sys.argv[1:]
value = {VALUES}[flare.get_site_name()]
while (received := receive(labels)) is not None:
    params = {{name: torch.full_like(tensor, value) for name, tensor in received.params.items()}}
    send(flare.FLModel(params=params), received.meta["labels"])
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A strict site, and a server and three sites with the policy that FLARE's provisioning gives them."""
    sites = sorted(HOSPITALS.keys() | VALUES.keys())
    project = project_of(project_template(), sites, own_port())
    with provisioned(tmp_path_factory.mktemp("open"), project, with_keys_of_their_own) as made:
        for seed, (name, labels) in enumerate(HOSPITALS.items()):
            write_hospital(made.sites[name].folder, labels, 25, seed)
        make_strict(made.sites[STRICT])
        assert {folder.parent for folder in storages(made.server).values()} == {SHARED}
        survive(made.server)  # else a server of another federation here takes its jobs, and refuses them
        yield made


def small(*settings: str) -> Job:
    return with_settings(load_job("demo"), ["rounds=1", "model.size=16", "epochs=1", *settings])


def auroc(run: Path) -> Any:
    return json.loads((run / "metrics.json").read_text())["auroc"]


def test_what_sites_hide_sums_to_the_loops_plain_figures(federation: Federation, tmp_path: Path) -> None:
    federation.join(*HOSPITALS)
    for party in (federation.server, *(federation.sites[name] for name in HOSPITALS if name != STRICT)):
        assert missing_classes(party)
        allow_classes(party)  # each job reads the list anew
    hidden = small("method=vanilla", "secure_aggregation={}")
    assert federation.run(hidden, tmp_path / "hidden", [*HOSPITALS]) == ""
    assert any(storages(federation.server)["jobs"].iterdir())

    job = small("method=vanilla")
    plan = job.plan("loop")
    configs = {name: load_site_config(federation.sites[name].folder / "suture.toml") for name in HOSPITALS}
    sites = {name: Site(name, config, plan, 1, tmp_path / name) for name, config in configs.items()}
    federate(open_server(plan, job.schedule(), None, tmp_path), Loop(sites))
    assert auroc(tmp_path / "loop")
    assert auroc(tmp_path / "hidden") == pytest.approx(auroc(tmp_path / "loop"), abs=1e-6)


@pytest.mark.complete
def test_code_of_another_package_travels_to_who_allows_it(
    federation: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is installed here, and at no party."""
    federation.join("site-1", STRICT)
    for party in (federation.server, federation.sites["site-1"]):
        change_policy(party, "resources", class_allow_list=[])
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        said = federation.run(small(f"method={NAME}"), tmp_path / "travelled", ["site-1"], bundle=True)
        how = ("--env", "poc", "--startup-kit", federation.lead.folder, "--sites", STRICT, "--bundle")
        code = exit_of(monkeypatch, "run", "demo", *how, "--out", tmp_path / "refused")
    refused = capsys.readouterr().err
    assert code == 1
    assert all(word in refused for word in (STRICT, "permissions.lead", "local/authorization.json"))
    assert said == ""
    assert auroc(tmp_path / "travelled")


@pytest.mark.complete
def test_rows_of_flares_fedavg_are_the_means_by_hand(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation.join(*VALUES)
    script = tmp_path / "script"
    script.mkdir()
    shutil.copy(EXAMPLE / "with_torch" / "net.py", script)
    (script / "client.py").write_text(SCRIPT)
    job_py("prod", "--client", script, "--rounds", "3", "--kit", federation.lead.folder)
    (fetched,) = re.findall(r"Results: (.+)", capsys.readouterr().out)
    (path,) = Path(fetched).rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    # Edema 6; Hernia 2; Mass (1 + 6) / 2; Nodule (1 + 2 + 6) / 3; nobody annotates Pneumonia
    assert model["head.weight"][:4, 0].tolist() == [6.0, 2.0, 3.5, 3.0]
    assert not bool((model["head.weight"][4] == model["head.weight"][4, 0]).all())
    assert bool((model["backbone.0.weight"] == 3.0).all())


@pytest.mark.complete
def test_doctor_and_ctrl_c_where_parties_talk_by_grpc(federation: Federation, tmp_path: Path) -> None:
    federation.join(STRICT)
    site, lead = federation.sites[STRICT], federation.lead
    assert lead.scheme == "grpc"
    for party in (federation.server, site, lead):
        assert {f.status for f in check_connection(party)} == {"ok"}
    with connect(lead) as session:
        assert STRICT in session.sites()

    kit = shutil.copytree(lead.folder, tmp_path / "kit")
    path = kit / "startup" / "fed_admin.json"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        path.write_text(path.read_text().replace(str(lead.port), str(silent.getsockname()[1])))
        with subprocess.Popen([sys.executable, "-m", "suture", "status", "--startup-kit", kit]) as process:
            try:
                silent.accept()
                process.send_signal(signal.SIGINT)
                assert process.wait(15) == 130
            finally:
                process.kill()
