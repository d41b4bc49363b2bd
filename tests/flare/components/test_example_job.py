"""The job of examples/flare-fedavg: what it exports, what it refuses, and that it learns."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flare_example import EXAMPLE, job_py
from suture.models.weights import read_checkpoint

APPS = "app_server", "app_site-1", "app_site-2"
SITES = {"site-1": {"Mass", "Nodule"}, "site-2": {"Hernia", "Nodule"}, "site-3": {"Edema", "Mass", "Nodule"}}


def test_each_site_is_told_its_own_classes_only(tmp_path: Path) -> None:
    job_py("export", "--to", tmp_path)
    assert not list(tmp_path.rglob("suture")), "the job carries a copy of the installed package"
    for site, own in SITES.items():
        files = [path for path in (tmp_path / "by-class" / f"app_{site}").rglob("*") if path.is_file()]
        assert {"client.py", "data.py", "net.py"} <= {path.name for path in files}
        text = "".join(path.read_text() for path in files)
        assert set(re.findall("Edema|Hernia|Mass|Nodule|Pneumonia", text)) == own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--client", "nope"], "--client nope: .* has no net.py or client.py; try with_monai"),
        (["prod"], "prod needs --kit: the folder of an administrator's kit"),
        (["prod", "--kit", "nope"], "prod needs --kit"),
        (["--rounds", "1"], "--rounds: give 2 or more"),
        (["--method", "nope"], "unknown method 'nope'"),
        (["--method", "individual"], "choose a federated method"),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        job_py(*words)
    assert caught.value.code == 2
    assert re.search(f"\njob.py: error: .*{says}", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["surgical", "fedlsm", "fedmas", "pmfl"])
def test_a_job_of_flares_own_workflow_is_its_classes_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EXAMPLE.parents[1] / "jobs" / f"flare_{name}"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    job = runpy.run_path(str(folder / "job.py"))
    monkeypatch.delitem(sys.modules, "shared")
    job["recipe"].export(str(tmp_path))
    exported = tmp_path / f"flare_{name}"
    assert {str(path.relative_to(exported)) for path in exported.rglob("*.py")} == {
        "app_server/custom/shared.py",
        *(f"app_{site}/custom/{file}.py" for site in job["SITES"] for file in ("client", "shared")),
    }
    of = {app: json.loads(path.read_text()) for app in APPS for path in exported.glob(f"{app}/config/*.json")}
    assert of["app_server"]["workflows"][0]["path"] == "nvflare.app_common.workflows.fedavg.FedAvg"
    aggregator = of["app_server"]["workflows"][0]["args"]["aggregator"]

    def filters(app: str, way: str) -> list[dict[str, Any]]:
        return [
            {**f["args"], "class": f["path"].rpartition(".")[2]} for c in of[app][way] for f in c["filters"]
        ]

    assert aggregator["path"].endswith(".MethodAggregator")
    assert filters("app_server", "task_data_filters") == [{"class": "SiteRowsFilter"}]
    same = {"method": name, "settings": aggregator["args"]["settings"]}
    for app in APPS[1:]:
        for way in ("task_data_filters", "task_result_filters"):
            [guard] = filters(app, way)
            assert guard["class"] == "DeclaredResultFilter"
            assert guard | same == guard
    if name == "surgical":
        assert "Edema" not in json.dumps(of["app_site-1"])


@pytest.mark.complete
def test_it_learns_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "job.py", "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    for site, own in SITES.items():
        assert f"{site} takes part with {len(own)} classes" in said
    best = [float(value) for value in re.findall(r"new best validation metric at round \d: (\S+)", said)]
    assert len(best) >= 2
    assert best[-1] > 0.8 > best[0]
    (path,) = tmp_path.rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    assert model["head.weight"].shape == (5, 16)


@pytest.mark.complete
def test_a_job_of_flares_own_workflow_runs_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE.parents[1] / "jobs" / "flare_pmfl" / "job.py"]
    env = {**os.environ, "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("Aggregated 2/2 results") + done.stderr.count("Aggregated 2/2 results") == 3
    (path,) = tmp_path.rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    assert model["head.weight"].shape == (1, 64)
