"""What simulated parties compute on: said by the command or the environment, written to each suture.toml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from suture.cli import app
from suture.cli.common import device_of
from suture.core.errors import ConfigError
from suture.data.config import TrainingConfig, load_server_config, load_site_config
from suture.execution.sites import compute_on, on_devices, this_machine

SMALL = ["--set", "simulation.images=20", "--set", "simulation.held_out=30"]


def test_by_default_one_thread_of_the_cpu() -> None:
    assert this_machine() == TrainingConfig() == TrainingConfig(device="cpu", threads=1, amp=False)


def test_options_change_what_they_name_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUTURE_THREADS", "3")
    compute_on("cpu:0", amp=True)
    assert this_machine() == TrainingConfig(device="cpu:0", threads=3, amp=True)
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used here"):
        compute_on("gpu")
    assert os.environ["SUTURE_DEVICE"] == "cpu:0"
    monkeypatch.setenv("SUTURE_THREADS", "many")
    with pytest.raises(ConfigError, match=r"SUTURE_THREADS.*threads: .*'many'"):
        this_machine()


def test_every_party_of_a_simulation_has_it_in_its_file(tmp_path: Path) -> None:
    words = ["data", "simulate", "demo", "--out", str(tmp_path), *SMALL, "--device", "cpu:0"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    server = load_server_config(tmp_path / "server" / "suture.toml").held_out
    assert server is not None
    sites = [load_site_config(path) for path in tmp_path.glob("*/suture.toml")]
    assert len(sites) == 4
    assert {site.training.device for site in (server, *sites)} == {"cpu:0"}


def test_sites_take_turns_on_several_devices(tmp_path: Path) -> None:
    words = ["data", "simulate", "demo", "--out", str(tmp_path), *SMALL, "--device", "cpu,cpu:0"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    sites = {path.parent.name: load_site_config(path) for path in tmp_path.glob("*/suture.toml")}
    server = load_server_config(tmp_path / "server" / "suture.toml").held_out
    assert server is not None
    assert server.training.device == "cpu"
    assert [training.device for training in on_devices(tuple("abcde")).values()] == [
        "cpu",
        "cpu:0",
        "cpu",
        "cpu:0",
        "cpu",
    ]
    del sites["server"]
    assert sorted(site.training.device for site in sites.values()) == ["cpu", "cpu", "cpu:0"]


def test_each_of_several_devices_is_tried_and_a_model_is_on_one() -> None:
    with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used here"):
        compute_on("cpu,cuda:99")
    with pytest.raises(ConfigError, match="give one device"):
        device_of("cpu,cpu:0")
    assert this_machine().device == "cpu"


@pytest.mark.parametrize("command", ["run demo --env local --out {}", "table nih_overlap --work {}"])
def test_an_unknown_device_is_refused_before_anything_is_written(command: str, tmp_path: Path) -> None:
    words = command.format(tmp_path / "out").split()
    with pytest.raises(ConfigError, match="device 'nonsense' cannot be used here"):
        CliRunner().invoke(app, [*words, "--device", "nonsense"], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_a_site_of_a_running_federation_says_it_itself(tmp_path: Path) -> None:
    words = ["run", "demo", "--env", "poc", "--out", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(ConfigError, match=r"settings of each site's own suture.toml: \[training\] device"):
        CliRunner().invoke(app, words, catch_exceptions=False)
