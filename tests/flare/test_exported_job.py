"""An exported job: every argument survives, it names no folder and no foreign label, and FLARE builds it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
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
from nvflare.utils.job_launcher_utils import (
    get_portable_resource_spec,
    resolve_site_resource_spec,
    validate_portable_resource_spec,
)

from small_hospitals import JOB_TOML, LABELS, small_study
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.execution.job import Job, load_job, with_settings
from suture.execution.job_files import jobs_folder, known_jobs
from suture.federation.plan import Plan, Schedule
from suture.flare import EXPERIMENT, PLAN, SCHEDULE, recipe
from suture.flare.compat.bell import TaskNotifier
from suture.flare.compat.plain_json import SIGNED
from suture.flare.executor import EgressFilter
from suture.flare.recipe import export_job, recipe_of
from suture.flare.simulate import simulator_workspace
from suture.flare.workspace import with_own_files
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.priors import PriorSpec
from suture.models.saved import load_model, load_spec, save_model
from suture_papers.fedmas.fedmas import FedMAS
from suture_results.prediction import open_model
from world import refused, suture

TASKS = ["handshake", "mask", "train", "calibrate", "evaluate"]


def built(component: dict[str, Any]) -> Any:
    """The component as FLARE builds it from a configuration."""
    module, _, name = component["path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**component.get("args", {}))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def configs(folder: Path, name: str) -> list[dict[str, Any]]:
    return [read(path) for path in sorted(folder.rglob(name))]


def mentions(folder: Path, word: str) -> list[Path]:
    """The files that have a word."""
    return [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


# What is exported


@pytest.mark.parametrize("name", ["demo", "surgical_nih"])
def test_every_argument_survives_export(name: str, tmp_path: Path) -> None:
    settings = ["rounds=7", "lr=0.0123", "min_sites=2", "max_failed_rounds=5", "seed=9"]
    job = with_settings(load_job(name), settings)
    folder = export_job(job, tmp_path, "trial", ("a", "b"))
    (server,) = configs(folder, "config_fed_server.json")
    assert server["workflows"][0]["args"] == {"plan": PLAN, "schedule": SCHEDULE}
    assert built(server["workflows"][0]).plan == PLAN
    (schedule,) = configs(folder, SCHEDULE)  # in the server's app alone
    assert Schedule.from_dict(schedule) == job.schedule()
    assert [Plan.from_dict(plan) for plan in configs(folder, PLAN)] == [job.plan("trial")] * 2
    assert '  "method": "' in (folder / "app_sites" / "config" / PLAN).read_text(), "nobody can read it"
    # FLARE's own default of 2 s would rule every round.
    assert 0 < server["server"]["task_request_interval"] < 0.5
    (client,) = configs(folder, "config_fed_client.json")  # of both sites, whose apps do not differ
    executor = built(client["executors"][0]["executor"])
    assert (executor.plan, executor.rounds) == (PLAN, 7)
    (entry,) = client["task_result_filters"]
    assert built(entry["filters"][0]).process
    assert set(client["executors"][0]["tasks"]) == set(entry["tasks"]) == set(TASKS)
    meta = read(folder / "meta.json")
    assert meta["deploy_map"] == {"app_server": ["server"], "app_sites": ["a", "b"]}
    assert meta["resource_spec"] == {}
    assert not {"scope", "launcher_spec", "gpus"} & meta.keys()
    assert not list(folder.rglob("custom")), "code travels only where it is asked for"


@pytest.mark.complete
def test_a_bundle_has_one_copy_for_all_sites_whatever_they_are_called(tmp_path: Path) -> None:
    sites = ("server-2", "sites", *(f"site-{i}" for i in range(6)))
    folder = export_job(load_job("demo"), tmp_path, "trial", sites, bundle=True)
    assert sorted(path.name for path in folder.iterdir()) == ["app_server", "app_sites", "meta.json"]
    assert len(list(folder.rglob("surgical.py"))) == 2
    meta = read(folder / "meta.json")
    assert meta["deploy_map"] == {"app_server": ["server"], "app_sites": list(sites)}
    assert meta["min_clients"] == 8


@pytest.mark.parametrize("scheme", ["http", "grpc", ""])
@pytest.mark.parametrize("sites", [(), ("a", "b")])
def test_an_app_that_http_would_lose_is_refused(
    sites: tuple[str, ...],
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recipe, "_HTTP", 1000)
    with refused("http", by=ConfigError) if scheme == "http" else nullcontext():
        export_job(load_job("demo"), tmp_path, "trial", sites, scheme=scheme)
    assert bool(caplog.text) == (scheme == "")
    assert (tmp_path / "demo").exists() == (scheme != "http")


@pytest.mark.parametrize("method", ["surgical", "fedmas"])
def test_an_app_with_the_package_is_small_enough_for_flare(method: str, tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f"method={method}"])
    export_job(job, tmp_path, "trial", ("alpha",), bundle=True, scheme="http")
    assert bool([*tmp_path.rglob("app_alpha/**/phantoms.safetensors")]) == (method == "fedmas")


@pytest.mark.parametrize(
    ("experiment", "bundle", "states"),
    [(None, False, set()), ("trial", False, {"experiment", "code"}), (None, True, {"code"})],
)
def test_a_job_states_what_it_was_made_with_where_it_is_made_for_one_experiment_or_has_the_code(
    experiment: str | None, bundle: bool, states: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "_write_own_distribution", lambda *_: None)
    folder = export_job(load_job("demo"), tmp_path, experiment, bundle=bundle)
    assert {"experiment", "code"} & read(folder / "app/config" / PLAN).keys() == states
    meta = read(folder / "meta.json")
    assert (meta.get(EXPERIMENT), meta["deploy_map"]) == (experiment, {"app": ["@ALL"]})


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
    own = job.plan("trial")
    assert (
        Plan.from_dict({**read(folder / "app/config" / PLAN), "experiment": "trial", "code": own.code}) == own
    )
    assert Schedule.from_dict(read(folder / "app/config" / SCHEDULE)) == job.schedule()


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
    for sites, stays in (((), bool(beside)), (("a", "b"), True)):
        with refused(tmp_path / "demo", by=ConfigError) if stays else nullcontext():
            export_job(load_job("demo"), tmp_path, sites=sites)
    assert files(tmp_path / "demo") == (before if beside else files(jobs_folder() / "demo"))
    assert (tmp_path / "demo" / "job.py").is_file()
    assert beside or not [path for path in tmp_path.rglob("*") if path.name in SIGNED]


def test_gpus_are_flares_resource_of_each_site(tmp_path: Path) -> None:
    own = 'flare.resource_spec={"b": {"mem_per_gpu_in_GiB": 8}, "server": {"num_of_cpus": 2}}'
    image = 'flare.launcher_spec={"default": {"docker": {"image": "registry/suture:1"}}}'
    job = with_settings(load_job("demo"), ["flare.gpus=2", own, image, "flare.scope=suture"])
    meta = read(export_job(job, tmp_path, "trial", ("a", "b")) / "meta.json")
    assert meta["resource_spec"] == {
        "a": {"num_of_gpus": 2},
        "b": {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 8},
        "server": {"num_of_cpus": 2},
    }
    assert meta["scope"] == "suture"
    assert meta["launcher_spec"] == {"default": {"docker": {"image": "registry/suture:1"}}}
    assert get_portable_resource_spec(meta, "a") == {"num_of_gpus": 2}
    suture("export", "demo", "--out", tmp_path / "all", "--gpus", "1")  # whose sites are not named
    meta = read(tmp_path / "all" / "demo" / "meta.json")
    validate_portable_resource_spec(meta["resource_spec"])
    assert resolve_site_resource_spec(meta, "harbor") == {"num_of_gpus": 1}


# What it does not say


def test_no_sites_app_names_a_label(tmp_path: Path) -> None:
    """Neither the classes of a simulation nor the server's label map stand in what a site receives."""
    job: Job = with_settings(load_job("demo"), ["label_map.Nodul=Nodule", 'accept_labels=["Lung Scar"]'])
    folder = export_job(job, tmp_path, "trial", ("harbor", "lakeside"), bundle=True)
    for label in ("Nodul", "Lung Scar", "Mass", "Emphysema", "Atelectasis", "label_map", "accept_labels"):
        assert not mentions(folder / "app_sites" / "config", label)
    assert mentions(folder / "app_server" / "config", "Nodul")
    assert (folder / "app_sites" / "custom" / "suture" / "methods" / "surgical.py").is_file()
    with refused("--sites", by=ConfigError):  # else each would get the server's app
        export_job(job, tmp_path / "all")


