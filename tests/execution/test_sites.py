"""Simulated sites: what they compute on, what their files say, and what a reference is given."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from official import write_ham10000
from suture.cli.common import device_of
from suture.core.errors import ConfigError
from suture.core.labels import union
from suture.data.config import TrainingConfig, load_server_config, load_site_config
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.execution.sites import cache_folder, compute_on, feature_folder, on_devices, this_machine
from suture.flare.recipe import export_job
from suture.learning.samples import load_samples, pool
from suture.methods import METHODS
from suture.models import ModelSpec
from suture_papers.skin_lesions.isic_sites import IsicSites
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused, suture

SMALL = ("--set", "simulation.images=20", "--set", "simulation.held_out=30")


def test_options_change_what_they_name_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_machine() == TrainingConfig() == TrainingConfig(device="cpu", threads=1, amp=False)
    with refused("'cuda:99'", by=ConfigError):
        compute_on("cpu,cuda:99")
    assert this_machine().device == "cpu"
    monkeypatch.setenv("SUTURE_THREADS", "3")
    compute_on("cpu:0", amp=True)
    assert this_machine() == TrainingConfig(device="cpu:0", threads=3, amp=True)
    with refused("'gpu'", by=ConfigError):
        compute_on("gpu")
    assert os.environ["SUTURE_DEVICE"] == "cpu:0"
    monkeypatch.setenv("SUTURE_THREADS", "many")
    with refused("SUTURE_THREADS", "threads", "'many'", by=ConfigError):
        this_machine()


def test_every_party_of_a_simulation_has_it_in_its_file_and_sites_take_turns(tmp_path: Path) -> None:
    suture("data", "simulate", "demo", "--out", tmp_path, *SMALL, "--device", "cpu,cpu:0")
    server = load_server_config(tmp_path / "server" / "suture.toml").held_out
    assert server is not None
    assert server.training.device == "cpu"
    sites = [path for path in tmp_path.glob("*/suture.toml") if path.parent.name != "server"]
    assert sorted(load_site_config(path).training.device for path in sites) == ["cpu", "cpu", "cpu:0"]
    assert [one.device for one in on_devices(tuple("abcd")).values()] == ["cpu", "cpu:0"] * 2
    with refused("cpu,cpu:0", by=ConfigError):
        device_of("cpu,cpu:0")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run demo --env local --out {} --device nonsense", "'nonsense'"),
        ("table nih_overlap --work {} --device nonsense", "'nonsense'"),
        ("run demo --env poc --out {} --device cpu", "[training] device"),  # which a real site says itself
    ],
)
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_written(
    command: str, named: str, tmp_path: Path
) -> None:
    with refused(named, by=ConfigError):
        suture(*command.format(tmp_path / "out").split())
    assert not list(tmp_path.iterdir())


def test_sites_of_all_runs_share_a_cache_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = IsicSites(root=str(write_ham10000(tmp_path / "ham")))

    def storage(run: str) -> dict[str, object]:
        names = sites.prepare(tmp_path / run, tmp_path, 1, METHODS["fedavg"]())
        return {name: load_site_config(tmp_path / run / name / "suture.toml").storage for name in names}

    users = Path.home() / ".cache" / "suture" / "features"
    for name, own in storage("one").items():
        assert (own.cache, own.feature_folder) == (tmp_path / "one" / name / "cache", users)
    assert users.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("SUTURE_CACHE", str(shared := tmp_path / "shared"))
    for run in ("one", "two"):
        for name, own in storage(run).items():
            assert (own.cache, own.feature_folder) == (shared, shared / "features")
            assert own.state == tmp_path / run / name / "state"
    site = tmp_path / "phantoms" / "harbor"
    assert cache_folder(site, site / "images") == site / "cache"
    assert feature_folder(site, site / "images") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUTURE_CACHE", str(tmp_path / "file" / "no folder"))
    assert feature_folder(site, tmp_path / "images") is None, "as without a home"


def test_pooled_patients_and_labels_stay_apart(tmp_path: Path) -> None:
    PhantomSites(images=30, held_out=30).prepare(tmp_path, tmp_path, 1, METHODS["central"]())
    names, spec = ("harbor", "lakeside", "northfield"), ModelSpec("cnn", size=16)
    parts = {n: load_samples(load_site_config(tmp_path / n / "suture.toml"), spec, n) for n in names}
    labels, samples = pool(parts)
    assert labels.names == tuple(sorted(union(own for own, _ in parts.values()).names))
    train = samples["train"]
    assert len(train) == sum(len(own["train"]) for _, own in parts.values())
    first = parts["harbor"][1]["train"]
    assert train.patients[0] == f"harbor/{first.patients[0]}"
    known = {labels.names[i] for i in np.flatnonzero(~np.isnan(train.y[0].numpy()))}
    assert known == set(parts["harbor"][0])


@pytest.mark.parametrize("method", ["central", "individual"])
def test_references_do_not_run_in_a_federation(method: str, tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f"method={method}"])
    with refused("--env local", by=ConfigError):
        run_job(job, "sim", tmp_path / "r")
    with refused("--env local", by=ConfigError):
        export_job(job, tmp_path)
