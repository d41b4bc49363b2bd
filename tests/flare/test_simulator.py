"""FLARE's simulator gives what the loop gives; these start processes and take their time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hostile_site
import psutil
import pytest
import torch

from official import Report, write_openi
from rounds import conformant
from small_hospitals import write_hospital
from suture.core.errors import FederationError
from suture.learning.finetuning import FineTuning
from suture.models import ModelSpec
from suture.protocol.packing import load
from suture.simulation import PhantomSites, StudySites, start_watch
from suture.simulation.job import Job, load_job, with_settings
from suture.simulation.run import run_job
from suture.simulation.run_files import files_of_run
from suture_papers.metafl.pmfl import PMFL
from suture_papers.metafl.single_target import SingleTargetSites

pytestmark = pytest.mark.flare

SMALL = ["rounds=3", "images=60", "held_out=90", "epochs=1"]

SECURE_ADAPTERS = [
    "model.name=timm:test_vit",
    "model.size=32",
    "model.train=adapters",
    "model.adapters.rank=4",
    "method=vanilla",
    "secure_aggregation={}",
]

FEDMAS = ["method=fedmas", "model.projection=128", "method.prior_view=plain"]


def job(*more: str) -> Job:
    return with_settings(load_job("demo"), [*SMALL, *more])


def run(env: str, out: Path, settings: Sequence[str] = ()) -> Path:
    run_job(job(*settings), env, out, resume=False, overwrite=False, workers=None)
    return out


def both(made: Job, folder: Path, threads: int | None = None) -> tuple[Path, Path]:
    """The run folders of a job in the loop and in the simulator, under the same name."""
    same, loop = folder / "same", folder / "loop"
    run_job(made, "local", same, resume=False, overwrite=False, workers=None)
    same.rename(loop)
    run_job(made, "sim", same, resume=False, overwrite=False, workers=threads)
    return loop, same


def furthest(one: Path, two: Path, rounds: int) -> float:
    """The largest difference of any number in the last committed state."""
    a, b = (load(out / "state" / f"round-{rounds:06}.safetensors").tensors for out in (one, two))
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel())


@pytest.mark.parametrize(
    "settings", [FEDMAS, SECURE_ADAPTERS], ids=["Fed-MAS", "adapters, secure aggregation"]
)
def test_simulator_equals_the_loop(settings: list[str], tmp_path: Path) -> None:
    loop, sim = both(job(*settings), tmp_path)
    assert furthest(loop, sim, 3) <= 1e-6
    metrics = [json.loads((out / "metrics.json").read_text()) for out in (loop, sim)]
    assert metrics[0]["auroc"] == pytest.approx(metrics[1]["auroc"], abs=1e-6)
    lines = [json.loads(text) for text in (sim / "history.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["committed"] * 3
    results = list((sim / "flare").rglob("report.html"))
    assert results, "the results are not where FLARE's job download looks"
    assert files_of_run(sim)[1] == [], "`--overwrite` would keep files of the run"


def reports(folder: Path) -> Job:
    """PMFL of a small text model over two silos of three findings."""
    findings = ("Calcified Granuloma", "Mass", "Pulmonary Edema")
    written: list[Report] = [
        (f"It shows {findings[i % 3].lower()}.", "", (f"{findings[i % 3]}/mild",))
        if i % 4 == 0
        else ("Clear.", "", ("normal",))
        for i in range(120)
    ]
    root = str(write_openi(folder / "openi", written).parent)
    words = ("It", "shows", "calcified", "granuloma", "mass", "pulmonary", "edema", "Clear", ".")
    return Job(
        name="small",
        title="reports, PMFL",
        method=PMFL(batches=2),
        model=ModelSpec("lstm", vocabulary=words),
        rounds=3,
        selection="last",
        simulation=SingleTargetSites(order=findings, training=findings[:2], targets=findings[2:], root=root),
        finetuning=FineTuning(runs=1, epochs=1, batch_size=8, test=0.3),
    )


def test_gradients_of_half_a_text_model_cross_as_in_the_loop(tmp_path: Path) -> None:
    loop, sim = both(reports(tmp_path), tmp_path)
    assert furthest(loop, sim, 3) <= 1e-6
    place = "sites/mass/state/experiments/same/round-000003.safetensors"
    one, two = (load(folder / place).tensors for folder in (loop, sim))
    assert one.keys() == two.keys() >= {"fixed/head.weight", "fixed/backbone.embedding.weight"}
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)
    assert (loop / "tuned.json").read_bytes() == (sim / "tuned.json").read_bytes()


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


def test_tensors_of_classes_and_the_head_that_predicts_cross_as_in_the_loop(tmp_path: Path) -> None:
    """Also those of one class of two names, and where sites share a process.

    FLARE then starts one for each task of a site, which finds on disk what the one before has stored.
    """
    loop, sim = both(one_label_an_image(tmp_path), tmp_path, threads=1)
    states = [load(folder / "state" / "round-000002.safetensors").tensors for folder in (loop, sim)]
    assert {"channels/retrained", "channels/features"} < states[0].keys()
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
    for file in ("model/model.safetensors", "metrics.json"):
        assert (loop / file).read_bytes() == (sim / file).read_bytes()
    labels = json.loads((sim / "model" / "model.json").read_text())["labels"]
    assert labels == ["Hernia", "Lump Of Alpha", "Nodule"]


def test_a_site_that_flare_cannot_decode_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def hostile(command: list[str], **how: Any) -> Any:
        return start([command[0], hostile_site.__file__, *command[3:]], **how)

    monkeypatch.setattr("suture.simulation.simulator.subprocess.Popen", hostile)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    out = run("sim", tmp_path / "r", settings=["rounds=2", "min_sites=2", "selection=last"])
    lines = [json.loads(text) for text in (out / "history.jsonl").read_text().splitlines()]
    sites = [line["sites"] for line in lines]
    reasons = [line.pop(hostile_site.HOSTILE)["reason"] for line in sites]
    assert reasons == ["the answer could not be decoded (ValueError)", "FLARE answered UNSAFE_JOB"]
    assert {facts["status"] for line in sites for facts in line.values()} == {"accepted"}


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
    with pytest.raises(FederationError, match=r"northfield.*'Cardiomegaly' and 'Cardiomegaly'") as caught:
        run("sim", tmp_path / "r")
    assert "Traceback" not in str(caught.value)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["status"] == "failed"


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


def test_a_site_that_hangs_at_its_start_is_noticed_and_the_simulator_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_watch, "STILL", 8)
    threading.Thread(target=stop_once, args=["lakeside"], daemon=True).start()
    out = run("sim", tmp_path / "r", settings=["rounds=1"])
    [said] = [line for name, _, line in caplog.record_tuples if name == "suture.simulation.simulator"]
    lost = "lakeside: its process in FLARE's simulator did not fetch a task before the first round"
    assert said == f"{lost}; it starts again"
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


def test_ctrl_c_stops_everything_and_resume_ends_with_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "same"
    # Enough rounds that the interrupt always comes before the last one.
    small = [*SMALL, "rounds=20"]
    settings = [part for s in small for part in ("--set", s)]
    command = [
        sys.executable,
        "-m",
        "suture",
        "run",
        "demo",
        "--env",
        "sim",
        "--out",
        str(out),
        *settings,
    ]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    events = out / "events.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (events.exists() and '"committed"' in events.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    left = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True, check=False).stdout
    assert not left.strip(), f"processes are left: {left}"
    reached = max(int(path.stem.rpartition("-")[2]) for path in (out / "state").glob("round-*.safetensors"))
    same = with_settings(load_job("demo"), [*SMALL, f"rounds={reached + 1}"])
    run_job(same, "local", out, resume=True, overwrite=False, workers=None)
    model = (out / "model" / "model.safetensors").read_bytes()
    out.rename(tmp_path / "cut")
    run_job(same, "local", out, resume=False, overwrite=False, workers=None)
    assert model == (out / "model" / "model.safetensors").read_bytes()
    assert torch.get_num_threads() == 1
