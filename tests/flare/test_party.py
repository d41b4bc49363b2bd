"""A job's process at the server and at a site: what it reads of the job, and whose experiment it opens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from one_site import OneSite, process_of, toml_of, workspace

from job_app import place_app
from suture.core.errors import ConfigError, SutureError
from suture.execution.job import Job, load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.ownership import NotOwner
from suture.federation.plan import code_hash
from suture.federation.server.server import Server
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, PLAN, SCHEDULE, SHARED_WITH
from suture.flare.codec import from_shareable_
from suture.flare.compat.tensors import register
from suture.flare.controller import FederationController
from suture.flare.executor import SiteExecutor
from suture.flare.recipe import export_job
from suture.flare.workspace import fingerprint, on_assigned, read_settings
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.priors import PriorSpec
from suture.protocol.messages import Abstain, SiteInfo, TaskData
from suture.protocol.packing import unpack
from suture_admin.ledger import ledger_totals, read_statement
from suture_papers.fedmas.fedmas import FedMAS
from world import refused, site_config, write_table

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
MINE, THEIRS = ("lead@a.org", "a"), ("lead@b.org", "b")
SHARED = {SHARED_WITH: [THEIRS[0]]}


@contextmanager
def opened(fl_ctx: FLContext, plan: Any = PLAN) -> Iterator[Server]:
    """The server of a job."""
    controller = FederationController(plan, SCHEDULE)
    try:
        yield controller._open(fl_ctx)
    finally:
        if controller._lock:
            controller._lock.close()


def answer(fl_ctx: FLContext, *stated: Any, rounds: int = 2) -> Any:
    """A site's answer to the handshake of a job."""
    return unpack(SiteExecutor(PLAN, rounds)._answer(TaskData("handshake"), fl_ctx, *stated).packed)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# The files of a job


@pytest.fixture
def demo(tmp_path: Path) -> FLContext:
    """A process of the exported demo."""
    job, at = load_job("demo"), workspace(tmp_path / "party")
    return place_app(process_of(at, "alpha"), job.plan("trial"), job.schedule())


def file_of(fl_ctx: FLContext, name: str = PLAN) -> Path:
    return Path(fl_ctx.get_engine().get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / name


def edit(fl_ctx: FLContext, name: str, values: dict[str, Any]) -> None:
    """Change values of one of the files, as with an editor."""
    path = file_of(fl_ctx, name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2))


def test_an_edited_value_counts(demo: FLContext) -> None:
    edit(demo, PLAN, {"seed": 5})
    edit(demo, SCHEDULE, {"title": "edited {HOME}"})
    with opened(demo) as server:
        assert (server.plan.seed, server.schedule.title) == (5, "edited {HOME}")
    placed = read_settings(PLAN, demo)
    demo.get_engine().get_workspace().config_folder = ""  # a kit of `nvflare package` names none
    assert read_settings(PLAN, demo) == placed


def local(**values: Any) -> dict[str, Any]:
    """The hyperparameters of the demo with other settings of the sites' training."""
    plan = load_job("demo").plan("trial").to_dict()
    plan["hyperparameters"]["local"] |= values
    return {"hyperparameters": plan["hyperparameters"]}


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        (PLAN, {"seed": "one"}, "seed"),
        (PLAN, {"sede": 1}, "'sede'"),
        (PLAN, {"transport": "float8"}, "transport"),
        (PLAN, {"method": "no method"}, "'no method'"),
        (PLAN, {"method": "individual"}, "federation"),
        (PLAN, {"code": "0" * 12}, "another version"),
        (PLAN, {"experiment": "../../etc"}, "experiment"),
        (PLAN, local(lr=-1.0), "lr"),
        (PLAN, local(epochs=0), "train"),
        (SCHEDULE, {"rounds": 0}, "rounds"),
        (SCHEDULE, {"patience": 2, "selection": "last"}, "patience=2"),
        (SCHEDULE, {"label_map": {"a": 1}}, "label_map"),
    ],
)
def test_an_edited_job_is_validated_as_a_job(
    name: str, values: dict[str, Any], named: str, demo: FLContext
) -> None:
    edit(demo, name, values)
    with refused(named, by=ConfigError), opened(demo):
        pass


@pytest.mark.parametrize("text", ["", "[1]", "null", "{" * 100_000, "{'a': 1}", '{"a": NaN}', None])
def test_a_file_without_a_table_is_refused(text: str | None, demo: FLContext) -> None:
    file_of(demo).unlink() if text is None else file_of(demo).write_text(text)
    with refused(PLAN, by=ConfigError):
        read_settings(PLAN, demo)


@pytest.mark.parametrize("name", ['<"seed": 1>', "../plan.json", "/etc/passwd", "", ["plan.json"], None])
def test_a_job_names_no_other_file(name: Any, demo: FLContext) -> None:
    with refused(PLAN, by=ConfigError), opened(demo, name):
        pass
    with refused(PLAN, by=ConfigError):
        SiteExecutor(name, 2)._open(demo)


