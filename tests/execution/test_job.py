"""Jobs and their settings."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import ConfigError
from suture.core.files import read_toml
from suture.execution.job import load_job, with_settings
from suture.execution.job_files import known_jobs, preset_settings
from suture.execution.sites import SIMULATIONS
from suture.federation.plan import Plan, Schedule
from suture.methods.surgical import SurgicalAggregation
from suture_papers.chest_xrays.chest_sites import NihSites
from suture_synthetic.phantom_hospitals import PhantomSites


def test_settings_by_path_by_last_word_and_by_method() -> None:
    job = with_settings(
        load_job("demo"), ["method.local.lr=0.5", "batch_size=7", "seed=3", "simulation.shift=0"]
    )
    assert isinstance(job.method, SurgicalAggregation)
    assert (job.method.local.lr, job.method.local.batch_size, job.seed) == (0.5, 7, 3)
    other = with_settings(job, ["method=vanilla"])
    assert other.method.about.name == "vanilla"
    assert other.method.local.lr == 0.5  # type: ignore[attr-defined]
    assert with_settings(job, ["label_map.Nodul=Nodule"]).label_map == {"Nodul": "Nodule"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rouns=3", "unknown setting 'rouns'; did you mean 'rounds'"),
        ("methd=vanilla", "unknown setting 'methd'; did you mean 'method'"),
        ("model=cnn", "'model' stands for several settings; set one of them: .*model.name"),
        ("method.local.learning=3", "unknown setting"),
        ("method.name=vanilla", "write --set method=vanilla"),
        ("simulation.kind=StudySites", "choose their kind in a job.toml"),
        (
            "method.proximal.mu=1",
            "has no setting 'method.proximal.mu'; combined, fedprox have it: set method",
        ),
        ("zzz=3", r"known: (?!.*, lr, ).*method\.local\.lr, "),
        ("contrast=3", "ambiguous: augmentation.contrast, simulation.contrast"),
        ("rounds=zero", "rounds"),
        ("rounds=0", "at least 1"),
        ("rounds", "no '='"),
        ("lr=-1", "greater than 0"),
        ("method=surgcal", "did you mean 'surgical'"),
        ("model.name=densnet", "did you mean 'densenet121'"),
        ("batch_norm=local", "leaves no global model"),
    ],
)
def test_a_setting_that_does_not_fit(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_settings(load_job("demo"), [setting]).plan("e")


def test_a_typing_error_in_an_optional_part_names_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"'method\.proximal\.mo'; did you mean 'method\.proximal\.mu'"):
        with_settings(load_job("demo"), ["method=combined", "method.proximal.mo=1"])


def test_every_job_loads_and_survives_its_configuration() -> None:
    assert {"demo", "surgical_nih"} <= set(known_jobs())
    for name, path in known_jobs().items():
        job = load_job(str(path))
        assert job.name == name
        assert Plan.from_dict(job.plan("e").to_dict()) == job.plan("e")
        assert Schedule.from_dict(job.schedule().to_dict()) == job.schedule()


def test_every_preset_is_a_job_of_the_papers_network() -> None:
    papers = {}
    for name, path in known_jobs().items():
        for preset in read_toml(path).get("presets", {}) if path.suffix == ".toml" else ():
            job = with_settings(load_job(name), preset_settings(name, preset))
            assert job.schedule().rounds >= load_job(name).rounds
            papers[name, preset] = job.model.name, job.model.size
    assert papers["surgical_nih", "paper"] == papers["fedlsm_isic", "paper"] == ("densenet121", 224)
    assert papers["fedlsm_nih", "paper"] == ("densenet121", 320)
    assert papers["fedmas_isic", "paper"] == papers["fedmas_hyperkvasir", "paper"] == ("resnet18", 224)
    assert papers["pmfl_mimic", "paper"][0] == "lstm"


def test_what_is_no_preset_is_refused(tmp_path: Path) -> None:
    assert preset_settings("demo", None) == []
    for job, name in (("demo", "paper"), ("fedlsm_nih", "papr")):
        with pytest.raises(ConfigError, match="preset"):
            preset_settings(job, name)
    file = tmp_path / "job.toml"
    for text in ("presets = 3", "presets.paper = 3", "[presets.paper.set]", '[presets.paper]\nnote = ""'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="a preset is"):
            preset_settings(file, "paper")


@pytest.mark.parametrize("job", ["flare_fedlsm", known_jobs()["demo"].parents[1] / "flare_fedlsm"])
def test_a_job_of_flares_own_workflow_is_named_with_its_command(job: str | Path) -> None:
    assert "flare_fedlsm" not in known_jobs()
    with pytest.raises(ConfigError, match=r"python .*jobs/flare_fedlsm/job.py"):
        load_job(job)


def test_a_job_is_a_name_or_the_path_of_a_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "job.py").write_bytes(known_jobs()["demo"].read_bytes())
    (tmp_path / "other.py").write_bytes(known_jobs()["demo"].read_bytes())
    demo = load_job("demo")
    monkeypatch.chdir(tmp_path)
    for job in (folder, Path("mine"), "mine", "./mine/job.py", "other.py", Path("mine/../other.py")):
        assert load_job(job, trust=True) == demo
    with pytest.raises(
        ConfigError, match=r"contains neither job\.toml nor job\.py; `suture init` writes one"
    ):
        load_job(tmp_path)
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / "suture.toml").touch()
    with pytest.raises(ConfigError, match=rf"alpha is one site; .*: name {re.escape(str(tmp_path))}$"):
        load_job("alpha")
    with pytest.raises(ConfigError, match=r"unknown job or study folder 'absent/job\.py'"):
        load_job(Path("absent/job.py"))


def test_unknown_job_and_file_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        load_job("dmo")
    (tmp_path / "job.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="defines no JOB"):
        load_job(str(tmp_path / "job.py"))


def test_a_job_of_data_names_the_kind_of_its_simulated_sites(tmp_path: Path) -> None:
    text = 'rounds = 1\n[method]\nname = "surgical"\n[model]\nname = "cnn"\n[simulation]\n'
    path = tmp_path / "job.toml"
    path.write_text(text + 'kind = "PhantomSites"\nimages = 27\n')
    assert load_job(path).simulation == PhantomSites(images=27)
    path.write_text(text + 'kind = "NihSites"\nclients = 3\n')
    assert load_job(path).simulation == NihSites(clients=3)
    path.write_text(text + 'kind = "NihSite"\n')
    with pytest.raises(ConfigError, match="'NihSite'; did you mean 'NihSites'"):
        load_job(path)
    path.write_text(text + 'kind = "NihSites"\nclient = 3\n')
    with pytest.raises(ConfigError, match=r"\[simulation\].*'client'; did you mean 'clients'"):
        load_job(path)
    path.write_text(text.replace("[simulation]\n", "").replace("rounds", "simulation = 3\nrounds"))
    with pytest.raises(ConfigError, match=r"\[simulation\]"):
        load_job(path)


def test_relative_paths_of_a_job_file_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, elsewhere = tmp_path / "mine" / "job.toml", tmp_path / "elsewhere"
    job.parent.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def loaded(text: str) -> Any:
        job.write_text(f'rounds = 1\n[method]\nname = "fedmas"\n{text}')
        return load_job(job)

    settings = [
        (kind, name)
        for kind, sites in SIMULATIONS.items()
        for name, field in sites.__pydantic_fields__.items()  # type: ignore[attr-defined]
        if field.annotation == str | None
    ]
    assert {name for _, name in settings} == {"root", "lists", "tones", "nih", "chexpert"}
    for kind, name in [*settings, ("StudySites", "folder")]:
        for value, place in (("a/b", job.parent / "a/b"), ("a", job.parent / "a"), ("/a", Path("/a"))):
            placed = loaded(f'[model]\n[simulation]\nkind = "{kind}"\n{name} = "{value}"\n')
            assert getattr(placed.simulation, name) == str(place), (kind, name)
    for name, word in (
        *(("weights", "download"), ("name_vectors", None)),
        *(("vocabulary", "clinical"), ("vocabulary", "corpus"), ("embedding", "tfidf")),
    ):
        (job.parent / (word or "words")).touch()
        (elsewhere / "bare").touch()
        for value in ("a/b", "./a"):
            assert getattr(loaded(f'[model]\n{name} = "{value}"\n').model, name) == str(job.parent / value)
        for value in ("/a", "bare", *([word] if word else [])):
            assert getattr(loaded(f'[model]\n{name} = "{value}"\n').model, name) == value
    (job.parent / "bare").touch()
    assert loaded('[model]\nweights = "bare"\n').model.weights == str(job.parent / "bare")
    prior = loaded('[model]\n[method.prior]\npath = "bare"\n').method.prior
    assert prior.path == str(job.parent / "bare")


def test_what_is_set_on_the_command_line_starts_at_the_working_directory() -> None:
    job = with_settings(load_job("surgical_nih"), ["simulation.root=data"])
    assert job.simulation.root == "data"  # type: ignore[union-attr]


def test_a_job_file_whose_job_has_positions_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text('from suture import Job\n\nJOB = Job("mine", "Mine")\n')
    with pytest.raises(ConfigError, match=r"job\.py, line 3: .* write Job\(name=.* in place of Job\('mine'"):
        load_job(path)
    path.write_text('from suture import Job\nJOB = Job(name="mine", title="Mine", rouns=3)\n')
    with pytest.raises(ConfigError, match=r"line 2: unknown key 'rouns'"):
        load_job(path)


def test_an_unknown_key_of_a_plan_or_schedule_is_named() -> None:
    plan = load_job("demo").plan("e").to_dict()
    hyper = {**plan["hyperparameters"], "local": {"lrr": 1}}
    with pytest.raises(ConfigError, match=r"unknown key 'local\.lrr'; did you mean 'lr'"):
        Plan.from_dict({**plan, "hyperparameters": hyper})
    with pytest.raises(ConfigError, match="missing or unknown key 'extra'"):
        Plan.from_dict({**plan, "extra": 1})
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        Schedule.from_dict({"round": 3})


def test_a_job_that_trains_nothing_is_refused_in_one_line() -> None:
    demo = load_job("demo")
    for setting, says in (
        ("epochs=0", "set 1 or more"),
        ("rounds=0", "rounds: .*at least 1"),
        ("lr=0", "lr: .*greater than 0"),
        ("batch_size=0", "batch_size: .*at least 1"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            with_settings(demo, [setting])
        assert "\n" not in str(caught.value)
    steps = with_settings(demo, ["iterations=2", "epochs=0"])
    assert (steps.method.local.iterations, steps.method.local.epochs) == (2, 0)


@pytest.mark.parametrize(
    ("method", "table", "field", "value"),
    [
        ("pmfl", "local = { lr = 0.02, iterations = 7 }", "local.optimiser", "sgd"),
        ("pmfl", "[method.server]\nlr = 0.1", "server.optimiser", "adam"),
        ("fedmas", "local = { lr = 0.02 }", "local.epochs", 10),
        ("surgical", "local = { lr = 0.02 }", "local.batch_size", 64),
    ],
)
def test_what_a_part_of_a_method_leaves_out_is_the_methods(
    method: str, table: str, field: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'rounds = 1\n[model]\n[method]\nname = "{method}"\n{table}\n')
    found = load_job(path).method
    assert operator.attrgetter(field)(found) == value
    assert str(getattr(found, field.partition(".")[0]).lr) in table
    path.write_text(path.read_text().replace("lr =", "lrr ="))
    with pytest.raises(ConfigError, match=r"lrr'; did you mean 'lr'"):
        load_job(path)


@pytest.mark.parametrize("method", ["individual", "pfl"])
def test_the_server_measures_no_model_that_stays_at_a_site(method: str) -> None:
    job = with_settings(load_job("surgical_nih"), [f"method={method}"])
    job.schedule()
    for selection in ("server_metric", "server_balanced_accuracy"):
        with pytest.raises(ConfigError, match=r"keeps its models at the sites.*selection = 'site_loss'"):
            with_settings(job, [f"selection={selection}"]).schedule()


def test_a_method_that_refuses_the_jobs_settings_says_whose_they_are_and_how_to_change_them() -> None:
    demo = load_job("demo")
    with pytest.raises(ConfigError, match=r"keeps the settings of demo's .* set method\.local\.iterations"):
        with_settings(demo, ["method=metafl"])
    before = ["iterations=10", "epochs=1", "batch_size=64", "optimiser=sgd", "momentum=0.0"]
    assert with_settings(demo, [*before, "batch_norm=frozen", "method=metafl"]).method.about.name == "metafl"


def test_what_flare_is_told_of_a_job_is_checked_where_it_is_set() -> None:
    job = with_settings(load_job("demo"), ["flare.scope=suture", "flare.gpus=2"])
    assert job.flare == {"scope": "suture", "gpus": 2}
    spec = with_settings(job, ['flare.resource_spec={"a": {"num_of_cpus": 2}}']).flare["resource_spec"]
    assert spec == {"a": {"num_of_cpus": 2}}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("flare.scop=a", "unknown setting of flare 'scop'; did you mean 'scope'"),
        ("flare.gpus=-1", r"demo: flare\.gpus=-1: give a number, 0 or more"),
        ("flare.gpus=true", "give a number, 0 or more"),
        ("flare.scope=3", "give a name"),
        ("flare.launcher_spec=docker", "give a table"),
    ],
)
def test_what_flare_would_not_take_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_settings(load_job("demo"), [setting])


@pytest.mark.parametrize("file", ["run.json", "model.json"])
def test_a_trained_model_in_place_of_a_job_is_told_where_models_are_exported(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / file).write_text("{}")
    with pytest.raises(ConfigError, match=r"not a job; to export the model: suture model export '.*a run'"):
        load_job(tmp_path / "a run")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.train=adapter", "--set model.train: must be 'all', 'adapters' or 'head' (got 'adapter')"),
        ("train=adapter", "--set train: must be 'all', 'adapters' or 'head' (got 'adapter')"),
        ("model.adapters.targets=[1]", "--set model.adapters.targets: targets.0: must be text (got 1)"),
    ],
)
def test_a_refused_value_has_its_key_once(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_settings(load_job("demo"), [setting]).plan("e")
    assert str(refused.value).startswith(message)
