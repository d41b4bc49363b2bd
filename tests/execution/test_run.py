"""Running a job on this machine: its folder, a second run, an interruption, a failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from suture.core.errors import ConfigError, FederationError
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import begin_here, run_job
from suture.federation.server.record import Record
from suture.flare.recipe import export_job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_synthetic.phantom_hospitals import PhantomSites

JOB = Job(
    name="small",
    title="a small federation",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=16)),
    model=ModelSpec("cnn", size=32),
    rounds=2,
    simulation=PhantomSites(images=40, held_out=60),
)


def run(job: Job, out: Path, *, resume: bool = False, overwrite: bool = False) -> Path:
    return run_job(job, "local", out, resume=resume, overwrite=overwrite)


@pytest.mark.complete
def test_leaves_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job(JOB, "local", tmp_path / "r", progress=True) == tmp_path / "r"
    report = tmp_path / "r" / "report.html"
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert facts["status"] == "finished"
    assert facts["threads"] == {"server": 1, "harbor": 1, "lakeside": 1, "northfield": 1}
    assert facts["computed_on"] == dict.fromkeys(facts["sites"], "cpu, float32")
    assert set(facts["versions"]) >= {"suture", "torch", "nvflare"}
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert set(metrics["auroc"]) == set(facts["labels"])
    assert set(metrics["groups"]) == {"shared", "unique"}
    low, high = metrics["mean_interval"]
    assert low < metrics["mean_auroc"] < high
    assert 0 < metrics["loss"] < 2
    page = report.read_text()
    assert f"mean AUROC, 95 % CI {low:.3f}–{high:.3f}" in page
    assert f"its cross-entropy there is {metrics['loss']:.3f}" in page
    lines = (tmp_path / "r" / "history.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    assert "round 2/2" in capsys.readouterr().out


@pytest.mark.complete
def test_paths_may_be_relative_and_nothing_is_printed_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = with_settings(JOB, ["rounds=1"])
    assert run_job(small, out="runs/../mine") == tmp_path / "mine"
    unnamed = run_job(small)
    assert unnamed.parent == tmp_path / "runs"
    assert unnamed.name.startswith("small-")
    for folder in (tmp_path / "mine", unnamed):
        assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert capsys.readouterr().out == ""


def test_an_unknown_environment_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown environment.*'poc'.*local, sim"):
        run_job(JOB, "poc", tmp_path / "r")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


OWN_METHOD = """
from dataclasses import dataclass, replace
from typing import ClassVar
from suture.methods.surgical import SurgicalAggregation
from test_run import JOB

@dataclass(frozen=True, kw_only=True)
class Mine(SurgicalAggregation):
    name: ClassVar[str] = {name!r}