def test_a_site_abstains_from_a_job_that_names_another_file_than_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through FLARE's runner: nothing of the file, not even whether it exists, is in the answer."""
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    register()
    (tmp_path / "there").touch()
    (tmp_path / "suture.toml").write_text('[data]\ndataset = "hospital"\nroot = "images"\ntable = "t.csv"\n')
    for name in ("there", "none"):
        method = FedMAS(prior=PriorSpec(name="checkpoint", path=str(tmp_path / name)))
        plan = Job(name="trial", title="", method=method, model=ModelSpec(), rounds=2).plan("trial")
        site = OneSite(tmp_path / f"site-{name}", plan, tmp_path / "suture.toml")
        reply = unpack(from_shareable_(site.answer(TaskData("handshake", 0))))
        assert reply == Abstain("configuration", "ConfigError")
        (line,) = (tmp_path / f"site-{name}" / "suture" / "errors.jsonl").read_text().splitlines()
        assert "method.prior.path" in json.loads(line)["message"]


@pytest.mark.parametrize(
    ("device", "spec", "used"),
    [
        ("cuda:1", {"harbor": {"num_of_gpus": 1}}, "cuda"),
        ("cuda:1", {"@default": {"num_of_gpus": 1}}, "cuda"),
        ("cuda:1", {"@default": {"num_of_gpus": 1}, "harbor": {"num_of_gpus": 0}}, "cuda:1"),
        ("cuda:1", {"lakeside": {"num_of_gpus": 1}}, "cuda:1"),
        ("cuda:1", None, "cuda:1"),
        ("cpu", {"harbor": {"num_of_gpus": 1}}, "cpu"),
    ],
)
def test_an_assigned_gpu_is_counted_from_0_again(device: str, spec: Any, used: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "labels.csv", [("image", "Mass")])
    data = {"dataset": "hospital", "table": table, "root": tmp_path, "labels": ["Mass"]}
    config = site_config(tmp_path, data=data, training={"device": device})
    assert (
        on_assigned(config, {} if spec is None else {"resource_spec": spec}, "harbor").training.device == used
    )
    assert config.training.device == device


# Whose experiment it is


class House:
    """A party with the data of a tiny federation's first site, and the jobs that come to it."""

    def __init__(self, folder: Path, federation: Any, **storage: str) -> None:
        self.folder, self.federation = folder, federation
        self.at = workspace(folder, suture=toml_of(federation.configs["alpha"], **storage))

    def server(self, submitter: Any, plan: Any = None, job: str = "job", **meta: Any) -> FLContext:
        fl_ctx = process_of(self.at, "server", submitter, job, **meta)
        return place_app(fl_ctx, plan or self.federation.plan, self.federation.schedule)

    def site(self, submitter: Any, plan: Any = None, job: str = "job", **meta: Any) -> FLContext:
        fl_ctx = process_of(self.at, "alpha", submitter, job, **meta)
        return place_app(fl_ctx, plan or self.federation.plan)


@pytest.fixture
def house(tmp_path: Path, tiny: Any) -> Callable[..., House]:
    return lambda **storage: House(tmp_path / "party", tiny(METHOD), **storage)


@pytest.mark.complete
def test_the_server_opens_an_experiment_for_its_owner_only(house: Any) -> None:
    own: House = house()

    def run(submitter: tuple[str, str], **meta: Any) -> None:
        with opened(own.server(submitter, **meta)) as server:
            federate(server, Loop(own.federation.sites()))

    run(MINE)
    folder = own.folder / "suture" / EXPERIMENTS / own.federation.plan.experiment
    before = digest(folder)
    for meta in ({}, SHARED):  # a job cannot share with itself
        with refused(own.federation.plan.experiment, by=NotOwner):
            run(THEIRS, **meta)
    assert digest(folder) == before
    run(MINE, **SHARED)
    run(THEIRS)


@pytest.mark.parametrize("plan", ["named", "unnamed"])
def test_two_submitters_of_one_folder_share_no_experiment(plan: str, house: Any) -> None:
    """The second one even writes into its meta.json that its job was cloned from the first one's."""
    own: House = house(state="../suture")
    settings = own.federation.plan.to_job()
    if plan == "unnamed":
        del settings["experiment"], settings["code"]

    def begun(number: str, submitter: tuple[str, str], **meta: Any) -> tuple[str, Any]:
        """The server's experiment, and the site's answer."""
        meta |= {"name": "demo"}
        try:
            with opened(own.server(submitter, settings, number, **meta)) as server:
                name = server.plan.experiment
        except NotOwner:
            name = ""
        return name, answer(own.site(submitter, settings, number, **meta), None, code_hash())

    mine, info = begun("first", MINE)
    assert mine == {"named": own.federation.plan.experiment, "unnamed": "demo-first"}[plan]
    assert isinstance(info, SiteInfo)
    theirs, info = begun("second", THEIRS)
    if plan == "unnamed":
        assert theirs == "demo-second"
        assert isinstance(info, SiteInfo)
    theirs, refusal = begun("third", THEIRS, cloned_from="first", **SHARED)
    assert theirs == ""
    assert refusal == Abstain("configuration", "NotOwner")
    clone, info = begun("fourth", MINE, cloned_from="first")
    assert clone == mine
    assert isinstance(info, SiteInfo)


