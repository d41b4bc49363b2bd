"""`suture resume`: the newest job of an experiment is ended and handed in again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flare_server import KIT, FlareServer, Serve
from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS
from startup_kits import MakeKit

import suture_admin.recovery as recovery
from suture.core.errors import ConfigError, FederationError
from suture.federation.ownership import OWNER, NotOwner
from suture.federation.server.record import Record
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, SHARED_WITH, named_by
from suture.flare.kit import read_kit
from suture_admin.recovery import newest, resume, state_on_this_machine
from world import refused

MAP = {"app_server": ["server"], "app_a": ["a"], "app_b": ["b"]}
FIRST = {"job_id": "1", "name": "demo", EXPERIMENT: "demo-1", SHARED_WITH: [], "deploy_map": MAP}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL", "_WAIT_FOR_END"):
        monkeypatch.setattr(recovery, name, 0.01)


ENDED = {"status": "FINISHED:ABORTED"}
OTHERS = {"submitter_name": "lead@b.org"}


def test_a_copy_belongs_to_the_experiment_of_what_it_is_a_copy_of() -> None:
    second = {"job_id": "2", "cloned_from": "1"}
    third = {"job_id": "3", "cloned_from": "2"}
    other = {"job_id": "4", EXPERIMENT: "demo-2", SHARED_WITH: []}
    jobs = [FIRST, second, third, other, {"job_id": "5", "cloned_from": "deleted"}]
    assert newest(jobs, "demo-1") is third
    assert newest(jobs, "demo-2") is other
    with refused("'demo-3'", "demo-1, demo-2", by=ConfigError):
        newest(jobs, "demo-3")


@pytest.mark.parametrize("clones", [[], ["a"], ["a", "a"]])
def test_a_job_without_an_experiment_of_its_own_is_copied_itself_each_time(
    clones: list[str], serve: Serve, tmp_path: Path
) -> None:
    """The parties name it by the job that was submitted, and know of a copy no more than its source."""
    first = {"job_id": "a", "name": "demo", SHARED_WITH: [], "deploy_map": MAP} | ENDED
    copies = [
        {"job_id": f"b{i}", "name": "demo", "cloned_from": source} | ENDED for i, source in enumerate(clones)
    ]
    flares_own = {"job_id": "c", "name": "by-class", "status": "RUNNING"}
    server = serve(FlareServer(first, *copies, flares_own))
    resume(KIT, named_by(first, "a"), tmp_path, "poc")
    assert server.did[-1] == "clone a"
    with refused("demo-a", by=ConfigError):
        newest(server.jobs, named_by(flares_own, "c"))


@pytest.mark.parametrize(
    ("jobs", "server", "did"),
    [
        # its sites are there at the second look
        ([FIRST | {"status": "FINISHED:EXECUTION_EXCEPTION"}], {}, ["sites", "sites", "clone 1"]),
        ([FIRST | {"status": "RUNNING"}], {}, ["abort 1", "clone 1"]),
        # it only seems to run, after the crash of a server without StaleJobs
        ([FIRST | {"status": "RUNNING"}], {"runs": False}, ["clone 1"]),
        ([FIRST | ENDED | OTHERS | {SHARED_WITH: [KIT.name]}], {}, ["clone 1"]),
        # a stranger's of the same experiment: its plan would run as the owner's
        (
            [
                FIRST | ENDED | {"submitter_name": KIT.name},
                FIRST | ENDED | OTHERS | {SHARED_WITH: [KIT.name], "job_id": "2"},
            ],
            {},
            ["clone 1"],
        ),
    ],
)
def test_a_job_is_handed_in_again(
    jobs: list[dict[str, Any]], server: dict[str, bool], did: list[str], serve: Serve, tmp_path: Path
) -> None:
    served = serve(FlareServer(*jobs, **server))
    assert resume(KIT, "demo-1", tmp_path, "poc") == ("new", "demo")
    assert served.did[-len(did) :] == did
    assert not list(tmp_path.iterdir()), "a folder without a run has nothing to record"
    Record(tmp_path).update(experiment="demo-1", status="failed")
    for job in served.jobs:
        job |= ENDED
    resume(KIT, "demo-1", tmp_path, "poc")
    run = Record(tmp_path).run
    assert (run["experiment"], run["flare_job"], run["status"]) == ("demo-1", "new", "running")


COPY = {"job_id": "2", "cloned_from": "1", "name": "demo"}


@pytest.mark.parametrize(
    ("changes", "by", "named"),
    [
        *(
            (
                OTHERS | {"status": status},
                NotOwner,
                ["lead@b.org", "--startup-kit", 'shared_with=["lead@a.org"]'],
            )
            for status in ("RUNNING", "FINISHED:ABORTED")
        ),
        ({"status": "FINISHED:COMPLETED"}, ConfigError, ["demo"]),
        ({"status": "SUBMITTED"}, ConfigError, ["demo"]),
        # FLARE's clone would lack these settings
        ({"status": "RUNNING", "scope": "closed"}, ConfigError, ["scope", "suture run JOB --resume"]),
        ({"status": "RUNNING", "launcher_spec": {"a": {"docker": {}}}}, ConfigError, ["launcher_spec"]),
    ],
)
@pytest.mark.parametrize("clones", [(), (COPY,)])
def test_what_is_not_resumed_runs_on(
    changes: dict[str, Any],
    by: type[Exception],
    named: list[str],
    clones: tuple[dict[str, Any], ...],
    serve: Serve,
    tmp_path: Path,
) -> None:
    assert not {"scope", "launcher_spec"} & {*CLONED_META_KEYS}, "FLARE's clone keeps it"
    copies = (clone | {"status": changes["status"]} for clone in clones)
    server = serve(FlareServer(FIRST | changes, *copies))
    with refused(*named, by=by):
        resume(KIT, "demo-1", tmp_path / "out", "poc")
    assert server.did == []
    assert not (tmp_path / "out").exists()


def test_a_job_that_does_not_end_and_another_runs_folder_are_let_alone(serve: Serve, tmp_path: Path) -> None:
    stuck = serve(FlareServer(FIRST | {"status": "RUNNING"}, ends=False))
    with refused("1", by=FederationError):
        resume(KIT, "demo-1", tmp_path, "poc")
    assert not any(did.startswith("clone") for did in stuck.did)
    Record(tmp_path).update(experiment="demo-0")
    with refused("--out", by=ConfigError):
        resume(KIT, "demo-1", tmp_path, "poc")


def test_another_submitters_folder_on_this_machine_is_not_this_jobs(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("admin", "lead@b.org"))
    folder = make_kit("server", "server") / "suture" / EXPERIMENTS / "trial"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    assert state_on_this_machine(kit, "trial") == folder
    (folder / OWNER).write_text('{"name": "lead@a.org", "org": "a", "shared_with": []}')
    assert state_on_this_machine(kit, "trial") is None
