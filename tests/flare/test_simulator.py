"""FLARE's simulator gives what the loop gives; these start processes and take their time."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_site
import psutil
import pytest
import torch
from nvflare.private.fed.app.simulator.simulator import define_simulator_parser
from nvflare.recipe import SimEnv
from torch import Tensor

from hostile_hospitals import write_hospitals
from packages import installed
from rounds import conformant
from shadows import plant
from small_hospitals import write_hospital
from small_job import SMALL
from suture.core.errors import ConfigError, FederationError
from suture.data.config import find_site_config, load_server_config, load_site_config
from suture.execution import simulator as start_watch
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import files_of_run, run_job
from suture.execution.study import StudySites
from suture.flare.recipe import export_job, recipe_of
from suture.flare.simulate import simulator_workspace
from suture.models import ModelSpec
from suture.protocol.packing import load
from suture_synthetic.phantom_hospitals import PhantomSites
from world import exit_of, refused, suture

FEW = ["rounds=3", "images=60", "held_out=90", "epochs=1"]

SCAFFOLD = Path(__file__).parents[1] / "strangers" / "scaffold.py"

# Python runs a module of this name at the start of every process, so also in the one that FLARE's server has.
DEAF = """
import suture.flare.compat.bell
suture.flare.compat.bell.ring = lambda sites, fl_ctx: print("lost bell", list(sites), flush=True)
"""


def job(*more: str) -> Job:
    return with_settings(load_job("demo"), [*FEW, *more])


def both(made: Job, folder: Path, threads: int | None = None) -> tuple[Path, Path]:
    """The run folders of a job in the loop and in the simulator, under the same name."""
    same, loop = folder / "same", folder / "loop"
    run_job(made, "local", same).rename(loop)
    return loop, run_job(made, "sim", same, workers=threads)


def close(loop: Path, sim: Path) -> None:
    """The tensors of two states differ by 1e-6 at most."""
    one, two = (load(path).tensors for path in (loop, sim))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)


def equal(loop: Path, sim: Path) -> dict[str, Tensor]:
    """The tensors of the second round's state; they are the same in both runs, as model and figures are."""
    one, two = (load(folder / "state" / "round-000002.safetensors").tensors for folder in (loop, sim))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
    for file in ("model/model.safetensors", "metrics.json"):
        assert (loop / file).read_bytes() == (sim / file).read_bytes(), file
    return one


