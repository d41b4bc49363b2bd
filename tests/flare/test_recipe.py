"""An exported job: every argument survives, and no site's app names a foreign label."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.event import fire_event_to_components
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.metrics.job_metrics_collector import JobMetricsCollector
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator

from suture.core.errors import ConfigError
from suture.execution.job import Job, load_job, with_settings
from suture.execution.job_files import jobs_folder, known_jobs
from suture.federation.plan import Plan, Schedule
from suture.flare import EXPERIMENT, PLAN, SCHEDULE, recipe
from suture.flare.compat.bell import TaskNotifier
from suture.flare.compat.plain_json import SIGNED
from suture.flare.executor import EgressFilter
from suture.flare.recipe import export_job, recipe_of

TASKS = ["handshake", "mask", "train", "calibrate", "evaluate"]
JOBS = ["demo", "surgical_nih"]


def built(component: dict[str, Any]) -> Any:
    """The component as FLARE builds it from a configuration."""
    module, _, name = component["path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**component.get("args", {}))


def configs(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob(name))]


@pytest.mark.parametrize("name", JOBS)
def test_every_argument_survives_export(name: str, tmp_path: Path) -> None:
    job = with_settings(
        load_job(name), ["rounds=7", "lr=0.0123", "min_sites=2", "max_failed_rounds=5", "seed=9"]
    )
    folder = export_job(job, tmp_path, "trial", ("a", "b"))
    (server,) = configs(folder, "config_fed_server.json")
    assert server["workflows"][0]["args"] == {"plan": PLAN, "schedule": SCHEDULE}
    assert built(server["workflows"][0]).plan == PLAN
    (schedule,) = configs(folder, SCHEDULE)
    assert Schedule.from_dict(schedule) == job.schedule()
    assert [Plan.from_dict(plan) for plan in configs(folder, PLAN)] == [job.plan("trial")] * 2
    assert (
        0 < server["server"]["task_request_interval"] < 0.5
    )  # FLARE's own default of 2 s would rule every round
    (client,) = configs(folder, "config_fed_client.json")  # of both sites, whose apps do not differ
    executor = built(client["executors"][0]["executor"])
    assert (executor.plan, executor.rounds) == (PLAN, 7)
    assert set(client["executors"][0]["tasks"]) == set(TASKS)
    (entry,) = client["task_result_filters"]
    assert built(entry["filters"][0]).process
    assert set(entry["tasks"]) == set(TASKS)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["deploy_map"] == {"app_server": ["server"], "app_sites": ["a", "b"]}


@pytest.mark.complete
def test_a_bundle_has_one_copy_for_all_sites_whatever_they_are_called(tmp_path: Path) -> None:
    sites = ("server-2", "sites", *(f"site-{i}" for i in range(6)))
    folder = export_job(load_job("demo"), tmp_path, "trial", sites, bundle=True)
    assert sorted(path.name for path in folder.iterdir()) == ["app_server", "app_sites", "meta.json"]
    assert len(list(folder.rglob("surgical.py"))) == 2
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["deploy_map"] == {"app_server": ["server"], "app_sites": list(sites)}
    assert meta["min_clients"] == 8


@pytest.mark.parametrize("scheme", ["http", "grpc", ""])
@pytest.mark.parametrize("sites", [(), ("a",), ("a", "b")])
def test_an_app_that_http_would_lose_is_refused(
    sites: tuple[str, ...],
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recipe, "_HTTP", 1000)
    with pytest.raises(ConfigError, match="http loses") if scheme == "http" else nullcontext():
        export_job(load_job("demo"), tmp_path, "trial", sites, scheme=scheme)
    assert ("http loses" in caplog.text) == (scheme == "")
    assert (tmp_path / "demo").exists() == (scheme != "http")


def test_constructors_are_closed_and_keep_what_they_are_given() -> None:
    """FLARE exports an argument only if it is kept under its own name."""
    from suture.flare.controller import FederationController
    from suture.flare.executor import SiteExecutor

    for kind in (FederationController, SiteExecutor):
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        source = inspect.getsource(kind.__init__)
        assert all(f"self.{p.name} = {p.name}" in source for p in parameters)


def test_no_sites_app_names_a_label(tmp_path: Path) -> None:
    """Neither the classes of a simulation nor the server's label map stand in what a site receives."""
    job: Job = with_settings(load_job("demo"), ["label_map.Nodul=Nodule", 'accept_labels=["Lung Scar"]'])
    folder = export_job(job, tmp_path, "trial", ("harbor", "lakeside"), bundle=True)
    text = "\n".join(p.read_text() for p in folder.glob("app_sites/config/*"))
    for label in ("Nodul", "Lung Scar", "Mass", "Emphysema", "Atelectasis", "label_map", "accept_labels"):
        assert label not in text
    assert "Nodul" in "\n".join(p.read_text() for p in folder.glob("app_server/config/*"))
    assert (folder / "app_sites" / "custom" / "suture" / "methods" / "surgical.py").is_file()


