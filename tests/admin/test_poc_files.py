"""What `suture poc` writes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml
from startup_kits import MakeKit

from outside_method import MODULE, NAME, install, on_path
from own_poc import own_port
from small_hospitals import small_study
from suture.core.errors import ConfigError
from suture.data.config import load_site_config
from suture.execution.job import Job, load_job, with_settings
from suture.flare.kit import kits_in
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
from suture_admin.policy import bypasses, missing_classes, permits, survives

SITES = ("harbor", "lakeside", "northfield")


def small() -> Job:
    return with_settings(load_job("demo"), ["images=20", "held_out=30"])


def test_the_project_of_the_repository_fits_the_demo() -> None:
    """Its sites, in its own order; an administrator, and a lead who submits."""
    project = yaml.safe_load(project_template().read_text())
    kinds = [(p["type"], p["name"]) for p in project["participants"]]
    assert [name for kind, name in kinds if kind == "client"] == list(SITES)
    roles = {p.get("role") for p in project["participants"]}
    assert {"project_admin", "lead"} <= roles


def test_a_project_takes_the_sites_of_a_job_and_a_port() -> None:
    project = project_of(project_template(), ["site-1", "site-2"], 9123)
    clients = [p for p in project["participants"] if p["type"] == "client"]
    assert [(p["name"], p["org"]) for p in clients] == [("site-1", "site_1"), ("site-2", "site_2")]
    (server,) = (p for p in project["participants"] if p["type"] == "server")
    assert server["fed_learn_port"] == 9123
    assert project["builders"]


def test_a_file_that_is_no_project_is_named(tmp_path: Path) -> None:
    path = tmp_path / "project.yml"
    for text in (None, "a: [", "name: x"):
        if text:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"project\.yml is not a project file"):
            project_of(path, ["a"], 1)


def test_a_port_in_use_gives_way_to_the_next_free_one() -> None:
    port = own_port()
    assert free_port(port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert port < free_port(port) <= port + 100


def test_a_port_that_a_connection_goes_out_from_is_not_free() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.create_connection(elsewhere.getsockname()) as going_out,
    ):
        port = going_out.getsockname()[1]
        assert free_port(port) != port


def test_a_machine_without_a_free_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(self: socket.socket, address: object) -> None:
        raise OSError("in use")

    monkeypatch.setattr(socket.socket, "bind", in_use)
    with pytest.raises(ConfigError, match=r"no port from 65530 to 65535 is free .* --port"):
        free_port(65530)


def test_each_party_finds_its_own_data(make_kit: MakeKit, tmp_path: Path) -> None:
    for name in SITES:
        make_kit("site", name)
    make_kit("server", "server")
    job = small()
    names, data = simulate(job, tmp_path)
    assert sorted(names) == list(SITES)
    stale = data / "of-an-earlier-partition"
    stale.mkdir()
    (stale / "suture.toml").write_text("")
    kits = kits_in(tmp_path)
    place_configs(job, names, data, kits)
    for name in (*SITES, "server"):
        config = load_site_config(kits[name].folder / "local" / "suture.toml")
        assert config.data.root == data / name / "images"
        assert config.data.table.is_file()
    assert load_site_config(kits["server"].folder / "local" / "suture.toml").storage.state == data / "runs"


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
    check_study(small(), tmp_path)


def test_a_study_that_the_poc_does_not_hold_is_not_run_there(make_kit: MakeKit, tmp_path: Path) -> None:
    """Otherwise its job would run on the data of another one."""
    study = small_study(tmp_path / "study")
    for name in ("alpha", "beta"):
        make_kit("site", name)
    make_kit("server", "server")
    job, kits = load_job(study), kits_in(tmp_path)
    with pytest.raises(ConfigError, match=r"sites alpha, beta, and .*study has alpha, beta, gamma; .*poc up"):
        check_study(job, tmp_path)
    with pytest.raises(ConfigError, match="unknown site 'alpa'; did you mean 'alpha'"):
        check_study(job, tmp_path, ["alpa", "beta"])
    with pytest.raises(ConfigError, match=r"alpha/local/suture\.toml is not what .* says now; suture poc up"):
        check_study(job, tmp_path, ["alpha"])
    (study / "gamma" / "suture.toml").unlink()
    place_configs(job, *simulate(job, tmp_path), kits)
    check_study(job, tmp_path)
    config = study / "beta" / "suture.toml"
    config.write_text(config.read_text().replace("min_count = 0", "min_count = 7"))
    with pytest.raises(ConfigError, match=r"beta/local/suture\.toml is not what .* says now"):
        check_study(job, tmp_path)
    check_study(job, tmp_path, ["alpha"])
    for path in study.rglob("suture.toml"):
        path.unlink()
    check_study(job, tmp_path)  # a job alone, as in production


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("method", [NAME, "fedavg"])
def test_every_party_lists_the_package_of_a_method_from_outside(
    method: str, loose: bool, make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_kit("site", "harbor")
    make_kit("server", "server")
    kits = kits_in(tmp_path)
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        _set_policies(with_settings(small(), [f"method={method}"]), kits, loose=loose)
    for kit in kits.values():
        assert permits(kit, f"{MODULE}.") == (method == NAME)
        assert missing_classes(kit) == ()
        assert survives(kit)
    site = json.loads((kits["harbor"].folder / "local" / "resources.json").read_text())
    assert site["allow_log_streaming"] is False, "a log may name files and patients"
    others = "jobs may name 1 more class"
    for kit in kits.values():
        assert loose or list(bypasses(kit)) == ([others] if method == NAME else [])


def test_a_federation_of_other_sites_is_refused_and_untouched(make_kit: MakeKit, tmp_path: Path) -> None:
    folder = make_kit("site", "elsewhere")
    make_kit("server", "server")
    job = small()
    names, data = simulate(job, tmp_path)
    with pytest.raises(ConfigError, match=r"elsewhere.*--overwrite"):
        place_configs(job, names, data, kits_in(tmp_path))
    assert not (folder / "local" / "suture.toml").exists()


def test_only_a_federation_is_cleared_and_its_data_stay(make_kit: MakeKit, tmp_path: Path) -> None:
    make_kit("server", "server")
    kept = tmp_path / "data" / "labels.csv"
    kept.parent.mkdir()
    kept.write_text("image")
    with pytest.raises(ConfigError, match="holds trial, and no federation"):
        clear(tmp_path)
    (tmp_path / "project.yml").write_text("name: trial")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "photos" / "prod_00").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "trial")
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "notes.txt", "photos", "link"}
    assert kept.exists()


@pytest.mark.parametrize("name", [*SITES, "server"])
def test_the_templates_of_the_repository_are_valid(name: str) -> None:
    config = load_site_config(project_template().parent / "sites" / name / "suture.toml")
    assert config.data.root.parent.name == "data"
    assert config.storage.state.parent.name == "suture"