JOB = replace(JOB, rounds=1, method=Mine(local=JOB.method.local))
"""


@pytest.mark.complete
@pytest.mark.parametrize("name", ["mine", "surgical"])
def test_a_method_of_a_job_file_runs_in_the_loop_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even under the name of a registered method, which the other processes would run in its place."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "job.py").write_text(OWN_METHOD.format(name=name))
    job = load_job(tmp_path / "job.py")
    with pytest.raises(ConfigError, match=r"Mine.* in no installed package .*'suture\.methods'"):
        run_job(job, "sim", tmp_path / "r")
    with pytest.raises(ConfigError, match=r"suture\.methods"):
        export_job(job, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    assert (run_job(job, "local", tmp_path / "r") / "model" / "model.safetensors").is_file()


@pytest.mark.complete
def test_second_run_into_the_same_folder_is_refused_unless_told(tmp_path: Path) -> None:
    out = tmp_path / "r"
    run(JOB, out)
    before = (out / "metrics.json").read_bytes()
    with pytest.raises(ConfigError, match="another --out, or continue it with --resume"):
        run(JOB, out)
    with pytest.raises(ConfigError, match="all its 2 rounds"):
        run(JOB, out, resume=True)
    assert (out / "metrics.json").read_bytes() == before
    before = (out / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"was begun with seed=\d+, and this job has seed=77"):
        run(with_settings(JOB, ["rounds=3", "seed=77"]), out, resume=True)
    with pytest.raises(ConfigError, match=r"begun with model.size=\d+, and this job has model.size=48"):
        run(with_settings(JOB, ["rounds=3", "model.size=48"]), out, resume=True)
    assert (out / "run.json").read_bytes() == before
    run(with_settings(JOB, ["rounds=3"]), out, resume=True)
    assert len((out / "history.jsonl").read_text().splitlines()) == 3
    run(with_settings(JOB, ["rounds=1"]), out, overwrite=True)
    assert len((out / "history.jsonl").read_text().splitlines()) == 1


def test_a_folder_of_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not a run of suture"):
            run(JOB, tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ConfigError, match="no run to resume; name the folder of one with --out"):
        run(JOB, tmp_path / "nothing", resume=True)


@pytest.mark.complete
def test_interrupted_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    job = with_settings(JOB, ["rounds=3"])

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("suture.federation.server.server.Server.close_validation", stop)
        with pytest.raises(KeyboardInterrupt):
            run(job, out)
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert (out / "report.html").is_file()
    run(job, out, resume=True)
    run(job, tmp_path / "whole")
    models = [folder / "model" / "model.safetensors" for folder in (out, tmp_path / "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_a_full_disk_has_ended_does_not_go_on(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    record = Record(tmp_path)
    record.update(job="small", status="running", error=None, rounds=2)
    monkeypatch.setattr(os, "replace", full)
    record.give_up(status, "the disk is full")
    assert Record(tmp_path).run == {"job": "small", "status": "failed", "error": None, "rounds": 2}


@pytest.mark.complete
def test_failure_tells_the_sites_own_error_and_no_page_quotes_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PhantomSites.prepare

    def spoil(self: PhantomSites, folder: Path, *rest: object) -> list[str]:
        sites = prepare(self, folder, *rest)  # type: ignore[arg-type]
        table = folder / "lakeside" / "labels.csv"
        *rows, last = table.read_text().splitlines()
        table.write_text("\n".join([*rows, f"{last.rpartition(',')[0]},Kowalski"]))
        return sites

    monkeypatch.setattr(PhantomSites, "prepare", spoil)
    with pytest.raises(FederationError, match=r"lakeside.*labels\.csv.*'Kowalski'"):
        run(JOB, tmp_path / "r")
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert facts["status"] == "failed"
    assert "lakeside" in facts["error"]
    quoting = [path.name for path in (tmp_path / "r").rglob("*.*") if b"Kowalski" in path.read_bytes()]
    assert sorted(quoting) == ["errors.jsonl", "labels.csv"]


@pytest.mark.complete
def test_sites_or_a_schedule_that_cannot_be_made_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PhantomSites, folder: Path, *rest: object) -> list[str]:
        folder.mkdir(exist_ok=True)
        raise ConfigError("labels.csv: row 3 names no image")

    with monkeypatch.context() as patched:
        patched.setattr(PhantomSites, "prepare", fail)
        with pytest.raises(ConfigError, match="row 3"):
            run(JOB, tmp_path / "r")
    with pytest.raises(ConfigError, match="patience"):
        run(with_settings(JOB, ["selection=last", "patience=3"]), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    out = tmp_path / "r"
    run(with_settings(JOB, ["rounds=1"]), out)
    before = (out / "run.json").read_bytes()
    monkeypatch.setattr(PhantomSites, "prepare", fail)
    with pytest.raises(ConfigError, match="row 3"):
        run(with_settings(JOB, ["rounds=2"]), out, resume=True)
    assert (out / "run.json").read_bytes() == before


def test_an_error_of_a_methods_own_code_ends_the_run_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug in aggregate")

    monkeypatch.setattr(SurgicalAggregation, "aggregate", broken)
    with pytest.raises(RuntimeError, match="a bug in aggregate"):
        run(JOB, tmp_path / "r")
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (facts["status"], facts["error"]) == ("failed", "RuntimeError: a bug in aggregate")
    assert (tmp_path / "r" / "report.html").exists()


@pytest.mark.complete
def test_a_damaged_run_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    begin_here(folder)
    (folder / ".preparing").rename(folder / "run.json")
    (folder / "run.json").write_text('{"job": ')
    with pytest.raises(ConfigError, match=r"run\.json is damaged .* --out"):
        run(JOB, folder)
    assert run(JOB, folder, overwrite=True) == folder
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; choose another --out"):
        run(JOB, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [("import nothing_of_this_name", "ModuleNotFoundError: .*line 1"), ("JOB = (", "SyntaxError")],
)
def test_a_job_file_that_fails_names_its_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"job\.py cannot be run: {says}"):
        load_job(path)


@pytest.mark.complete
def test_a_locked_folder_is_refused(tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "r"
    run(with_settings(JOB, ["rounds=1"]), out)
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is using"):
            run(JOB, out, overwrite=True)
        with pytest.raises(ConfigError, match="another run is using"):
            run(JOB, out, resume=True)