def test_unnamed_sites_and_a_label_map_do_not_go_together(tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), ["label_map.Nodul=Nodule"])
    with pytest.raises(ConfigError, match="--sites"):
        export_job(job, tmp_path)


def test_one_app_for_all_where_sites_are_not_named(tmp_path: Path) -> None:
    folder = export_job(load_job("demo"), tmp_path, "trial")
    assert json.loads((folder / "meta.json").read_text())["deploy_map"] == {"app": ["@ALL"]}
    with pytest.raises(ConfigError, match="already exists"):
        export_job(load_job("demo"), tmp_path, "trial")


def files(folder: Path) -> dict[str, str]:
    """The content of each file but the job's own and the console's signatures, by its path in the folder."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stem != "job"]
    found = [path for path in found if path.name not in SIGNED]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


@pytest.mark.parametrize("name", known_jobs())
def test_each_folder_of_jobs_is_what_export_writes_now(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    folder = export_job(job, tmp_path)
    assert files(folder) == files(jobs_folder() / name), "write it: python benchmarks/reference.py"
    plan, schedule = (json.loads((folder / "app" / "config" / file).read_text()) for file in (PLAN, SCHEDULE))
    assert not {"experiment", "code"} & plan.keys(), "it would be another one after the next edit"
    own = job.plan("trial")
    assert Plan.from_dict({**plan, "experiment": "trial", "code": own.code}) == own
    assert Schedule.from_dict(schedule) == job.schedule()


@pytest.mark.parametrize(
    ("experiment", "bundle", "states"),
    [(None, False, set()), ("trial", False, {"experiment", "code"}), (None, True, {"code"})],
)
def test_a_job_states_what_it_was_made_with_where_it_is_made_for_one_experiment_or_has_the_code(
    experiment: str | None, bundle: bool, states: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "_write_own_distribution", lambda *_: None)
    folder = export_job(load_job("demo"), tmp_path, experiment, bundle=bundle)
    assert {"experiment", "code"} & json.loads((folder / "app/config" / PLAN).read_text()).keys() == states
    meta = json.loads((folder / "meta.json").read_text())
    assert meta.get(EXPERIMENT) == experiment


@pytest.mark.parametrize("beside", [None, "alpha/labels.csv", "app_server/x", "notes.txt"])
def test_a_job_is_written_beside_its_own_file_and_nothing_else(beside: str | None, tmp_path: Path) -> None:
    """FLARE sends the whole folder to the server: of a study, the patients' data."""
    shutil.copytree(jobs_folder() / "demo", tmp_path / "demo")
    (tmp_path / "demo" / "app" / "config" / "old.json").touch()
    for name in SIGNED:  # of an earlier submission
        (tmp_path / "demo" / name).touch()
    if beside:
        (tmp_path / "demo" / beside).parent.mkdir(exist_ok=True)
        (tmp_path / "demo" / beside).write_text("a,b")
    before = files(tmp_path / "demo")
    for sites, refused in (((), bool(beside)), (("a", "b"), True)):
        with pytest.raises(ConfigError, match="already exists") if refused else nullcontext():
            export_job(load_job("demo"), tmp_path, sites=sites)
    own = files(jobs_folder() / "demo")
    assert files(tmp_path / "demo") == (before if beside else own)
    assert (tmp_path / "demo" / "job.py").is_file()
    assert beside or not [path for path in tmp_path.rglob("*") if path.name in SIGNED]


def test_code_travels_only_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = export_job(load_job("demo"), tmp_path, "trial", ("a",))
    assert not list(folder.rglob("custom"))


