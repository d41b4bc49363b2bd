"""Another organisation's job with the identifier of an experiment, at the server and at a site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.workspace import Workspace

from job_app import place_app
from suture.core.errors import SutureError
from suture.execution.job import load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.ownership import NotOwner
from suture.federation.plan import code_hash
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, PLAN, SCHEDULE, SHARED_WITH
from suture.flare.controller import FederationController
from suture.flare.executor import SiteExecutor
from suture.flare.recipe import export_job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, SiteInfo, TaskData
from suture.protocol.packing import unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
MINE, THEIRS = ("lead@a.org", "a"), ("lead@b.org", "b")


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., FLContext]:
    """Makes FLARE's context of a job's process, with the metadata that its server has written."""
    (tmp_path / "party" / "startup").mkdir(parents=True)
    (tmp_path / "party" / "local").mkdir()

    def make(party: str, submitter: tuple[str, str] | None, job: str = "job", **meta: Any) -> FLContext:
        workspace = Workspace(str(tmp_path / "party"), party)
        engine = SimpleNamespace(get_workspace=lambda: workspace)
        if submitter:
            meta |= {"submitter_name": submitter[0], "submitter_org": submitter[1]}
        private = {FLContextKey.WORKSPACE_OBJECT: workspace, FLContextKey.JOB_META: meta}
        return FLContextManager(engine, party, job, {}, private).new_context()

    return make


@pytest.mark.complete
def test_the_server_opens_an_experiment_for_its_owner_only(context: Any, tiny: Any, tmp_path: Path) -> None:
    federation = tiny(METHOD)

    def run(submitter: tuple[str, str], **meta: Any) -> None:
        controller = FederationController(PLAN, SCHEDULE)
        fl_ctx = place_app(context("server", submitter, **meta), federation.plan, federation.schedule)
        try:
            federate(controller._open(fl_ctx), Loop(federation.sites()))
        finally:
            if controller._lock:
                controller._lock.close()

    run(MINE)
    folder = tmp_path / "party" / "suture" / EXPERIMENTS / federation.plan.experiment
    before = digest(folder)
    with pytest.raises(NotOwner, match="not this submitter's"):
        run(THEIRS)
    with pytest.raises(NotOwner):
        run(THEIRS, **{SHARED_WITH: [THEIRS[0]]})  # a job cannot share with itself
    assert digest(folder) == before
    run(MINE, **{SHARED_WITH: [THEIRS[0]]})
    run(THEIRS)


@pytest.mark.parametrize("plan", ["named", "unnamed"])
def test_two_submitters_of_one_folder_share_no_experiment(
    plan: str, context: Any, tiny: Any, tmp_path: Path
) -> None:
    """The second one even writes into its meta.json that its job was cloned from the first one's."""
    federation = tiny(METHOD)
    write_toml(tmp_path / "party", federation.configs["alpha"].data, state="../suture")
    settings = federation.plan.to_job()
    if plan == "unnamed":
        del settings["experiment"], settings["code"]

    def begun(number: str, submitter: tuple[str, str], **meta: Any) -> tuple[str, object]:
        """The server's experiment, and the site's answer."""
        controller, job = FederationController(PLAN, SCHEDULE), {"name": "demo", **meta}
        ctx = place_app(context("server", submitter, number, **job), settings, federation.schedule)
        try:
            name = controller._open(ctx).plan.experiment
        except NotOwner:
            name = ""
        finally:
            if controller._lock:
                controller._lock.close()
        site = SiteExecutor(PLAN, 2)
        ctx = place_app(context("alpha", submitter, number, **job), settings)
        return name, unpack(site._answer(TaskData("handshake"), ctx, None, code_hash()).packed)

    mine, answer = begun("first", MINE)
    assert mine == {"named": federation.plan.experiment, "unnamed": "demo-first"}[plan]
    assert isinstance(answer, SiteInfo)
    theirs, answer = begun("second", THEIRS)
    if plan == "unnamed":
        assert theirs == "demo-second"
        assert isinstance(answer, SiteInfo)
    theirs, answer = begun("third", THEIRS, cloned_from="first", **{SHARED_WITH: [THEIRS[0]]})
    assert theirs == ""
    assert isinstance(answer, Abstain)
    assert answer.error == "NotOwner"
    clone, answer = begun("fourth", MINE, cloned_from="first")
    assert clone == mine
    assert isinstance(answer, SiteInfo)


