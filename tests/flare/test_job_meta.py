"""What FLARE reads of a job's meta.json: scope, GPUs and launchers; and the GPU that a site then has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.utils.job_launcher_utils import (
    get_portable_resource_spec,
    resolve_site_resource_spec,
    validate_portable_resource_spec,
)
from typer.testing import CliRunner

from suture.cli import app
from suture.data.config import load_site_config
from suture.execution.job import load_job, with_settings
from suture.flare.recipe import export_job
from suture.flare.workspace import on_assigned


def meta_of(folder: Path, *settings: str, sites: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    job = with_settings(load_job("demo"), settings)
    found: dict[str, Any] = json.loads((export_job(job, folder, "trial", sites) / "meta.json").read_text())
    return found


def test_a_job_says_nothing_by_default(tmp_path: Path) -> None:
    meta = meta_of(tmp_path)
    assert meta["resource_spec"] == {}
    assert not {"scope", "launcher_spec", "gpus"} & meta.keys()


def test_gpus_are_flares_resource_of_each_site(tmp_path: Path) -> None:
    own = 'flare.resource_spec={"b": {"mem_per_gpu_in_GiB": 8}, "server": {"num_of_cpus": 2}}'
    image = 'flare.launcher_spec={"default": {"docker": {"image": "registry/suture:1"}}}'
    meta = meta_of(tmp_path, "flare.gpus=2", own, image, "flare.scope=suture")
    assert meta["resource_spec"] == {
        "a": {"num_of_gpus": 2},
        "b": {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 8},
        "server": {"num_of_cpus": 2},
    }
    assert (meta["scope"], meta["launcher_spec"]["default"]["docker"]["image"]) == (
        "suture",
        "registry/suture:1",
    )
    assert get_portable_resource_spec(meta, "a") == {"num_of_gpus": 2}
    assert "num_of_gpus" not in get_portable_resource_spec(meta, "server")


def test_without_names_of_sites_every_party_has_flares_default(tmp_path: Path) -> None:
    words = ["export", "demo", "--out", str(tmp_path), "--gpus", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    meta = json.loads((tmp_path / "demo" / "meta.json").read_text())
    validate_portable_resource_spec(meta["resource_spec"])
    assert resolve_site_resource_spec(meta, "harbor") == {"num_of_gpus": 1}


@pytest.mark.parametrize(
    ("device", "spec", "used"),
    [
        ("cuda:1", {"harbor": {"num_of_gpus": 1}}, "cuda"),
        ("cuda:1", {"@default": {"num_of_gpus": 1}}, "cuda"),
        ("cuda:1", {"@default": {"num_of_gpus": 1}, "harbor": {"num_of_gpus": 0}}, "cuda:1"),
        ("cuda:1", {"lakeside": {"num_of_gpus": 1}}, "cuda:1"),
        ("cuda:1", {}, "cuda:1"),
        ("cuda:1", None, "cuda:1"),
        ("cuda", {"harbor": {"num_of_gpus": 1}}, "cuda"),
        ("cpu", {"harbor": {"num_of_gpus": 1}}, "cpu"),
    ],
)
def test_an_assigned_gpu_is_counted_from_0_again(device: str, spec: Any, used: str, tmp_path: Path) -> None:
    path = tmp_path / "suture.toml"
    (tmp_path / "labels.csv").write_text("image,Mass\n")
    path.write_text(
        '[data]\ndataset = "hospital"\ntable = "labels.csv"\nroot = "."\nlabels = ["Mass"]\n'
        f'[training]\ndevice = "{device}"\n'
    )
    config = load_site_config(path)
    meta = {} if spec is None else {"resource_spec": spec}
    assert on_assigned(config, meta, "harbor").training.device == used
    assert config.training.device == device
