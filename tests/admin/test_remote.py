"""Bringing a remote run's results here: whole, in its own folder, or an error that says why."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from startup_kits import MakeKit

from suture.core.errors import ConfigError, DataError, FederationError
from suture.execution.job import load_job
from suture.federation.ownership import Submitter, claim
from suture.federation.server.record import Record, describe
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, SHARED_WITH
from suture.flare.kit import Kit, read_kit
from suture.methods.surgical import SurgicalAggregation
from suture_admin.job_commands import status
from suture_admin.remote import Submission, Tail, download, state, submit

KIT = Kit(Path("nowhere"), "admin", "admin@trial.org", "trial", "localhost", 8002)
META = {"status": "FINISHED:COMPLETED", "submitter_role": "lead", "job_deploy_detail": ["server: OK"]}


class Remote:
    """A server whose job has left a workspace."""

    def __init__(self, workspace: Path, meta: dict[str, Any]) -> None:
        self.workspace, self._meta = workspace, meta

    def meta(self, job_id: str) -> dict[str, Any]:
        return self._meta

    def download(self, job_id: str, folder: Path) -> Path:
        return Path(shutil.copytree(self.workspace, folder / job_id / "workspace"))

    def metas(self) -> list[dict[str, Any]]:
        return [{"job_id": "first", EXPERIMENT: "demo-1", SHARED_WITH: []}, {"job_id": "j", **self._meta}]

    def error_logs(self, job_id: str) -> dict[str, str]:
        return {}


@pytest.fixture
def done(tmp_path: Path, tiny: Any) -> Path:
    """A finished run, as it lies at the server."""
    run = tiny(SurgicalAggregation()).run("demo-1").record.folder
    workspace = tmp_path / "workspace"
    for name in ("run.json", "history.jsonl", "events.jsonl", "metrics.json", "report.html"):
        workspace.mkdir(exist_ok=True)
        shutil.copy2(run / name, workspace / name)
    shutil.copytree(run / "model", workspace / "model")
    (workspace / "log.txt").write_text("the log")
    return workspace


@pytest.mark.complete
def test_results_lie_where_a_run_of_the_simulator_leaves_them(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = download(Remote(done, META), KIT, "j", None)  # type: ignore[arg-type]
    assert out == Path("runs") / "demo-1"
    for name in ("report.html", "metrics.json", "history.jsonl", "model/model.safetensors"):
        assert (out / name).is_file()
    assert (out / "metrics.json").read_bytes() == (done / "metrics.json").read_bytes()


@pytest.mark.complete
def test_a_followed_run_keeps_its_environment_and_hears_the_end(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    Record(out).update(env="prod", flare_job="j", experiment="demo-1")
    events = [json.loads(line) for line in (done / "events.jsonl").read_text().splitlines()]
    tail = Tail(out)
    tail.take(0, events[:3])
    download(Remote(done, META), KIT, "j", out, tail)  # type: ignore[arg-type]
    assert [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()] == events
    run = json.loads((out / "run.json").read_text())
    assert (run["env"], run["flare_job"], run["status"]) == ("prod", "j", "finished")
    assert "prod" in (out / "report.html").read_text()


@pytest.mark.complete
def test_another_experiments_folder_is_not_touched(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    Record(out).update(experiment="demo-0")
    before = (out / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="choose another --out"):
        download(Remote(done, META), KIT, "j", out)  # type: ignore[arg-type]
    assert sorted(path.name for path in out.iterdir()) == ["run.json"]
    assert (out / "run.json").read_bytes() == before


def test_a_job_that_never_began_fails_with_the_reason_and_keeps_the_log(tmp_path: Path, tiny: Any) -> None:
    federation = tiny(SurgicalAggregation())
    workspace, out = tmp_path / "workspace", tmp_path / "mine"
    workspace.mkdir()
    (workspace / "log.txt").write_text("No module named 'suture'")
    describe(Record(out), federation.plan, federation.schedule)
    with pytest.raises(FederationError, match=r"server has no suture\. Install"):
        download(Remote(workspace, META), KIT, "j", out)  # type: ignore[arg-type]
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "failed"
    assert "Install suture" in run["error"]
    assert (out / "flare.log").is_file()
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("damaged", ["run.json", "history.jsonl"])
def test_a_damaged_folder_does_not_hide_why_the_job_was_refused(
    damaged: str, tmp_path: Path, tiny: Any
) -> None:
    """`suture resume` of another user's experiment said that run.json is damaged."""
    federation = tiny(SurgicalAggregation())
    workspace, out = tmp_path / "workspace", tmp_path / "mine"
    workspace.mkdir()
    said = "suture.core.errors.ConfigError: the experiment 'x' is not this submitter's; ask its owner\n"
    (workspace / "log.txt").write_text(said)
    if damaged == "run.json":
        Record(out).update(experiment="demo-1", env="poc")
    else:
        describe(Record(out), federation.plan, federation.schedule)
        (out / damaged).write_text("{}\n")
    with pytest.raises(FederationError, match="is not this submitter's"):
        download(Remote(workspace, META), KIT, "j", out)  # type: ignore[arg-type]


