"""`suture resume`: the newest job of an experiment is ended and handed in again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS
from startup_kits import MakeKit

import suture_admin.recovery as recovery
from suture.core.errors import ConfigError, FederationError
from suture.federation.ownership import OWNER, NotOwner
from suture.federation.server.record import Record
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, SHARED_WITH, named_by
from suture.flare.kit import Kit, read_kit
from suture_admin.recovery import newest, resume, state_on_this_machine

MAP = {"app_server": ["server"], "app_a": ["a"], "app_b": ["b"]}
KIT = Kit(Path("nowhere"), "admin", "lead@a.org", "trial", "localhost", 8002)
FIRST = {"job_id": "1", "name": "demo", EXPERIMENT: "demo-1", SHARED_WITH: [], "deploy_map": MAP}


class Server:
    """FLARE's side: what it knows of jobs, and what it was asked."""

    def __init__(self, *jobs: dict[str, Any], ends: bool = True, runs: bool = True) -> None:
        self.jobs = [dict(job) for job in jobs]
        self.ends, self.runs = ends, runs
        self.did: list[str] = []
        self._connected = [["a"], ["a", "b"]]

    def metas(self) -> list[dict[str, Any]]:
        return self.jobs

    def meta(self, job_id: str) -> dict[str, Any]:
        return next(job for job in self.jobs if job["job_id"] == job_id)

    def sites(self) -> list[str]:
        self.did.append("sites")
        return self._connected.pop(0) if len(self._connected) > 1 else self._connected[0]

    def abort(self, job_id: str) -> None:
        self.did.append(f"abort {job_id}")
        if not self.runs:
            raise FederationError(f"refused: failed to abort job: Job {job_id} is not running.")
        if self.ends:
            self.meta(job_id)["status"] = "FINISHED:ABORTED"

    def clone(self, job_id: str) -> str:
        self.did.append(f"clone {job_id}")
        return "new"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a server in FLARE's place."""

    def serve(server: Server) -> Server:
        @contextmanager
        def connected(kit: object) -> Iterator[Server]:
            yield server

        monkeypatch.setattr("suture_admin.session.connect", connected)
        for name in ("_POLL", "_WAIT_FOR_END"):
            monkeypatch.setattr(recovery, name, 0.01)
        return server

    return serve


def test_a_copy_belongs_to_the_experiment_of_what_it_is_a_copy_of() -> None:
    second = {"job_id": "2", "cloned_from": "1"}
    third = {"job_id": "3", "cloned_from": "2"}
    other = {"job_id": "4", EXPERIMENT: "demo-2", SHARED_WITH: []}
    stray = {"job_id": "5", "cloned_from": "deleted"}
    jobs = [FIRST, second, third, other, stray]
    assert newest(jobs, "demo-1") is third
    assert newest(jobs, "demo-2") is other
    with pytest.raises(ConfigError, match=r"'demo-3'; it has demo-1, demo-2\. .*suture run JOB --resume"):
        newest(jobs, "demo-3")


@pytest.mark.parametrize("clones", [[], ["a"], ["a", "a"]])
def test_a_job_without_an_experiment_of_its_own_is_copied_itself_each_time(
    clones: list[str], serve: Any, tmp_path: Path
) -> None:
    """The parties name it by the job that was submitted, and know of a copy no more than its source."""
    first = {"job_id": "a", "name": "demo", SHARED_WITH: [], "status": "FINISHED:ABORTED", "deploy_map": MAP}
    copies = [
        {"job_id": f"b{i}", "name": "demo", "cloned_from": source, "status": "FINISHED:ABORTED"}
        for i, source in enumerate(clones)
    ]
    flares_own = {"job_id": "c", "name": "by-class", "status": "RUNNING"}
    server = serve(Server(first, *copies, flares_own))
    resume(KIT, named_by(first, "a"), tmp_path, "poc")
    assert server.did[-1] == "clone a"
    with pytest.raises(ConfigError, match="it has demo-a"):
        newest(server.jobs, named_by(flares_own, "c"))


def test_a_strangers_job_of_the_same_experiment_is_not_copied(serve: Any, tmp_path: Path) -> None:
    """Its plan would run as the owner's, whose clone the server accepts."""
    first = FIRST | {"status": "FINISHED:ABORTED", "submitter_name": KIT.name}
    strange = {"submitter_name": "mallory@b.org", SHARED_WITH: [KIT.name]}
    server = serve(Server(first, first | strange | {"job_id": "2", "name": "demo"}))
    assert resume(KIT, "demo-1", tmp_path, "poc") == ("new", "demo")
    assert server.did[-1] == "clone 1"