@pytest.mark.parametrize(("sites", "bundle"), [((), False), (tuple(LABELS), True)])
def test_an_exported_study_names_no_folder_of_this_machine(
    sites: tuple[str, ...], bundle: bool, tmp_path: Path
) -> None:
    study = small_study(tmp_path / "ward-of-dr-quux" / "quux-study", images=1)
    (study / "job.toml").write_text('name = "lungs"\n' + JOB_TOML)
    out = tmp_path / "exported"
    export_job(load_job(study), out, "lungs-1", sites, bundle)
    assert len(list(out.rglob("*.json"))) >= 3
    for word in (str(tmp_path), "quux"):
        assert not mentions(out, word)
    for word in ("labels.csv", "suture.toml", "images"):  # but in the package, which travels in `custom`
        assert not [path for path in mentions(out, word) if "custom" not in path.parts]
    meta = (out / "lungs" / "meta.json").read_text()
    assert all((site in meta) == bool(sites) for site in LABELS)


def test_the_lead_of_a_study_needs_no_data_to_export_its_job(tmp_path: Path) -> None:
    """In production the hospitals keep their suture.toml; the folder of the lead holds the job alone."""
    (tmp_path / "lungs").mkdir()
    (tmp_path / "lungs" / "job.toml").write_text(JOB_TOML)
    whole = small_study(tmp_path / "whole" / "lungs", images=1)
    exported = [
        export_job(load_job(study), tmp_path / f"exported{i}", "lungs-1", tuple(LABELS))
        for i, study in enumerate((tmp_path / "lungs", whole))
    ]
    assert files(exported[0]) == files(exported[1])


