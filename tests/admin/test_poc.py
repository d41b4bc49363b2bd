"""`suture poc`: the files that it writes, and its processes: what was started is stopped, nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from startup_kits import MakeKit

from outside_method import MODULE, NAME, install, on_path
from own_poc import own_port
from small_hospitals import small_study
from suture.core.errors import ConfigError, FederationError
from suture.core.files import write_json
from suture.data.config import load_site_config
from suture.execution.job import load_job, with_settings
from suture.flare.kit import Kit, kits_in, read_kit
from suture_admin.poc import (
    _set_policies,
    check_study,
    clear,
    free_port,
    place_configs,
    project_of,
    project_template,
    simulate,
)
from suture_admin.poc_commands import _start
from suture_admin.policy import bypasses, missing_classes, permits, survives
from suture_admin.processes import check_alive, last_error, parties_of, running, start, stop
from world import refused

SITES = ("harbor", "lakeside", "northfield")
SMALL = with_settings(load_job("demo"), ["images=20", "held_out=30"])


def test_the_project_of_the_repository_fits_the_demo_and_takes_other_sites_and_a_port(tmp_path: Path) -> None:
    """Its sites, in its own order; an administrator, and a lead who submits."""
    given = yaml.safe_load(project_template().read_text())["participants"]
    assert [p["name"] for p in given if p["type"] == "client"] == list(SITES)
    assert {"project_admin", "lead"} <= {p.get("role") for p in given}
    project = project_of(project_template(), ["site-1", "site-2"], 9123)
    clients = [p for p in project["participants"] if p["type"] == "client"]
    assert [(p["name"], p["org"]) for p in clients] == [("site-1", "site_1"), ("site-2", "site_2")]
    (server,) = (p for p in project["participants"] if p["type"] == "server")
    assert server["fed_learn_port"] == 9123
    assert project["builders"]
    for name in (*SITES, "server"):
        config = load_site_config(project_template().parent / "sites" / name / "suture.toml")
        assert (config.data.root.parent.name, config.storage.state.parent.name) == ("data", "suture")
    path = tmp_path / "project.yml"
    for text in (None, "a: [", "name: x"):
        if text:
            path.write_text(text)
        with refused("project.yml", by=ConfigError):
            project_of(path, ["a"], 1)


def test_a_port_in_use_gives_way_to_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = own_port()
    assert free_port(port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert port < free_port(port) <= port + 100
    with (
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.create_connection(elsewhere.getsockname()) as going_out,
    ):
        assert free_port(going_out.getsockname()[1]) != going_out.getsockname()[1]

    def in_use(self: socket.socket, address: object) -> None:
        raise OSError("in use")

    monkeypatch.setattr(socket.socket, "bind", in_use)
    with refused("65530", "65535", "--port", by=ConfigError):
        free_port(65530)


@pytest.fixture
def kits(make_kit: MakeKit, tmp_path: Path) -> dict[str, Kit]:
    for name in SITES:
        make_kit("site", name)
    make_kit("server", "server")
    return kits_in(tmp_path)


def test_each_party_finds_its_own_data(kits: dict[str, Kit], make_kit: MakeKit, tmp_path: Path) -> None:
    names, data = simulate(SMALL, tmp_path)
    assert sorted(names) == list(SITES)
    stale = data / "of-an-earlier-partition"
    stale.mkdir()
    (stale / "suture.toml").write_text("")
    place_configs(SMALL, names, data, kits)
    for name in (*SITES, "server"):
        config = load_site_config(kits[name].folder / "local" / "suture.toml")
        assert config.data.root == data / name / "images"
        assert config.data.table.is_file()
    assert config.storage.state == data / "runs"
    strange = make_kit("site", "elsewhere")  # a federation of other sites
    with refused("elsewhere", "--overwrite", by=ConfigError):
        place_configs(SMALL, names, data, kits_in(tmp_path))
    assert not (strange / "local" / "suture.toml").exists()


def test_each_party_of_a_study_finds_the_data_where_they_lie(make_kit: MakeKit, tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    (study / "gamma").rename(study / "server")
    for name in ("alpha", "beta"):
        make_kit("site", name)
    make_kit("server", "server")
    job, kits = load_job(study), kits_in(tmp_path)
    names, data = simulate(job, tmp_path)
    assert names == ["alpha", "beta"]
    place_configs(job, names, data, kits)
    for name in (*names, "server"):
        config = load_site_config(kits[name].folder / "local" / "suture.toml")
        assert config.data.root == study / name / "images"
        assert config.storage.state.is_relative_to(data), "a POC keeps its states to itself"
    assert not list(study.rglob("state"))
    check_study(job, tmp_path)
    check_study(SMALL, tmp_path)


def test_a_study_that_the_poc_does_not_hold_is_not_run_there(make_kit: MakeKit, tmp_path: Path) -> None:
    """Otherwise its job would run on the data of another one."""
    study = small_study(tmp_path / "study")
    for name in ("alpha", "beta"):
        make_kit("site", name)
    make_kit("server", "server")
    job, kits = load_job(study), kits_in(tmp_path)
    for sites, named in (
        ([], ["alpha, beta, gamma", "poc up"]),
        (["alpa", "beta"], ["'alpa'", "'alpha'"]),
        (["alpha"], ["alpha/local/suture.toml", "poc up"]),
    ):
        with refused(*named, by=ConfigError):
            check_study(job, tmp_path, sites)
    (study / "gamma" / "suture.toml").unlink()
    place_configs(job, *simulate(job, tmp_path), kits)
    check_study(job, tmp_path)
    config = study / "beta" / "suture.toml"
    config.write_text(config.read_text().replace("min_count = 0", "min_count = 7"))
    with refused("beta/local/suture.toml", by=ConfigError):
        check_study(job, tmp_path)
    check_study(job, tmp_path, ["alpha"])
    for path in study.rglob("suture.toml"):
        path.unlink()
    check_study(job, tmp_path)  # a job alone, as in production


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("method", [NAME, "fedavg"])
def test_every_party_lists_the_package_of_a_method_from_outside(
    method: str, loose: bool, kits: dict[str, Kit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        _set_policies(with_settings(SMALL, [f"method={method}"]), kits, loose=loose)
    for kit in kits.values():
        assert permits(kit, f"{MODULE}.") == (method == NAME)
        assert missing_classes(kit) == ()
        assert survives(kit)
        assert loose or ["1 more class" in way for way in bypasses(kit)] == [True] * (method == NAME)
    site = json.loads((kits["harbor"].folder / "local" / "resources.json").read_text())
    assert site["allow_log_streaming"] is False, "a log may name files and patients"


def test_only_a_federation_is_cleared_and_its_data_stay(make_kit: MakeKit, tmp_path: Path) -> None:
    make_kit("server", "server")
    kept = tmp_path / "data" / "labels.csv"
    kept.parent.mkdir()
    kept.write_text("image")
    with refused("trial", by=ConfigError):
        clear(tmp_path)
    (tmp_path / "project.yml").write_text("name: trial")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "photos" / "prod_00").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "trial")
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "notes.txt", "photos", "link"}
    assert kept.exists()


SCRIPT = 'test "$1" = --once || exit 9\necho "$SUTURE_SITES|$(which python3)"\nsleep 300 &\nsleep 300\n'


def kit_of(make_kit: MakeKit, name: str, script: str = SCRIPT) -> Kit:
    folder = make_kit("site", name)
    (folder / "startup" / "sub_start.sh").write_text(script)
    return read_kit(folder)


@pytest.mark.complete
def test_what_was_started_is_stopped_with_its_children_and_only_what_does_not_live_is_started(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUTURE_SITES", "/elsewhere")
    kits = [kit_of(make_kit, name) for name in ("a", "b", "c")]
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        a, b, c = start(tmp_path, kits)
        assert start(tmp_path, kits) == []
        check_alive([a, b, c], {kit.name: kit for kit in kits})
        (process,) = (p for p in [b.process()] if p)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert running(tmp_path) == ["a", "c"]
        (again,) = start(tmp_path, kits)
        assert (again.name, again.pid != b.pid) == ("b", True)
        assert parties_of(tmp_path) == [a, c, again]
        while len(children := psutil.Process(a.pid).children()) < 2:
            time.sleep(0.02)
        other = dataclasses.replace(c, started=c.started - 60)  # its number went to another process
        write_json(tmp_path / "suture-poc.json", [vars(one) for one in (a, again, other)])
        assert sorted(stop(tmp_path)) == ["a", "b"]
        assert c.process() is not None
        write_json(tmp_path / "suture-poc.json", [vars(c)])
        assert stop(tmp_path) == ["c"]
        assert not any(child.is_running() for child in children)
        assert running(tmp_path) == parties_of(tmp_path) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    printed = (kits[0].folder / "poc_console.log").read_text()
    assert printed.startswith("|")
    assert "elsewhere" not in printed


@pytest.mark.complete
def test_a_process_that_ends_at_once_is_told_with_its_words(make_kit: MakeKit, tmp_path: Path) -> None:
    kit = kit_of(make_kit, "a", "echo port taken; exit 1\n")
    begun = start(tmp_path, [kit])
    while begun[0].process():
        time.sleep(0.02)
    with refused("of a has ended", "port taken", by=FederationError):
        check_alive(begun, {"a": kit})
    assert stop(tmp_path) == []


LOG = """2999-11-22 09:00:00,100 - Cell - ERROR - of yesterday
2999-11-22 23:00:01,100 - Cell - INFO - ERROR - is a word here
2999-11-22 23:00:02,100 - Cell - ERROR - cannot listen
2999-11-22 23:00:03,100 - FederatedServer - CRITICAL - port 8002: address already in use
2999-11-22 23:00:04,100 - Cell - INFO - bye
"""


def test_sites_that_do_not_register_are_told_with_the_last_errors_of_this_start(
    kits: dict[str, Kit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, harbor = kits["server"], kits["harbor"]
    assert last_error(server, "") is None
    (server.folder / "log.txt").write_text(LOG)
    (harbor.folder / "log.txt").write_text(LOG.replace("port 8002: address", "no such host"))
    assert last_error(server, "2999-11-22 23:00:00") == "port 8002: address already in use"
    assert last_error(server, "2999-11-22 23:00:04") is None
    monkeypatch.setattr("suture_admin.processes.start", lambda _, kits: list(kits))
    monkeypatch.setattr("suture.flare.kit.project_admin", lambda _: None)
    monkeypatch.setattr("suture_admin.session.wait_for_sites", lambda *_: {"harbor"})
    named = ["harbor", "- server: port 8002: address already", "- harbor: no such host already"]
    with refused(*named, by=FederationError):
        _start(tmp_path, kits)