def test_adapters_and_secure_aggregation_give_what_the_loop_gives(tmp_path: Path) -> None:
    model = ["model.name=timm:test_vit", "model.size=32", "model.train=adapters", "model.weights=random"]
    model += ["model.adapters.rank=4"]
    loop, sim = both(job(*model, "method=vanilla", "secure_aggregation={}"), tmp_path)
    close(*(out / "state" / "round-000003.safetensors" for out in (loop, sim)))
    metrics = [json.loads((out / "metrics.json").read_text()) for out in (loop, sim)]
    assert metrics[0]["auroc"] == pytest.approx(metrics[1]["auroc"], abs=1e-6)
    lines = [json.loads(text) for text in (sim / "history.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["committed"] * 3
    results = list((sim / "flare").rglob("report.html"))
    assert results, "the results are not where FLARE's job download looks"
    assert files_of_run(sim)[1] == [], "`--overwrite` would keep files of the run"


def one_label_an_image(folder: Path) -> Job:
    """CReFF over two hospitals whose images have one class each, in another order at each site.

    They name one of them differently, and give its code.
    """
    for seed, (site, own) in enumerate({"alpha": ("Mass", "Nodule"), "beta": ("Mass", "Hernia")}.items()):
        config, name = write_hospital(folder / "study" / site, own, 40, seed), f"Lump of {site}"
        codes = f'label_type = "multiclass"\n[data.codes]\n"{name}" = "RADLEX:RID3874"\n[privacy]'
        config.write_text(config.read_text().replace("Mass", name).replace("[privacy]", codes))
        table = config.parent / "labels.csv"
        table.write_text(table.read_text().replace("Mass", name).replace(",1,1\n", ",1,0\n"))
    return Job(
        name="small",
        title="classes, CReFF",
        method=conformant("creff"),
        model=ModelSpec("cnn", size=16),
        rounds=2,
        simulation=StudySites(str(folder / "study")),
    )


@pytest.mark.complete
def test_tensors_of_classes_and_the_head_that_predicts_cross_as_in_the_loop(tmp_path: Path) -> None:
    """Also those of one class of two names, and where sites share a process.

    FLARE then starts one for each task of a site, which finds on disk what the one before has stored.
    """
    loop, sim = both(one_label_an_image(tmp_path), tmp_path, threads=1)
    assert equal(loop, sim).keys() > {"channels/retrained", "channels/features"}
    labels = json.loads((sim / "model" / "model.json").read_text())["labels"]
    assert labels == ["Hernia", "Lump Of Alpha", "Nodule"]


def hospitals(folder: Path) -> Path:
    """A study of hospitals as they come; two know positives alone of a class that the two others annotate."""
    sites, study = write_hospitals(folder / "hospitals", 100), folder / "study"
    suture("init", study, *(f"--site={name}={path}" for name, path in sites.items()), "--yes")
    (study / "labels.toml").write_text('[parents]\nCardiomegaly = ["Nodule"]\n')
    for config in study.glob("*/suture.toml"):
        text = config.read_text()
        config.write_text(text.replace("[data]", '[data]\natlas = "../labels.toml"\nancestors = true', 1))
    return study


@pytest.mark.complete
def test_channels_of_an_outside_method_cross_as_in_the_loop_though_no_bell_rings(tmp_path: Path) -> None:
    """Over hospitals as they come; sites then find their tasks by polling."""
    packages = tmp_path / "installed"
    with installed(packages, "stranger", "1.0", "scaffold", "stranger_scaffold:Scaffold", SCAFFOLD):
        (packages / "sitecustomize.py").write_text(DEAF)
        settings = ["method.local.optimiser=sgd", "method.local.momentum=0", "method=scaffold"]
        settings += ["method.server_lr=0.9", "rounds=2"]
        made = with_settings(load_job(hospitals(tmp_path)), settings)
        loop, sim = both(made, tmp_path)
    state = equal(loop, sim)
    control = [tensor for name, tensor in state.items() if name.startswith("channels/control/")]
    assert control
    assert all(bool(tensor.any()) for tensor in control)
    method = json.loads((sim / "run.json").read_text())["method"]
    assert (method["name"], method["hyperparameters"]["server_lr"]) == ("scaffold", 0.9)
    notes = [json.loads((out / "run.json").read_text())["notes"] for out in (loop, sim)]
    assert notes[0] == notes[1]
    assert any(set(note["values"].get("sites", ())) == {"josefsklinik", "northfield"} for note in notes[0])
    assert "lost bell" in (sim / "flare.log").read_text(), "no bell was lost"


def stop_once(site: str) -> None:
    """Stop the first process that FLARE's simulator starts for a site below this one."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                if "--client" in words and words[words.index("--client") + 1] == site:
                    process.suspend()
                    return
        time.sleep(0.05)


@pytest.mark.complete
def test_neither_a_site_that_hangs_at_its_start_nor_one_that_flare_cannot_decode_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    popen = subprocess.Popen

    def hostile(command: list[str], **how: Any) -> Any:
        return popen([command[0], hostile_site.__file__, *command[3:]], **how)

    monkeypatch.setattr("suture.execution.simulator.subprocess.Popen", hostile)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(start_watch, "STILL", 8)
    threading.Thread(target=stop_once, args=["lakeside"], daemon=True).start()
    out = run_job(job("rounds=2", "min_sites=2", "selection=last"), "sim", tmp_path / "r")
    assert json.loads((out / "run.json").read_text())["status"] == "finished"

    # The simulator was started again without the site that hung, and the run then had all three.
    [said] = [line for name, _, line in caplog.record_tuples if name == "suture.execution.simulator"]
    assert said.startswith("lakeside: ")

    # What the hostile site sends costs its own updates.
    lines = [json.loads(text) for text in (out / "history.jsonl").read_text().splitlines()]
    sites = [line["sites"] for line in lines]
    reasons = [line.pop(hostile_site.HOSTILE)["reason"] for line in sites]
    assert reasons == ["the answer could not be decoded (ValueError)", "FLARE answered UNSAFE_JOB"]
    assert {site for line in sites for site in line} == {"lakeside", "northfield"}
    assert {facts["status"] for line in sites for facts in line.values()} == {"accepted"}


@pytest.mark.complete
def test_failure_in_the_simulator_tells_the_sites_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PhantomSites.prepare

    def spoil(self: PhantomSites, folder: Path, *rest: object) -> list[str]:
        sites = prepare(self, folder, *rest)  # type: ignore[arg-type]
        table = folder / "northfield" / "labels.csv"
        table.write_text(table.read_text().replace("Nodule", "Cardiomegaly", 1))
        return sites

    monkeypatch.setattr(PhantomSites, "prepare", spoil)
    with refused("northfield", "'Cardiomegaly' and 'Cardiomegaly'", by=FederationError):
        run_job(job(), "sim", tmp_path / "r")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["status"] == "failed"


@pytest.mark.complete
def test_ctrl_c_stops_everything_and_resume_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """None of the processes imports a module of the working directory, where `-m` lets Python look first."""
    out, imported = tmp_path / "same", plant(tmp_path)
    # Enough rounds that the interrupt always comes before the last one.
    settings = [part for s in [*FEW, "rounds=20"] for part in ("--set", s)]
    command = [sys.executable, "-m", "suture", "run", "demo", "--env", "sim", "--out", str(out), *settings]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    events = out / "events.jsonl"
    while not (events.exists() and '"committed"' in events.read_text()):
        assert process.poll() is None, imported.exists() and imported.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert not imported.exists(), imported.read_text()
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    left = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True, check=False).stdout
    assert not left.strip(), f"processes are left: {left}"
    reached = max(int(path.stem.rpartition("-")[2]) for path in (out / "state").glob("round-*.safetensors"))
    same = job(f"rounds={reached + 1}")
    model = (run_job(same, "local", out, resume=True) / "model" / "model.safetensors").read_bytes()
    out.rename(tmp_path / "cut")
    run_job(same, "local", out)
    assert model == (out / "model" / "model.safetensors").read_bytes()
    assert torch.get_num_threads() == 1


# FLARE's own simulator, with what `suture export --simulator` writes beside a job


def listed(local: Path) -> Any:
    """The class_allow_list of a simulator's workspace."""
    return json.loads((local / "resources.json.default").read_text())["class_allow_list"]


def test_each_party_finds_its_own_configuration_in_the_one_local_folder(tmp_path: Path) -> None:
    own = tmp_path / "weights" / "own.pt"
    own.parent.mkdir()
    own.write_bytes(b"weights")
    given = replace(SMALL, model=ModelSpec("cnn", size=16, weights=str(own)))
    job, sites = simulator_workspace(given, tmp_path / "w")
    assert job == given
    local = tmp_path / "w" / "small" / "local"
    assert sites
    for name in sites:
        path = find_site_config(name, local.parent)
        assert path == local / "sites" / name / "suture.toml"
        config = load_site_config(path)
        # FLARE copies `local` for each party, and deletes the copies: the state goes with them, data stay.
        assert config.storage.state == path.parent / "state"
        assert config.data.table.is_relative_to(tmp_path / "w" / "sites" / name)
        assert config.storage.cache.is_relative_to(tmp_path / "w" / "sites" / name)
    server = load_server_config(find_site_config("server", local.parent))
    assert server.held_out
    assert (
        server.storage.files / "own.pt"
    ).read_bytes() == b"weights"  # to all, of a file that the job names
    assert "suture.flare." in listed(local)


@pytest.mark.parametrize(
    ("job", "folder", "named"),
    [
        (SMALL, "used", "used"),
        (SMALL, "with space", "--simulator"),
        (replace(SMALL, simulation=None), "w", "small"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is_written(
    job: Any, folder: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with refused(named, by=ConfigError):
        simulator_workspace(job, tmp_path / folder)
    places = ("--out", tmp_path / "o", "--simulator", tmp_path / "w")
    assert exit_of(monkeypatch, "export", "demo", *places, "--sites", "a") == 2  # they are the job's
    assert sorted(tmp_path.rglob("*")) == before


def given_of(job: Path) -> dict[str, dict[str, Any]]:
    """The files that each party gets of a job, and what FLARE is told of it; it orders tasks as it likes."""

    def content(path: Path) -> Any:
        return json.loads(path.read_text(), object_hook=lambda d: {**d, "tasks": sorted(d.get("tasks", ()))})

    meta = json.loads((job / "meta.json").read_text())
    return {"": meta} | {
        party: {str(f.relative_to(job / app)): content(f) for f in (job / app).rglob("*") if f.is_file()}
        for app, parties in meta.pop("deploy_map").items()
        for party in parties
    }


def test_a_recipe_runs_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SimEnv` starts FLARE's simulator with the workspace and the sites, as `nvflare simulator` does."""
    job, sites = simulator_workspace(SMALL, tmp_path / "w")
    parser, started = argparse.ArgumentParser(), []
    define_simulator_parser(parser)

    def start(command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        words = parser.parse_args(command[3:])
        started.append((words.workspace, words.clients, words.threads, given_of(Path(words.job_folder))))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("nvflare.job_config.fed_job_config.subprocess.Popen", start)
    run = recipe_of(job, "trial", sites).execute(SimEnv(clients=sites, workspace_root=str(tmp_path / "w")))
    assert run.get_result() == str(tmp_path / "w" / "small")
    parties = given_of(export_job(job, tmp_path / "o", "trial", sites))
    assert parties.keys() == {"", "server", *sites}
    assert started == [(run.get_result(), ",".join(sites), len(sites), parties)]
    assert "suture.flare." in listed(tmp_path / "w/small/local"), "FLARE has written its own list over ours"


@pytest.mark.complete
def test_flares_simulator_gives_what_the_loop_gives(tmp_path: Path) -> None:
    settings = [*FEW, "method=fedmas", "model.projection=128", "method.prior_view=plain"]
    words = ("export", "demo", "--out", tmp_path / "o", "--simulator", tmp_path / "w")
    said = suture(*words, *(word for s in settings for word in ("--set", s)))
    (command,) = [line.removeprefix("run it: ") for line in said.splitlines() if "run it" in line]
    program = [sys.executable, *shlex.split(command)[1:]]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "deprecated" not in (ran.stdout + ran.stderr).lower()
    found = tmp_path / "w/demo/server/simulate_job"
    loop = run_job(with_settings(load_job("demo"), settings), "local", tmp_path / "loop")
    auroc, expected = (json.loads((out / "metrics.json").read_text())["auroc"] for out in (found, loop))
    assert auroc == pytest.approx(expected, abs=1e-6)
    (state,) = found.parent.glob("local/sites/server/state/experiments/*/state/round-000003.safetensors")
    close(loop / "state" / state.name, state)