@pytest.mark.complete
def test_an_encoder_beside_the_job_travels_by_its_bare_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is named as on a command line that is typed in its folder."""
    import transformers

    study = small_study(tmp_path / "quux-study", images=1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    config = transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(study / "encoder")
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 16, "width": 16}}
    (study / "encoder" / "preprocessor_config.json").write_text(json.dumps(mean))
    of_study = JOB_TOML.replace('"cnn"', '"hf:encoder"') + 'train = "head"\n'
    (study / "job.toml").write_text('name = "lungs"\n' + of_study)
    monkeypatch.chdir(study / "encoder")
    for place, job in (("a", load_job(study)), ("b", with_settings(load_job(study), ["model.name=hf:."]))):
        exported = export_job(job, tmp_path / place, "lungs-1", tuple(LABELS))
        assert not mentions(exported, "quux")
        models = [plan["model"] for plan in configs(exported, PLAN)]
        assert [(model["name"], model["weights"]) for model in models] == [("hf:vit", "encoder")] * 2
    simulator_workspace(job, tmp_path / "w")
    for path in (study / "encoder").iterdir():
        assert (tmp_path / "w" / "files" / "encoder" / path.name).read_bytes() == path.read_bytes()


# The files that it names


def with_prior(model: ModelSpec | None = None, **prior: Any) -> Job:
    method = FedMAS(prior=PriorSpec(**prior))
    return Job(name="trial", title="Trial", method=method, model=model or ModelSpec(), rounds=2)


@pytest.mark.parametrize("words", ["/etc/passwd", "words.txt", "../words.txt", ""])
def test_no_plan_and_no_saved_model_names_a_file_of_words(words: str, tmp_path: Path) -> None:
    plan = with_prior().plan("trial").to_dict()
    plan["model"]["vocabulary"] = words
    with refused("model.vocabulary", by=ConfigError):
        Plan.from_dict(plan)
    spec = ModelSpec("lstm", vocabulary=("heart", "lung"))
    save_model(build(spec, LabelSet(("Mass",)), 1, pretrained=False), spec, tmp_path, {})
    assert open_model(tmp_path).reads_text
    description = read(tmp_path / "model.json")
    description["model"]["vocabulary"] = words
    (tmp_path / "model.json").write_text(json.dumps(description))
    for reader in (load_model, load_spec, open_model):
        with refused("model.json", by=ConfigError):
            reader(tmp_path)


def test_a_job_that_is_sent_names_files_by_their_bare_names(tmp_path: Path) -> None:
    (tmp_path / "names.safetensors").touch()
    (tmp_path / "job.toml").write_text(
        'rounds = 1\n[method]\nname = "fedmas"\n'
        '[method.prior]\nname = "checkpoint"\npath = "/priors/ours.pt"\n'
        '[model]\nprojection = 128\nrow_init = "named"\nname_vectors = "names.safetensors"\n'
    )
    sent = load_job(tmp_path)
    assert sent.model.name_vectors == str(tmp_path / "names.safetensors")
    folder = export_job(sent, tmp_path / "out", sites=["a"])
    for name in ('"names.safetensors"', '"ours.pt"'):
        assert {path.name for path in mentions(folder, name)} == {PLAN}
    assert not mentions(folder, "/priors/")


PRIOR, EMBEDDING, SERVER = (
    ("method.prior.path",),
    ("model.embedding",),
    ("model.weights", "model.name_vectors"),
)


def prior(name: str) -> dict[str, Any]:
    return {"method": FedMAS(prior=PriorSpec("checkpoint", name) if name else PriorSpec())}


def weights(name: str) -> dict[str, Any]:
    return {"model": ModelSpec("resnet18", weights=name) if name else ModelSpec("resnet18")}


def vectors(name: str) -> dict[str, Any]:
    return {"model": ModelSpec("cnn", row_init="named", name_vectors=name)}


def embedding(name: str) -> dict[str, Any]:
    model = ModelSpec("vectors", embedding=name) if name else ModelSpec("vectors")
    return {"method": SurgicalAggregation(), "model": model}


@pytest.mark.parametrize(
    ("keys", "part", "name", "found"),
    [
        (PRIOR, prior, "own.pt", "FILES/own.pt"),
        *(
            (PRIOR, prior, name, None)
            for name in ("FILES/../secret", "../secret", "~/own.pt", "FILES/own.pt")
        ),
        *((PRIOR, prior, name, None) for name in ("link.pt", "none.pt", "tfidf", "download")),
        (PRIOR, prior, "", ""),  # of the package
        (SERVER, weights, "own.pt", "FILES/own.pt"),
        *((SERVER, weights, name, None) for name in ("/etc/passwd", "FILES/own.pt", "package")),
        *((SERVER, weights, name, name) for name in ("", "download")),
        (SERVER, vectors, "own.pt", "FILES/own.pt"),
        (SERVER, vectors, "/etc/passwd", None),
        (EMBEDDING, embedding, "minilm", "FILES/minilm"),
        (EMBEDDING, embedding, "/etc", None),
        (EMBEDDING, embedding, "", ""),
    ],
)
def test_a_file_is_looked_up_in_the_partys_own_folder(
    keys: tuple[str, ...],
    part: Callable[[str], dict[str, Any]],
    name: str,
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tmp_path / "files"
    (own / "minilm").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (own / "own.pt").touch()
    (own / "link.pt").symlink_to(tmp_path / "secret")
    trial = with_prior().plan("trial")
    plan = dataclasses.replace(trial, **part(name.replace("FILES", str(own))))
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    if found is not None:
        expected = dataclasses.replace(trial, **part(found.replace("FILES", str(own))))
        assert with_own_files(plan, own, *keys) == expected
        return
    with pytest.raises(ConfigError) as caught:
        with_own_files(plan, own, *keys)
    assert any(key in str(caught.value) for key in keys)
    monkeypatch.setenv("SUTURE_SITES", str(tmp_path))  # one person's simulation
    assert with_own_files(plan, own, *keys) == plan


# FLARE's own reading of it


@pytest.mark.parametrize("add", ["client_input", "client_output", "server_input", "server_output"])
def test_a_recipe_is_not_encrypted(add: str) -> None:
    """FLARE's filters for it need TenSEAL even to be imported, so this one only stands where they do."""
    kind = type("HEModelEncryptor", (EgressFilter,), {"__module__": "nvflare.app_opt.he.model_encryptor"})
    made = recipe_of(load_job("demo"), "trial", ("a",))
    with refused("HEModelEncryptor", by=ConfigError):
        getattr(made, f"add_{add}_filter")(kind(), TASKS)
    getattr(made, f"add_{add}_filter")(EgressFilter(), TASKS)