@pytest.mark.parametrize("stated", [None, "", "0" * 16, "another hash", 7, ["x"]])
@pytest.mark.parametrize("named", [True, False])
def test_a_site_compares_the_hash_that_the_server_states_with_that_of_its_code(
    named: bool, stated: Any, context: Any, tiny: Any, tmp_path: Path
) -> None:
    federation = tiny(METHOD)
    write_toml(tmp_path / "party", federation.configs["alpha"].data)
    settings = {k: v for k, v in federation.plan.to_job().items() if named or k != "code"}

    def answer(code: Any) -> object:
        fl_ctx = place_app(context("alpha", MINE), settings)
        return unpack(SiteExecutor(PLAN, 2)._answer(TaskData("handshake"), fl_ctx, None, code).packed)

    assert isinstance(answer(code_hash()), SiteInfo)
    reply = answer(stated)
    if named:  # the job's own hash counts, whatever a server says
        assert isinstance(reply, SiteInfo)
    else:
        assert isinstance(reply, Abstain)
        assert reply.reason == ("configuration" if stated in ("another hash", ["x"]) else "code_mismatch")


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_toml(party: Path, own: Any, **storage: str) -> None:
    lines = "".join(f'{key} = "{value}"\n' for key, value in storage.items())
    (party / "local" / "suture.toml").write_text(
        f'[data]\ndataset = "hospital"\nroot = "{own.root}"\ntable = "{own.table}"\n[storage]\n{lines}'
    )


USED = ("ledger.jsonl", "errors.jsonl", "ledgers.json", EXPERIMENTS, "cache", "local", "startup", "suture")
"""Names that a party uses for files and folders of its own, and a submitter may give to an experiment."""


@pytest.mark.parametrize("name", USED)
def test_no_name_of_an_experiment_takes_the_place_of_a_file(
    name: str, context: Any, tiny: Any, tmp_path: Path
) -> None:
    """Also where all folders of a party are one. The first two took a site out for good."""
    federation, party = tiny(METHOD), tmp_path / "party"
    write_toml(party, federation.configs["alpha"].data, state="..", cache="../cache", files="..")
    (party / "cache").mkdir()
    before = {path.name for path in party.iterdir()}
    for experiment in (name, "next"):
        plan = {**federation.plan.to_dict(), "experiment": experiment}
        fl_ctx = place_app(context("alpha", MINE), plan)
        answer = SiteExecutor(PLAN, 2)._answer(TaskData("handshake"), fl_ctx)
        assert isinstance(unpack(answer.packed), SiteInfo)
        controller = FederationController(PLAN, SCHEDULE)
        controller._open(place_app(context("server", MINE), plan, federation.schedule))
        controller._lock.close()  # type: ignore[union-attr]
        assert (party / EXPERIMENTS / experiment / "owner.json").is_file()
    new = {path.name for path in party.glob("[!.]*")} - before - {"job"}  # FLARE's folder of the job
    assert new == {"ledger.jsonl", EXPERIMENTS}
    assert len((party / "ledger.jsonl").read_text().splitlines()) == 2


def test_a_site_abstains_from_the_job_of_another(context: Any, tiny: Any, tmp_path: Path) -> None:
    federation = tiny(METHOD)
    write_toml(tmp_path / "party", federation.configs["alpha"].data)

    def ask(submitter: tuple[str, str]) -> object:
        fl_ctx = place_app(context("alpha", submitter), federation.plan)
        return unpack(SiteExecutor(PLAN, 2)._answer(TaskData("handshake"), fl_ctx).packed)

    assert isinstance(ask(MINE), SiteInfo)
    state = tmp_path / "party" / "local" / "state" / EXPERIMENTS / federation.plan.experiment
    assert (before := digest(state))
    refusal = ask(THEIRS)
    assert isinstance(refusal, Abstain)
    assert (refusal.reason, refusal.error) == ("configuration", "NotOwner")
    assert digest(state) == before
    assert isinstance(ask(MINE), SiteInfo)


def test_a_simulation_has_no_users(context: Any, tiny: Any) -> None:
    federation = tiny(METHOD)
    controller = FederationController(PLAN, SCHEDULE)
    controller._open(place_app(context("server", None), federation.plan, federation.schedule))
    assert controller._lock
    controller._lock.close()


def test_a_job_names_with_whom_it_is_shared(tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f'shared_with=["{THEIRS[0]}"]'])
    meta = json.loads((export_job(job, tmp_path, "trial", ("a",)) / "meta.json").read_text())
    assert meta[EXPERIMENT] == "trial"
    assert meta[SHARED_WITH] == [THEIRS[0]]
    config = tmp_path / "demo" / "app_a" / "config"
    assert not [path for path in config.iterdir() if THEIRS[0] in path.read_text()]


def test_a_broken_list_shares_nothing(context: Any, tiny: Any) -> None:
    federation = tiny(METHOD)
    for submitter in (MINE, THEIRS):
        controller = FederationController(PLAN, SCHEDULE)
        fl_ctx = context("server", submitter, **{SHARED_WITH: THEIRS[0]})
        place_app(fl_ctx, federation.plan, federation.schedule)
        if submitter == MINE:
            controller._open(fl_ctx)
            assert controller._lock
            controller._lock.close()
        else:
            with pytest.raises(SutureError):
                controller._open(fl_ctx)