@pytest.mark.complete
def test_a_run_that_failed_tells_the_servers_own_reason(done: Path, tmp_path: Path) -> None:
    run = json.loads((done / "run.json").read_text())
    (done / "run.json").write_text(json.dumps({**run, "status": "failed", "error": "two rounds failed"}))
    with pytest.raises(FederationError, match="two rounds failed"):
        download(Remote(done, {"status": "FINISHED:ABNORMAL"}), KIT, "j", tmp_path / "mine")  # type: ignore[arg-type]
    assert (tmp_path / "mine" / "history.jsonl").is_file()


@pytest.mark.complete
@pytest.mark.parametrize("owner", ["admin", "another"])
def test_the_first_error_of_a_site_on_this_machine_is_told_to_the_submitter(
    owner: str, done: Path, tmp_path: Path, make_kit: MakeKit
) -> None:
    run = json.loads((done / "run.json").read_text())
    (done / "run.json").write_text(json.dumps({**run, "status": "failed", "error": "too few updates"}))
    site, admin = make_kit("site", "harbor"), read_kit(make_kit("admin", "admin@trial.org"))
    state = site / "local" / "state" / EXPERIMENTS / "demo-1"
    state.mkdir(parents=True)
    (site / "local" / "suture.toml").write_text('[data]\ndataset = "hospital"\nroot = "."\ntable = "t.csv"\n')
    claim(state, Submitter(admin.name if owner == "admin" else "x@trial.org", "trial"), None)
    note = {"time": "2999-01-01T00:00:00+00:00", "site": "harbor", "message": "t.csv, row 3: write 0 or 1"}
    (state / "errors.jsonl").write_text(json.dumps(note) + "\n")
    with pytest.raises(FederationError, match="too few updates") as caught:
        download(Remote(done, {"status": "FINISHED:ABNORMAL"}), admin, "j", tmp_path / "mine")  # type: ignore[arg-type]
    assert ("\n- harbor: t.csv, row 3: write 0 or 1" in str(caught.value)) == (owner == "admin")


CRASHED = {"status": "FINISHED:EXECUTION_EXCEPTION", "cloned_from": "first"}


@pytest.fixture
def crashed(done: Path, tmp_path: Path) -> Path:
    """The workspace of a job that was killed at the server: FLARE's log and nothing else."""
    workspace = tmp_path / "crashed"
    workspace.mkdir()
    (workspace / "log.txt").write_text("the log")
    return workspace


@pytest.mark.complete
def test_what_a_crashed_job_committed_is_taken_from_a_server_on_this_machine(
    crashed: Path, done: Path, tmp_path: Path, make_kit: MakeKit
) -> None:
    server, admin = make_kit("server", "server"), make_kit("admin", "admin@trial.org")
    shutil.copytree(done, server / "suture" / EXPERIMENTS / "demo-1")
    path = server / "suture" / EXPERIMENTS / "demo-1" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    out = tmp_path / "deep" / "new"
    with pytest.raises(FederationError, match="suture resume demo-1 --startup-kit"):
        download(Remote(crashed, CRASHED), read_kit(admin), "j", out)  # type: ignore[arg-type]
    assert (out / "history.jsonl").read_bytes() == (done / "history.jsonl").read_bytes()
    assert (out / "flare.log").read_text() == "the log"
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    assert (out / "report.html").is_file()


@pytest.mark.complete
def test_elsewhere_a_crashed_job_says_where_its_rounds_are_and_how_it_goes_on(
    crashed: Path, tmp_path: Path, make_kit: MakeKit
) -> None:
    kit, out = read_kit(make_kit("admin", "admin@trial.org")), tmp_path / "deep" / "new"
    with pytest.raises(
        FederationError, match=r"at the server, in experiments/demo-1/ of the folder that \[storage\] state"
    ):
        download(Remote(crashed, CRASHED), kit, "j", out)  # type: ignore[arg-type]
    assert [path.name for path in out.iterdir()] == ["flare.log"]