def listed(config: dict[str, Any], *_: Any, **__: Any) -> str:
    """The class_allow_list of a strict policy, which FLARE applies to whatever it takes for a component."""
    return "" if config["path"].startswith(("suture.", "nvflare.")) else f"{config['path']} is not listed"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Any]:
    """FLARE's own configurator, which has built the components of an app."""
    for name in ("_config_path", "_sections"):  # of the whole process
        monkeypatch.setattr(ConfigService, name, type(getattr(ConfigService, name))())

    def configure(folder: Path, party: str) -> Any:
        args = Namespace(
            job_id="job",
            client_name=party,
            workspace=str(folder),
            set=None,
            sp_scheme="grpc",
            sp_target="a:1",
        )
        workspace = SimpleNamespace(get_app_custom_dir=str, get_app_config_dir=str)
        kind, file = ClientJsonConfigurator, "config_fed_client.json"
        if party == "server":
            kind, file = ServerJsonConfigurator, "config_fed_server.json"
        config = folder / f"app_{party}" / "config"
        ConfigService.initialize(section_files={}, config_path=[str(config)])
        made = kind(workspace, str(config / file), args, str(config.parent))
        made.set_component_build_authorizer(listed)
        made.configure()
        return made

    return configure


@pytest.mark.parametrize("path", ["moco_v2_800ep_pretrain.pth.tar", "os.path", "{$HOME}", "{site}.pt"])
def test_flare_itself_builds_the_job_whatever_a_prior_is_called(
    path: str, configured: Any, tmp_path: Path
) -> None:
    settings = ["method.prior.name=checkpoint", f"method.prior.path={path}", "label_map.path=a.b"]
    job = with_settings(load_job("fedmas_isic"), settings)
    folder = export_job(job, tmp_path, "trial", ("alpha",), path.startswith("moco"))
    assert [entry.executor.plan for entry in configured(folder, "alpha").executors] == [PLAN]
    assert [flow.controller.schedule for flow in configured(folder, "server").workflows] == [SCHEDULE]
    assert [Plan.from_dict(plan) for plan in configs(folder, PLAN)] == [job.plan("trial")] * 2
    assert [Schedule.from_dict(schedule) for schedule in configs(folder, SCHEDULE)] == [job.schedule()]


def test_flares_metrics_do_not_time_the_wait_for_a_task(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe_of(load_job("demo"), "trial", ("alpha",))
    made._job.to(JobMetricsCollector({}), "alpha", id="metrics")
    made.export(str(tmp_path))
    seen: list[str] = []
    monkeypatch.setattr(TaskNotifier, "wait", lambda *_: seen.append("waits"))
    monkeypatch.setattr(JobMetricsCollector, "handle_event", lambda *_: seen.append("times"))
    handlers = configured(tmp_path / "demo", "alpha").handlers
    fire_event_to_components(EventType.BEFORE_PULL_TASK, handlers, FLContext())
    assert seen == ["waits", "times"]