@pytest.mark.parametrize("add", ["client_input", "client_output", "server_input", "server_output"])
def test_a_recipe_is_not_encrypted(add: str) -> None:
    """FLARE's filters for it need TenSEAL even to be imported, so this one only stands where they do."""
    kind = type("HEModelEncryptor", (EgressFilter,), {"__module__": "nvflare.app_opt.he.model_encryptor"})
    recipe = recipe_of(load_job("demo"), "trial", ("a",))
    with pytest.raises(ConfigError, match="HEModelEncryptor: homomorphic encryption is not supported"):
        getattr(recipe, f"add_{add}_filter")(kind(), TASKS)
    getattr(recipe, f"add_{add}_filter")(EgressFilter(), TASKS)


def listed(config: dict[str, Any], *_: Any, **__: Any) -> str:
    """The class_allow_list of a strict policy, which FLARE applies to whatever it takes for a component."""
    return "" if config["path"].startswith(("suture.", "nvflare.")) else f"{config['path']} is not listed"


def configurator(folder: Path, app: str) -> Any:
    """FLARE's own configurator, which has built the components of an app."""
    site = app.removeprefix("app_")
    args = Namespace(
        job_id="job", client_name=site, workspace=str(folder), set=None, sp_scheme="grpc", sp_target="a:1"
    )
    workspace = SimpleNamespace(get_app_custom_dir=str, get_app_config_dir=str)
    kind, file = ClientJsonConfigurator, "config_fed_client.json"
    if site == "server":
        kind, file = ServerJsonConfigurator, "config_fed_server.json"
    ConfigService.initialize(section_files={}, config_path=[str(folder / app / "config")])
    made = kind(workspace, str(folder / app / "config" / file), args, str(folder / app))
    made.set_component_build_authorizer(listed)
    made.configure()
    return made


def test_flares_metrics_do_not_time_the_wait_for_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_config_path", "_sections"):  # of the whole process
        monkeypatch.setattr(ConfigService, name, type(getattr(ConfigService, name))())
    recipe = recipe_of(load_job("demo"), "trial", ("alpha",))
    recipe._job.to(JobMetricsCollector({}), "alpha", id="metrics")
    recipe.export(str(tmp_path))
    seen: list[str] = []
    monkeypatch.setattr(TaskNotifier, "wait", lambda *_: seen.append("waits"))
    monkeypatch.setattr(JobMetricsCollector, "handle_event", lambda *_: seen.append("times"))
    fire_event_to_components(
        EventType.BEFORE_PULL_TASK, configurator(tmp_path / "demo", "app_alpha").handlers, FLContext()
    )
    assert seen == ["waits", "times"]


@pytest.mark.parametrize("method", ["surgical", "fedmas"])
def test_an_app_with_the_package_is_small_enough_for_flare(method: str, tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f"method={method}"])
    export_job(job, tmp_path, "trial", ("alpha",), bundle=True, scheme="http")
    assert bool([*tmp_path.rglob("app_alpha/**/phantoms.safetensors")]) == (method == "fedmas")


@pytest.mark.parametrize(
    ("path", "bundle"),
    [
        ("moco_v2_800ep_pretrain.pth.tar", True),
        ("os.path", False),
        ("{$HOME}", False),
        ("{site}.pt", False),
    ],
)
def test_flare_itself_builds_the_job_whatever_a_prior_is_called(
    path: str, bundle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_config_path", "_sections"):  # of the whole process
        monkeypatch.setattr(ConfigService, name, type(getattr(ConfigService, name))())
    job = with_settings(
        load_job("fedmas_isic"),
        ["method.prior.name=checkpoint", f"method.prior.path={path}", "label_map.path=a.b"],
    )
    folder = export_job(job, tmp_path, "trial", ("alpha",), bundle)
    assert [entry.executor.plan for entry in configurator(folder, "app_alpha").executors] == [PLAN]
    assert [flow.controller.schedule for flow in configurator(folder, "app_server").workflows] == [SCHEDULE]
    for plan in configs(folder, PLAN):
        assert Plan.from_dict(plan) == job.plan("trial")
    (schedule,) = configs(folder, SCHEDULE)
    assert Schedule.from_dict(schedule) == job.schedule()