def test_a_dead_job_is_handed_in_again_once_its_sites_are_there(serve: Any, tmp_path: Path) -> None:
    server = serve(Server(FIRST | {"status": "FINISHED:EXECUTION_EXCEPTION"}))
    assert resume(KIT, "demo-1", tmp_path, "poc") == ("new", "demo")
    assert server.did == ["sites", "sites", "clone 1"]
    assert not list(tmp_path.iterdir()), "a folder without a run has nothing to record"
    Record(tmp_path).update(experiment="demo-1", status="failed")
    resume(KIT, "demo-1", tmp_path, "poc")
    run = Record(tmp_path).run
    assert (run["experiment"], run["flare_job"], run["status"]) == ("demo-1", "new", "running")


@pytest.mark.parametrize("status", ["RUNNING", "FINISHED:ABORTED", "FINISHED:EXECUTION_EXCEPTION"])
def test_anothers_experiment_is_refused_with_the_reason_and_its_job_runs_on(
    status: str, serve: Any, tmp_path: Path
) -> None:
    first = FIRST | {"status": status, "submitter_name": "lead@b.org"}
    server = serve(Server(first, {"job_id": "2", "cloned_from": "1", "status": status, "name": "demo"}))
    with pytest.raises(NotOwner, match=r"'demo-1' belongs to lead@b\.org, .*--startup-kit") as why:
        resume(KIT, "demo-1", tmp_path / "out", "poc")
    assert """--set 'shared_with=["lead@a.org"]'""" in str(why.value)
    assert server.did == []
    assert not (tmp_path / "out").exists()


def test_a_user_with_whom_it_is_shared_may_continue(serve: Any, tmp_path: Path) -> None:
    first = FIRST | {"status": "FINISHED:ABORTED", "submitter_name": "lead@b.org", SHARED_WITH: [KIT.name]}
    server = serve(Server(first))
    resume(KIT, "demo-1", tmp_path, "poc")
    assert server.did[-1] == "clone 1"


def test_a_running_job_is_ended_first(serve: Any, tmp_path: Path) -> None:
    server = serve(Server(FIRST | {"status": "RUNNING"}))
    resume(KIT, "demo-1", tmp_path, "poc")
    assert server.did[-2:] == ["abort 1", "clone 1"]
    stuck = serve(Server(FIRST | {"status": "RUNNING"}, ends=False))
    with pytest.raises(FederationError, match="has not ended"):
        resume(KIT, "demo-1", tmp_path, "poc")
    assert not any(did.startswith("clone") for did in stuck.did)


def test_a_job_that_only_seems_to_run_is_no_hindrance(serve: Any, tmp_path: Path) -> None:
    """After the crash of a server without StaleJobs."""
    server = serve(Server(FIRST | {"status": "RUNNING"}, runs=False))
    resume(KIT, "demo-1", tmp_path, "poc")
    assert server.did[-1] == "clone 1"


@pytest.mark.parametrize(
    ("status", "words"), [("FINISHED:COMPLETED", "has finished"), ("SUBMITTED", "waits to be started")]
)
def test_what_needs_no_resuming_is_said(status: str, words: str, serve: Any, tmp_path: Path) -> None:
    server = serve(Server(FIRST | {"status": status}))
    with pytest.raises(ConfigError, match=words):
        resume(KIT, "demo-1", tmp_path, "poc")
    assert server.did == []


@pytest.mark.parametrize("setting", [{"scope": "closed"}, {"launcher_spec": {"a": {"docker": {}}}}])
@pytest.mark.parametrize("clones", [(), ({"job_id": "2", "cloned_from": "1", "name": "demo"},)])
def test_a_job_of_which_a_clone_lacks_a_setting_runs_on_and_is_not_cloned(
    setting: dict[str, Any], clones: tuple[dict[str, Any], ...], serve: Any, tmp_path: Path
) -> None:
    (key,) = setting
    assert key not in CLONED_META_KEYS, "FLARE's clone keeps it"
    server = serve(Server(*(job | {"status": "RUNNING"} for job in (FIRST | setting, *clones))))
    with pytest.raises(ConfigError, match=rf"\b{key}\b.*suture run JOB --resume"):
        resume(KIT, "demo-1", tmp_path, "poc")
    assert server.did == []


def test_another_runs_folder_is_not_touched(serve: Any, tmp_path: Path) -> None:
    serve(Server(FIRST | {"status": "RUNNING"}))
    Record(tmp_path).update(experiment="demo-0")
    with pytest.raises(ConfigError, match="choose another --out"):
        resume(KIT, "demo-1", tmp_path, "poc")


def test_another_submitters_folder_on_this_machine_is_not_this_jobs(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("admin", "lead@b.org"))
    folder = make_kit("server", "server") / "suture" / EXPERIMENTS / "trial"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    assert state_on_this_machine(kit, "trial") == folder
    (folder / OWNER).write_text('{"name": "lead@a.org", "org": "a", "shared_with": []}')
    assert state_on_this_machine(kit, "trial") is None
