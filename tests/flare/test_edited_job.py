"""The plan of an exported job can be read and edited; an edited one is validated as a job is."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.workspace import Workspace

from job_app import place_app
from suture.core.errors import ConfigError
from suture.execution.job import load_job
from suture.flare import PLAN, SCHEDULE
from suture.flare.controller import FederationController
from suture.flare.executor import SiteExecutor
from suture.flare.recipe import export_job
from suture.flare.workspace import fingerprint, read_settings
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, SiteInfo, TaskData
from suture.protocol.packing import unpack

Edit = dict[str, Any]


@pytest.fixture
def fl_ctx(tmp_path: Path) -> FLContext:
    """FLARE's context of a party with the app of an exported demo."""
    (tmp_path / "party" / "startup").mkdir(parents=True)
    (tmp_path / "party" / "local").mkdir()
    workspace = Workspace(str(tmp_path / "party"), "alpha")
    engine = Namespace(get_workspace=lambda: workspace)
    private = {FLContextKey.WORKSPACE_OBJECT: workspace, FLContextKey.JOB_META: {}}
    made = FLContextManager(engine, "alpha", "job", {}, private).new_context()
    job = load_job("demo")
    return place_app(made, job.plan("trial"), job.schedule())


@pytest.fixture
def edit(fl_ctx: FLContext) -> Callable[[str, Edit], None]:
    """Change values of one of the files, as with an editor."""

    def change(name: str, values: Edit) -> None:
        path = Path(fl_ctx.get_engine().get_workspace().get_app_config_dir("job")) / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def test_a_person_reads_the_plan_line_by_line(tmp_path: Path) -> None:
    config = export_job(load_job("demo"), tmp_path, "trial", ("a", "b")) / "app_sites" / "config"
    lines = (config / PLAN).read_text().splitlines()
    assert '  "method": "surgical",' in lines
    assert '      "lr": 0.004,' in lines
    assert not list(config.glob(SCHEDULE)), "only the server may know the labels of a schedule"


def test_an_edited_value_counts(fl_ctx: FLContext, edit: Any) -> None:
    edit(PLAN, {"seed": 5})
    edit(SCHEDULE, {"title": "edited {HOME}"})
    controller = FederationController(PLAN, SCHEDULE)
    server = controller._open(fl_ctx)
    assert (server.plan.seed, server.schedule.title) == (5, "edited {HOME}")
    controller._lock.close()  # type: ignore[union-attr]


def test_a_kit_of_nvflare_package_names_no_folder(fl_ctx: FLContext) -> None:
    placed = read_settings(PLAN, fl_ctx)
    fl_ctx.get_engine().get_workspace().config_folder = ""
    assert read_settings(PLAN, fl_ctx) == placed


def local(**values: Any) -> Edit:
    """The hyperparameters of the demo with other settings of the sites' training."""
    plan = load_job("demo").plan("trial").to_dict()
    plan["hyperparameters"]["local"] |= values
    return {"hyperparameters": plan["hyperparameters"]}


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        (PLAN, {"seed": "one"}, "seed"),
        (PLAN, {"sede": 1}, "missing or unknown key 'sede'"),
        (PLAN, {"transport": "float8"}, "transport"),
        (PLAN, {"method": "no method"}, "unknown method"),
        (PLAN, {"method": "individual"}, "cannot run in a federation"),
        (PLAN, {"code": "0" * 12}, "another version of suture"),
        (PLAN, {"experiment": "../../etc"}, "experiment"),
        (PLAN, local(lr=-1.0), "lr"),
        (PLAN, local(epochs=0), "would not train"),
        (SCHEDULE, {"rounds": 0}, "rounds"),
        (SCHEDULE, {"rounds": "many"}, "rounds"),
        (SCHEDULE, {"patience": 2, "selection": "last"}, "patience=2 has no effect"),
        (SCHEDULE, {"label_map": {"a": 1}}, "label_map"),
    ],
)
def test_an_edited_job_is_validated_as_a_job(
    name: str, values: Edit, says: str, fl_ctx: FLContext, edit: Any
) -> None:
    edit(name, values)
    with pytest.raises(ConfigError, match=says):
        FederationController(PLAN, SCHEDULE)._open(fl_ctx)


@pytest.mark.parametrize("text", ["", "[1]", "null", "{" * 100_000, "{'a': 1}", '{"a": NaN}', None])
def test_a_file_without_a_table_is_refused(text: str | None, fl_ctx: FLContext) -> None:
    path = Path(fl_ctx.get_engine().get_workspace().get_app_config_dir("job")) / PLAN
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json.*export the job again"):
        read_settings(PLAN, fl_ctx)


@pytest.mark.parametrize("name", ['<"seed": 1>', "../plan.json", "/etc/passwd", "", ["plan.json"], None])
def test_a_job_names_no_other_file(name: Any, fl_ctx: FLContext) -> None:
    with pytest.raises(ConfigError, match=r"in place of plan\.json.*`suture export`"):
        FederationController(name, SCHEDULE)._open(fl_ctx)
    with pytest.raises(ConfigError, match=r"in place of plan\.json.*`suture export`"):
        SiteExecutor(name, 2)._open(fl_ctx)


@pytest.mark.parametrize(
    ("values", "rounds", "same"),
    [({}, 2, True), ({"seed": 5}, 2, False), ({}, 3, False)],
)
def test_a_plan_that_was_edited_in_one_app_only_ends_in_an_abstention(
    values: Edit, rounds: int, same: bool, tiny: Any, tmp_path: Path, fl_ctx: FLContext, edit: Any
) -> None:
    federation = tiny(SurgicalAggregation())
    own = federation.configs["alpha"].data
    (tmp_path / "party" / "local" / "suture.toml").write_text(
        f'[data]\ndataset = "hospital"\nroot = "{own.root}"\ntable = "{own.table}"\n'
    )
    place_app(fl_ctx, federation.plan)
    servers = fingerprint(federation.plan.to_dict(), 2)
    edit(PLAN, values)
    answer = SiteExecutor(PLAN, rounds)._answer(TaskData("handshake"), fl_ctx, servers)
    reply = unpack(answer.packed)
    if same:
        assert isinstance(reply, SiteInfo)
    else:
        assert isinstance(reply, Abstain)
        assert (reply.reason, reply.error) == ("configuration", "ConfigError")
        (line,) = (tmp_path / "party" / "suture" / "errors.jsonl").read_text().splitlines()
        assert "change it in every app of the job alike" in json.loads(line)["message"]
