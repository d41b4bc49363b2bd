"""A federation whose parties are all strict: studies, a package that a site lists, hostile submitters."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nvflare.fuel.flare_api.flare_api import new_secure_session

from outside_method import CLASS, DISTRIBUTION, MODULE, NAME, install, on_path
from own_poc import Federation, ended, own_port, provisioned
from small_hospitals import small_study
from suture.core.errors import ConfigError, FederationError
from suture.core.files import read_records
from suture.data.config import load_server_config
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.federation.ownership import OWNER
from suture.federation.state_files import EXPERIMENTS
from suture.flare.kit import Kit, read_kit_json
from suture.flare.recipe import export_job
from suture_admin.doctor import examine
from suture_admin.kit_checks import check_connection, check_policy
from suture_admin.kits import change_policy, components_of, policy_file
from suture_admin.poc import _set_policies, place_configs, project_of, project_template, simulate
from suture_admin.policy import allow_packages, storages
from suture_admin.remote import Submission, submit
from suture_admin.session import connect
from world import exit_of, refused

pytestmark = [pytest.mark.complete, pytest.mark.xdist_group("strict federation")]

SMALL = ["rounds=1", "epochs=1"]
MINE, THEIRS = "lead@suture.org", "other@elsewhere.org"

CLIENT = """
from pathlib import Path

def initialize(**where):
    pass

class statsd:
    @staticmethod
    def gauge(name, value, tags):
        with Path(__file__).with_name("sent.txt").open("a") as sent:
            print(*tags, name, file=sent)

    increment = gauge
"""
"""In place of the client of `nvflare[monitoring]`."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Two sites with the data of a study, two leads, and studies of FLARE; alpha lists a package."""
    root = tmp_path_factory.mktemp("strict")
    project = project_of(project_template(), ["alpha", "beta"], own_port())
    project["participants"].append({"name": THEIRS, "type": "admin", "org": "elsewhere", "role": "lead"})
    enrolled = {"site_orgs": {"alpha": ["alpha"], "beta": ["beta"]}, "admins": [MINE, THEIRS]}
    project |= {"api_version": 4, "studies": {"heart": enrolled, "lungs": enrolled, "closed": {}}}
    project["studies"]["alone"] = {"site_orgs": {"alpha": ["alpha"]}, "admins": [MINE]}
    install(root / "installed")
    (root / "installed" / "datadog.py").write_text(CLIENT)
    path = os.pathsep.join([str(root / "installed"), os.environ.get("PYTHONPATH", "")])
    with provisioned(root, project, PYTHONPATH=path) as made:
        shutil.rmtree(small_study(root / "study", images=100, least=2) / "gamma")
        job = load_job(root / "study")
        place_configs(job, *simulate(job, root), made.kits)
        for kit in (made.server, made.sites["alpha"]):
            watch(kit)
        _set_policies(job, made.kits, loose=False)
        allow_packages(made.sites["alpha"], [f"{MODULE}."])
        yield made


def watch(kit: Kit) -> None:
    """Have a party send FLARE's metrics to StatsD."""
    reporter = {"path": "nvflare.fuel_opt.statsd.statsd_reporter.StatsDReporter", "args": {"site": kit.name}}
    collector = "nvflare.metrics.system_metrics_collector.SysMetricsCollector"
    metrics = {"path": collector, "args": {"tags": {"site": kit.name}}}
    own = components_of(policy_file(kit, "resources"))
    added = [{"id": "statsd", **reporter}, {"id": "metrics", **metrics}]
    change_policy(kit, "resources", components=[*own, *added])


def of(federation: Federation, user: str, study: str) -> Kit:
    return replace(federation.kits[user], study=study)


def experiment(party: Kit, name: str) -> Path:
    """The folder of an experiment at a party."""
    return load_server_config(party.folder / "local" / "suture.toml").storage.state / EXPERIMENTS / name


def owner(party: Kit, name: str) -> tuple[str, str, str]:
    written = read_kit_json(experiment(party, name) / OWNER)
    return written["name"], written["org"], written["study"]