@pytest.mark.parametrize("named", [True, False])
def test_a_site_compares_the_hash_that_the_server_states_with_that_of_its_code(
    named: bool, house: Any
) -> None:
    own: House = house()
    settings = {k: v for k, v in own.federation.plan.to_job().items() if named or k != "code"}
    assert isinstance(answer(own.site(MINE, settings), None, code_hash()), SiteInfo)
    for stated in (None, "", "0" * 16, "another hash", 7, ["x"]):
        reply = answer(own.site(MINE, settings), None, stated)
        if named:  # the job's own hash counts, whatever a server says
            assert isinstance(reply, SiteInfo)
        else:
            assert isinstance(reply, Abstain)
            assert reply.reason == ("configuration" if stated in ("another hash", ["x"]) else "code_mismatch")


@pytest.mark.parametrize(
    ("values", "rounds", "same"), [({}, 2, True), ({"seed": 5}, 2, False), ({}, 3, False)]
)
def test_a_plan_that_was_edited_in_one_app_only_ends_in_an_abstention(
    values: dict[str, Any], rounds: int, same: bool, house: Any
) -> None:
    own: House = house()
    fl_ctx = own.site(MINE)
    edit(fl_ctx, PLAN, values)
    reply = answer(fl_ctx, fingerprint(own.federation.plan.to_dict(), 2), rounds=rounds)
    assert isinstance(reply, SiteInfo) if same else reply == Abstain("configuration", "ConfigError")
    if not same:
        (line,) = (own.folder / "suture" / "errors.jsonl").read_text().splitlines()
        assert "every app of the job" in json.loads(line)["message"]


@pytest.mark.parametrize(
    "name",
    ["ledger.jsonl", "errors.jsonl", "ledgers.json", EXPERIMENTS, "cache", "local", "startup", "suture"],
)
def test_no_name_of_an_experiment_takes_the_place_of_a_file(name: str, house: Any) -> None:
    """Also where all folders of a party are one: a party uses these names for files of its own."""
    own: House = house(state="..", cache="../cache", files="..")
    (own.folder / "cache").mkdir()
    before = {path.name for path in own.folder.iterdir()}
    for experiment in (name, "next"):
        plan = {**own.federation.plan.to_dict(), "experiment": experiment}
        assert isinstance(answer(own.site(MINE, plan)), SiteInfo)
        with opened(own.server(MINE, plan)):
            assert (own.folder / EXPERIMENTS / experiment / "owner.json").is_file()
    new = {path.name for path in own.folder.glob("[!.]*")} - before - {"job"}  # FLARE's folder of the job
    assert new == {"ledger.jsonl", EXPERIMENTS}
    assert len((own.folder / "ledger.jsonl").read_text().splitlines()) == 2


def test_a_site_abstains_from_the_job_of_another(house: Any) -> None:
    own: House = house()
    assert isinstance(answer(own.site(MINE)), SiteInfo)
    state = own.folder / "local" / "state" / EXPERIMENTS / own.federation.plan.experiment
    assert (before := digest(state))
    assert answer(own.site(THEIRS)) == Abstain("configuration", "NotOwner")
    assert digest(state) == before
    assert isinstance(answer(own.site(MINE)), SiteInfo)


def test_the_ledger_names_the_job_and_its_submitter(house: Any) -> None:
    own: House = house()
    for name, job in ((MINE, "one"), ((f"x\x1b{MINE[0]}" * 9, MINE[1]), "two"), (None, "three")):
        plan = {**own.federation.plan.to_dict(), "experiment": job}
        assert isinstance(answer(own.site(name, plan, job)), SiteInfo)
    lines = (own.folder / "local" / "state" / "ledger.jsonl").read_text().splitlines()
    first, second, third = ((line["job"], line["submitter"]) for line in map(json.loads, lines))
    assert (first, third) == (("one", MINE[0]), ("three", ""))
    assert (second[0], len(second[1]), "\x1b" in second[1]) == ("two", 80, False)
    said = list(ledger_totals(read_statement(own.folder)))
    assert f"one: job one of {MINE[0]}" in said


def test_a_simulation_has_no_users_and_a_broken_list_shares_nothing(house: Any) -> None:
    own: House = house()
    with opened(own.server(None, {**own.federation.plan.to_dict(), "experiment": "alone"})) as server:
        assert server.plan.experiment == "alone"
    with opened(own.server(MINE, **{SHARED_WITH: THEIRS[0]})):
        pass
    with refused(by=SutureError), opened(own.server(THEIRS, **{SHARED_WITH: THEIRS[0]})):
        pass


def test_a_job_names_with_whom_it_is_shared(tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f'shared_with=["{THEIRS[0]}"]'])
    meta = json.loads((export_job(job, tmp_path, "trial", ("a",)) / "meta.json").read_text())
    assert (meta[EXPERIMENT], meta[SHARED_WITH]) == ("trial", [THEIRS[0]])
    config = tmp_path / "demo" / "app_a" / "config"
    assert not [path for path in config.iterdir() if THEIRS[0] in path.read_text()]