def test_a_method_that_other_parties_cannot_load_is_refused_at_once(
    tmp_path: Path,
) -> None:
    class Mine(SurgicalAggregation):
        pass

    job = replace(load_job("demo"), method=Mine())
    with pytest.raises(ConfigError, match=r"installed package.*suture\.methods"):
        submit(job, "prod", KIT, tmp_path / "r", "demo-1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("enrolled", "named", "asked"),
    [
        ("ab", "", ["ab", "runs"]),
        ("a", "", ["ab", "a", "runs"]),
        ("", "", ["ab"]),
        ("a", "ab", ["ab"]),
    ],
)
def test_a_job_asks_the_connected_sites_of_its_study(
    enrolled: str, named: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site is a letter here; FLARE names those that it refuses."""
    jobs: list[str] = []

    class Server:
        sites = staticmethod(lambda: ["a", "b"])

        def submit(self, folder: Path) -> str:
            targets = json.loads((folder / "meta.json").read_text())["deploy_map"].values()
            jobs.append("".join(sorted({*chain(*targets)} - {"server"})))
            if strangers := [f"'{site}'" for site in jobs[-1] if site not in enrolled]:
                ends = "is" if len(strangers) == 1 else "are"
                raise FederationError(f"sites {', '.join(strangers)} {ends} not enrolled in study 's'")
            return "runs"

    monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(Server()))
    with nullcontext() if "runs" in asked else pytest.raises(FederationError, match="'b'"):
        jobs.append(submit(load_job("demo"), "prod", KIT, tmp_path / "r", "demo-1", Submission([*named])))
    assert jobs == asked


def test_a_waiting_job_says_what_it_waits_for() -> None:
    assert state({"status": "SUBMITTED"}) == "waiting to be started"
    history = ["2026-01-01 10:00:00: not enough sites"]
    assert "not enough sites" in state({"status": "SUBMITTED", "schedule_history": history})
    assert state({"status": "RUNNING", "job_deploy_detail": ["server: OK"]}) == ""


@pytest.mark.complete
@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/../../x", "..", ""])
def test_a_server_names_no_place_outside_of_runs(
    name: str, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads((done / "run.json").read_text())
    (done / "run.json").write_text(json.dumps(facts | {"experiment": name}))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="name of an experiment"):
        download(Remote(done, META), KIT, "j", None)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before
    crashed = {"status": "FINISHED:ABNORMAL", EXPERIMENT: name or "..", SHARED_WITH: []}
    (done / "run.json").unlink()
    with pytest.raises(ConfigError, match="name of an experiment"):
        download(Remote(done, crashed), KIT, "j", None)  # type: ignore[arg-type]


@pytest.mark.complete
@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_run_of_a_server_is_named(text: str, done: Path, tmp_path: Path) -> None:
    (done / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        download(Remote(done, META), KIT, "j", tmp_path / "mine")  # type: ignore[arg-type]
    assert not (tmp_path / "mine").exists()


HOSTILE = "[/bold]\x1b[2J\n\u202e"


def test_names_that_others_chose_are_shown_and_obeyed_by_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`suture status` of a job with a hostile name, of hostile sites, and of hostile events."""
    events = [
        {"event": "note", "text": HOSTILE},
        {"event": HOSTILE},
        {},
        {"event": "begin", "rounds": HOSTILE},
    ]

    class Federation:
        def contacts(self) -> dict[str, float]:
            return {HOSTILE: 0.0}

        def metas(self) -> list[dict[str, Any]]:
            names = (HOSTILE, "../../../x", "demo", None)
            return [
                {"job_id": f"{number}", "name": name, "status": HOSTILE} for number, name in enumerate(names)
            ]

        def meta(self, job_id: str) -> dict[str, Any]:
            return {"name": HOSTILE, "status": "RUNNING", "job_deploy_detail": [f"harbor: {HOSTILE}"]}

        def recent(self, job_id: str) -> dict[str, Any]:
            return {"first": 0, "events": events}

    monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(Federation()))
    monkeypatch.setattr("suture.flare.kit.admin_kit", lambda *_, **__: KIT)
    status(None, None)
    status("j", None)
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\u202e\r")
    assert "[/bold]" in said
    assert "'../../../x' (no valid name)" in said
    assert said.count("an event that cannot be read") == 2
    assert "  demo\n" in said


@pytest.mark.parametrize("readable", [True, False])
def test_status_says_why_a_job_ended(
    readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed EXECUTION_EXCEPTION and no more; of another user's job FLARE shows no log."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "log.txt").write_text("Component 'suture.x.Y' at config path 'a' is not in allow_list")
    meta = {**META, "status": "FINISHED:EXECUTION_EXCEPTION", "name": "demo"}
    remote = Remote(workspace, meta)
    if not readable:
        monkeypatch.setattr(remote, "download", refuse)
    monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(remote))
    monkeypatch.setattr("suture.flare.kit.admin_kit", lambda *_, **__: KIT)
    status("j")
    said = " ".join(capsys.readouterr().out.split())
    assert ("server does not allow suture.x.Y. At server, add" in said) == readable
    assert ("WORKSPACE/j/log.txt" in said) == (not readable)


def refuse(*_: object) -> Path:
    raise FederationError("not authorized")