def test_a_run_gives_the_loops_figures_and_is_its_submitters_alone(
    federation: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    federation.join("alpha", "beta")
    study, out, server = federation.root / "study", tmp_path / "run" / "same", federation.server
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(federation.root))
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["run", study, "--env", "poc", "--study", "heart", "--out", out, *settings]

    config = study / "alpha" / "suture.toml"
    text = config.read_text()
    config.write_text(text.replace("min_count = 2", "min_count = 3"))
    assert exit_of(monkeypatch, *command) == 2
    assert "alpha/local/suture.toml" in capsys.readouterr().err
    config.write_text(text)
    assert exit_of(monkeypatch, *command) == 0
    said = capsys.readouterr().out
    assert "round 1/1" in said
    assert str(out / "report.html") in said

    exact = with_settings(load_job(study), SMALL)
    limited = with_settings(exact, ["simulation.limits=true"])  # which always apply in a federation
    loop = run_job(limited, "local", tmp_path / "loop" / "same")
    for name in ("metrics.json", "model/model.safetensors"):
        assert (out / name).read_bytes() == (loop / name).read_bytes(), name
    without = run_job(exact, "local", tmp_path / "exact" / "same")
    assert (out / "metrics.json").read_bytes() != (without / "metrics.json").read_bytes()

    name = read_kit_json(out / "run.json")["experiment"]
    for party in (server, *federation.sites.values()):
        assert owner(party, name) == (MINE, "coordinator", "heart")
    sent = (federation.root / "installed" / "sent.txt").read_text()
    assert "site:server _client_heartbeat" in sent
    assert "site:alpha _before_job_launch" in sent
    assert all(found.status == "ok" for found in check_policy(server))
    assert storages(server)["jobs"].is_dir()
    model = experiment(server, name) / "model" / "model.safetensors"
    before = hashlib.sha256(model.read_bytes()).digest()
    theirs, elsewhere = of(federation, THEIRS, "heart"), of(federation, MINE, "lungs")
    jobs = {
        kit: submit(exact, "poc", kit, tmp_path / kit.name, name, Submission(["alpha"]))
        for kit in (theirs, elsewhere)
    }
    for kit, number in jobs.items():
        assert repr(name) in ended(kit, number, tmp_path / kit.name)
        assert not (tmp_path / kit.name / "model").exists()
    assert hashlib.sha256(model.read_bytes()).digest() == before
    seen = {}
    for kit in jobs:
        with connect(kit) as session:
            seen[kit] = {job["job_id"] for job in session.metas()}
    assert {read_kit_json(out / "run.json")["flare_job"], jobs[theirs]} <= seen[theirs]
    assert jobs[elsewhere] in seen[elsewhere]
    assert not seen[theirs] & seen[elsewhere]


def test_a_package_takes_part_at_a_site_that_lists_it(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.join("alpha", "beta")
    server, beta, lungs = federation.server, federation.sites["beta"], of(federation, MINE, "lungs")
    found = {f.about: f.status for kit in (server, federation.lead) for f in examine(kit.folder)}
    assert found["jobs"] == found["storage of jobs"] == found["connection"] == "ok"
    allow_packages(server, [f"{MODULE}."])  # each job reads the list anew
    with on_path(monkeypatch, federation.root / "installed"):
        job = with_settings(load_job("demo"), [*SMALL, "model.size=16", f"method={NAME}", "min_sites=1"])
        folder = export_job(job, tmp_path)  # which names no site, experiment or version, as those of jobs/
        with connect(lungs) as session:
            number = session.submit(folder)
        assert ended(lungs, number, tmp_path / "run") == ""
    name = read_kit_json(tmp_path / "run" / "run.json")["experiment"]
    assert name == f"demo-{number}"
    assert read_kit_json(tmp_path / "run" / "metrics.json")["auroc"]
    assert "configuration" in (tmp_path / "run" / "events.jsonl").read_text()
    assert [line["status"] for line in read_records(tmp_path / "run" / "history.jsonl")] == ["committed"]
    errors = (beta.folder / "suture" / "errors.jsonl").read_text()
    assert all(word in errors for word in ("beta", f"'{NAME}'", CLASS, DISTRIBUTION, f"--allow {MODULE}."))
    for party in (server, federation.sites["alpha"]):
        assert owner(party, name) == (MINE, "coordinator", "lungs")


def test_no_submitter_brings_code_makes_the_server_fetch_or_enters_a_closed_study(
    federation: Federation, tmp_path: Path
) -> None:
    federation.join("alpha", "beta")
    job, theirs = with_settings(load_job("demo"), SMALL), federation.kits[THEIRS]
    number = submit(job, "poc", theirs, tmp_path / "code", "code", Submission(bundle=True))
    assert "authorization.json" in ended(theirs, number, tmp_path / "code")

    folder = export_job(job, tmp_path / "jobs", "other", ("alpha", "beta"))
    config = folder / "app_server" / "config" / "config_fed_server.json"
    requested: list[str] = []

    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_error(404)

    with http.server.HTTPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        include = f'include url("http://127.0.0.1:{web.server_port}/secret")'
        config.with_suffix(".conf").write_text(f"{{ {include}\n{config.read_text()[1:]}")
        config.unlink()
        with connect(theirs) as session, refused("JSON", by=FederationError):
            session.submit(folder)
        web.shutdown()
    assert not requested
    with pytest.raises(ConfigError), connect(of(federation, MINE, "closed")):
        pass

    alone = of(federation, MINE, "alone")
    with refused("'beta'", by=FederationError):
        submit(job, "poc", alone, tmp_path / "both", "alone", Submission(["alpha", "beta"]))
    number = submit(job, "poc", alone, tmp_path / "alone", "alone")
    with connect(alone) as session:
        session.abort(number)
        assert sorted(session.meta(number)["deploy_map"].values()) == [["alpha"], ["server"]]


def test_a_site_that_is_disabled_learns_so_and_one_that_is_not_stays_connected(
    federation: Federation,
) -> None:
    federation.join("alpha", "beta")
    admin = federation.kits["admin@suture.org"]
    session = new_secure_session(admin.name, str(admin.folder), timeout=30)
    try:
        session.disable_client("beta")
        refused = {f.about: f.text for f in check_connection(federation.sites["beta"]) if f.status == "error"}
        assert refused.keys() == {"registration"}
        assert "'beta' is disabled" in refused["registration"]
        assert {f.status for f in check_connection(federation.sites["alpha"])} == {"ok"}
        assert [client.name for client in session.get_connected_client_list()] == ["alpha"]
    finally:
        session.enable_client("beta")
        session.close()
