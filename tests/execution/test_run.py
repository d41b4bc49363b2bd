"""Running a job on this machine: what it leaves, a second run, an interruption, a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from small_job import SMALL
from suture.core.errors import ConfigError, FederationError
from suture.execution.job import load_job, with_settings
from suture.execution.run import PREPARING, run_job
from suture.federation.server.record import Record
from suture.flare.recipe import export_job
from suture.methods.surgical import SurgicalAggregation
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused

ONE = replace(SMALL, rounds=1)
MODEL = Path("model/model.safetensors")


def facts(out: Path, name: str = "run") -> Any:
    return json.loads((out / f"{name}.json").read_text())


def lines(out: Path) -> int:
    return len((out / "history.jsonl").read_text().splitlines())


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


@pytest.mark.complete
def test_leaves_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = replace(SMALL, simulation=PhantomSites(images=40, held_out=60))
    out = run_job(job, "local", tmp_path / "r", progress=True)
    assert out == tmp_path / "r"
    run, metrics = facts(out), facts(out, "metrics")
    assert run["status"] == "finished"
    assert run["threads"] == {"server": 1, "harbor": 1, "lakeside": 1, "northfield": 1}
    assert run["computed_on"] == dict.fromkeys(run["sites"], "cpu, float32")
    assert set(run["versions"]) >= {"suture", "torch", "nvflare"}
    assert set(metrics["auroc"]) == set(run["labels"])
    assert set(metrics["groups"]) == {"shared", "unique"}
    low, high = metrics["mean_interval"]
    assert low < metrics["mean_auroc"] < high
    assert 0 < metrics["loss"] < 2
    page = (out / "report.html").read_text()
    assert f"{low:.3f}–{high:.3f}" in page
    assert f"{metrics['loss']:.3f}" in page
    assert lines(out) == 2
    assert (out / MODEL).is_file()
    assert "round 2/2" in capsys.readouterr().out


@pytest.mark.complete
def test_paths_may_be_relative_and_nothing_is_printed_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_job(ONE, out="runs/../mine") == tmp_path / "mine"
    unnamed = run_job(ONE)
    assert (unnamed.parent, unnamed.name[:6]) == (tmp_path / "runs", "small-")
    for folder in (tmp_path / "mine", unnamed):
        assert facts(folder)["status"] == "finished"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"env": "poc"}, ["'poc'", "local, sim"]),
        ({"workers": 0}, ["--workers 0"]),
        ({"settings": ["selection=last", "patience=3"]}, ["patience"]),
        (
            {"env": "sim", "workers": 2, "settings": ["method=vanilla", "secure_aggregation={}"]},
            ["--workers 2"],
        ),
        ({"fails": ConfigError("row 3 names no image")}, ["row 3"]),
    ],
)
def test_what_cannot_run_leaves_no_folder(
    how: dict[str, Any], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"settings": [], "fails": None, **how}
    job = with_settings(SMALL, given.pop("settings"))
    if error := given.pop("fails"):
        monkeypatch.setattr(PhantomSites, "prepare", raising(error))
    with refused(*named, by=ConfigError):
        run_job(job, out=tmp_path / "r", **given)
    assert not list(tmp_path.iterdir())


OWN_METHOD = """
from dataclasses import dataclass, replace
from typing import ClassVar
from suture.methods.surgical import SurgicalAggregation
from small_job import SMALL

@dataclass(frozen=True, kw_only=True)
class Mine(SurgicalAggregation):
    name: ClassVar[str] = {name!r}

JOB = replace(SMALL, rounds=1, method=Mine(local=SMALL.method.local))
"""


@pytest.mark.complete
@pytest.mark.parametrize("name", ["mine", "surgical"])
def test_a_method_of_a_job_file_runs_in_the_loop_only(name: str, tmp_path: Path) -> None:
    """Even under the name of a registered method, which the other processes would run in its place."""
    (tmp_path / "job.py").write_text(OWN_METHOD.format(name=name))
    job = load_job(tmp_path / "job.py")
    for elsewhere in (
        lambda: run_job(job, "sim", tmp_path / "r"),
        lambda: run_job(job, "local", tmp_path / "r", workers=2),
        lambda: export_job(job, tmp_path / "exported"),
    ):
        with refused("Mine", "'suture.methods'", by=ConfigError):
            elsewhere()
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    assert (run_job(job, "local", tmp_path / "r") / MODEL).is_file()


@pytest.mark.complete
def test_a_finished_run_goes_on_only_as_it_was_begun_and_is_replaced_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run_job(SMALL, out=tmp_path / "r")
    before = [(out / name).read_bytes() for name in ("metrics.json", "run.json")]
    for settings, how, named in (
        ([], {}, ["--out", "--resume"]),
        ([], {"resume": True}, ["2 rounds"]),
        (["rounds=3", "seed=77"], {"resume": True}, ["seed=1,", "seed=77"]),
        (["rounds=3", "model.size=48"], {"resume": True}, ["model.size=16", "model.size=48"]),
    ):
        with refused(*named, by=ConfigError):
            run_job(with_settings(SMALL, settings), out=out, **how)
    with monkeypatch.context() as patched:
        patched.setattr(PhantomSites, "prepare", raising(ConfigError("row 3")))
        with refused("row 3", by=ConfigError):
            run_job(replace(SMALL, rounds=3), out=out, resume=True)
    assert [(out / name).read_bytes() for name in ("metrics.json", "run.json")] == before
    run_job(replace(SMALL, rounds=3), out=out, resume=True)
    assert lines(out) == 3
    run_job(ONE, out=out, overwrite=True)
    assert lines(out) == 1


@pytest.mark.complete
def test_interrupted_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        closed = "suture.federation.server.server.Server.close_validation"
        patched.setattr(closed, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run_job(SMALL, out=tmp_path / "r")
    assert facts(tmp_path / "r")["status"] == "interrupted"
    assert (tmp_path / "r" / "report.html").is_file()
    models = [
        run_job(SMALL, out=tmp_path / name, resume=resume) / MODEL
        for name, resume in (("r", True), ("whole", False))
    ]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_run_that_a_full_disk_has_ended_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in ("failed", "interrupted"):
        record = Record(tmp_path)
        record.update(job="small", status="running", error=None, rounds=2)
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", raising(OSError(28, "No space left on device")))
            record.give_up(status, "the disk is full")
        assert Record(tmp_path).run == {"job": "small", "status": "failed", "error": None, "rounds": 2}


@pytest.mark.complete
def test_failure_tells_the_sites_own_error_and_no_page_quotes_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PhantomSites.prepare

    def spoil(self: PhantomSites, folder: Path, *rest: Any) -> list[str]:
        sites = prepare(self, folder, *rest)
        table = folder / "lakeside" / "labels.csv"
        *rows, last = table.read_text().splitlines()
        table.write_text("\n".join([*rows, f"{last.rpartition(',')[0]},Kowalski"]))
        return sites

    monkeypatch.setattr(PhantomSites, "prepare", spoil)
    out = tmp_path / "r"
    with refused("lakeside", "labels.csv", "'Kowalski'", by=FederationError):
        run_job(SMALL, out=out)
    assert facts(out)["status"] == "failed"
    assert "lakeside" in facts(out)["error"]
    quoting = [path.name for path in out.rglob("*.*") if b"Kowalski" in path.read_bytes()]
    assert sorted(quoting) == ["errors.jsonl", "labels.csv"]


def test_an_error_of_a_methods_own_code_ends_the_run_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SurgicalAggregation, "aggregate", raising(RuntimeError("a bug in aggregate")))
    with refused("a bug in aggregate", by=RuntimeError):
        run_job(SMALL, out=tmp_path / "r")
    run = facts(tmp_path / "r")
    assert (run["status"], run["error"]) == ("failed", "RuntimeError: a bug in aggregate")
    assert (tmp_path / "r" / "report.html").exists()


# Python runs a module of this name at the start of every process: FLARE's simulator is then still importing.
IMPORTING = """
import signal, sys
if "suture.flare.simulate" in sys.orig_argv:
    signal.pause()
"""


def below(pid: int) -> list[psutil.Process]:
    """The processes below another one, but for what cleans up after multiprocessing and ends by itself."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += [] if "resource_tracker" in " ".join(one.cmdline()) else [one]
    return found


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.complete
@pytest.mark.parametrize(
    ("words", "sites"),
    [("--env sim", 0), ("--env sim", 1), ("--env local --workers 2", 1)],
    ids=["while it imports", "while images are drawn", "with workers"],
)
def test_ctrl_c_before_the_first_round_leaves_nothing(words: str, sites: int, tmp_path: Path) -> None:
    """No process, no folder and no temporary file."""
    out, temporary, start = (tmp_path / name for name in ("r", "tmp", "start"))
    temporary.mkdir()
    start.mkdir()
    (start / "sitecustomize.py").write_text(IMPORTING)
    demo = f"-m suture run demo --rounds 1 --set images=1500 {words} --out {out}"
    path = os.pathsep.join([str(start), os.getenv("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *demo.split()],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path},
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    while not (started and (out / PREPARING).exists() and len(list(out.glob("sites/[a-z]*"))) >= sites):
        assert process.poll() is None
        time.sleep(0.02)
        started = below(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait()
    assert process.returncode == 130
    assert not [one.cmdline() for one in started if lives(one)]
    assert not out.exists()
    assert not list(temporary.iterdir())
