"""Jobs: their settings and files, the bounds of what they may hold, and the command that gives one again."""

from __future__ import annotations

import dataclasses
import operator
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from annotated_types import Le, Lt
from pydantic import AfterValidator, PlainValidator, Strict

from suture.core.errors import ConfigError
from suture.core.files import read_toml
from suture.core.validation import Section
from suture.data.config import SiteConfig
from suture.data.readers import DATASETS
from suture.execution.job import Job, command_of, load_job, with_settings
from suture.execution.job_files import known_jobs, preset_settings
from suture.execution.sites import SIMULATIONS, Simulation
from suture.federation.plan import Plan, Schedule
from suture.methods import METHODS
from suture.methods.surgical import SurgicalAggregation
from suture_papers.fedmas.pretraining import Pretraining
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused, site_config

TOML = 'rounds = 1\n[method]\nname = "surgical"\n[model]\nname = "cnn"\n'


def demo(*settings: str) -> Job:
    return with_settings(load_job("demo"), settings)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_settings_by_path_by_last_word_and_by_method() -> None:
    job = demo("method.local.lr=0.5", "batch_size=7", "seed=3", "simulation.shift=0")
    assert isinstance(job.method, SurgicalAggregation)
    assert (job.method.local.lr, job.method.local.batch_size, job.seed) == (0.5, 7, 3)
    other = with_settings(job, ["method=vanilla"])
    assert other.method.about.name == "vanilla"
    assert other.method.local.lr == 0.5  # type: ignore[attr-defined]
    assert demo("label_map.Nodul=Nodule").label_map == {"Nodul": "Nodule"}
    steps = demo("iterations=2", "epochs=0").method.local
    assert (steps.iterations, steps.epochs) == (2, 0)
    own_flare = demo("flare.scope=suture", "flare.gpus=2", 'flare.resource_spec={"a": {"num_of_cpus": 2}}')
    assert own_flare.flare == {"scope": "suture", "gpus": 2, "resource_spec": {"a": {"num_of_cpus": 2}}}
    assert with_settings(load_job("surgical_nih"), ["simulation.root=data"]).simulation.root == "data"  # type: ignore[union-attr]
    fits = ["iterations=10", "epochs=1", "batch_size=64", "optimiser=sgd", "momentum=0.0"]
    assert demo(*fits, "batch_norm=frozen", "method=metafl").method.about.name == "metafl"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("rouns=3", ["'rouns'", "'rounds'"]),
        ("methd=vanilla", ["'methd'", "'method'"]),
        ("model=cnn", ["'model'", "model.name"]),
        ("method.local.learning=3", ["method.local.learning"]),
        ("method.name=vanilla", ["--set method=vanilla"]),
        ("simulation.kind=StudySites", ["job.toml"]),
        ("method.proximal.mu=1", ["'method.proximal.mu'", "combined, fedprox"]),
        ("method=combined method.proximal.mo=1", ["'method.proximal.mo'", "'method.proximal.mu'"]),
        ("zzz=3", ["'zzz'", "method.local.lr, "]),
        ("contrast=3", ["augmentation.contrast, simulation.contrast"]),
        ("rounds=zero", ["rounds", "'zero'"]),
        ("rounds=0", ["rounds", "1"]),
        ("rounds", ["'rounds'", "'='"]),
        ("lr=-1", ["lr"]),
        ("lr=0", ["lr"]),
        ("batch_size=0", ["batch_size"]),
        ("epochs=0", ["method.local.epochs"]),
        ("method=surgcal", ["'surgical'"]),
        ("method=metafl", ["metafl", "demo", "method.local.iterations"]),
        ("model.name=densnet", ["'densenet121'"]),
        ("batch_norm=local", []),
        ("flare.scop=a", ["'scop'", "'scope'"]),
        ("flare.gpus=-1", ["demo", "flare.gpus=-1"]),
        ("flare.gpus=true", ["flare.gpus"]),
        ("flare.scope=3", ["flare.scope=3"]),
        ("flare.launcher_spec=docker", ["flare.launcher_spec"]),
        ("train=adapter", ["--set train: ", "'adapters'", "'adapter'"]),
        ("model.adapters.targets=[1]", ["--set model.adapters.targets: ", "targets.0"]),
        *((f"{setting}", ["true or false"]) for setting in ("color=yes", "accept_labels=on", "padding=1")),
        *(
            (f"{key}=1000001", [key, "1000000"])
            for key in ("rounds", "round_timeout", "min_sites", "patience")
        ),
        ("seed=1e19", ["seed", "1e+19"]),
        ("method=fedlsm uncertain=10000000", ["uncertain"]),
        *((f"{key}=4097", [key, "4096"]) for key in ("hidden", "projection")),
    ],
)
def test_a_setting_that_does_not_fit(settings: str, named: list[str]) -> None:
    with refused(*named, by=ConfigError):
        demo(*settings.split()).plan("e")


def test_a_name_that_is_a_path_or_commands_the_terminal_is_none() -> None:
    for name in ("../../../x", "[/bold]", "a\x1b[2J", ""):
        with refused("name", by=ConfigError):
            dataclasses.replace(demo(), name=name)


def settings_of(kind: Any, wanted: type, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a dataclass or section, and of those in it, that may be of the wanted type."""
    if kind in seen:
        return
    seen.add(kind)
    own = getattr(kind, "model_fields", None) or {field.name for field in dataclasses.fields(kind)}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if not name.isupper() and name in own:
            yield from _within(f"{kind.__name__}.{name}", hint, wanted, seen)


def _within(
    name: str, hint: Any, wanted: type, seen: set[Any], notes: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    if hint is wanted:
        yield name, notes
    elif isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Section)):
        yield from settings_of(hint, wanted, seen)
    elif found := getattr(hint, "__metadata__", ()):
        yield from _within(name, get_args(hint)[0], wanted, seen, found)
    else:
        for part in get_args(hint):
            yield from _within(name, part, wanted, seen, notes)


def bounded(notes: tuple[Any, ...]) -> bool:
    bounds = [bound for note in notes for bound in getattr(note, "metadata", [note])]
    return any(isinstance(bound, (Le, Lt, AfterValidator, PlainValidator)) for bound in bounds)


OF_JOBS = [Job, Schedule, *METHODS.values(), *get_args(Simulation)]
OF_FILES = [SiteConfig, *(DATASETS.find(name).config for name in sorted(DATASETS.names())), Pretraining]


def test_every_whole_number_of_a_job_has_an_upper_bound() -> None:
    for kind in OF_JOBS:
        found = dict(settings_of(kind, int, set()))
        assert found or kind not in (Job, Schedule)
        assert [name for name, notes in found.items() if not bounded(notes)] == []


def test_no_word_or_number_counts_as_true_or_false() -> None:
    for kind in (*OF_JOBS, *OF_FILES):
        found = dict(settings_of(kind, bool, set()))
        assert found or kind not in (Job, Schedule, SiteConfig)
        loose = [name for name, notes in found.items() if not any(isinstance(one, Strict) for one in notes)]
        assert loose == []


def test_a_site_writes_true_or_false(tmp_path: Path) -> None:
    for key in ("ancestors", "color", "partial", "follow_links"):
        for value in ("yes", 1):
            with refused(f"[data] {key}", "true or false", by=ConfigError):
                site_config(tmp_path, data={"dataset": "hospital", "table": "labels.csv", key: value})


def test_every_job_loads_and_survives_its_configuration() -> None:
    assert {"demo", "surgical_nih"} <= set(known_jobs())
    for name, path in known_jobs().items():
        job = load_job(str(path))
        assert job.name == name
        assert Plan.from_dict(job.plan("e").to_dict()) == job.plan("e")
        assert Schedule.from_dict(job.schedule().to_dict()) == job.schedule()


def test_a_plan_or_schedule_of_another_tool_is_checked_by_who_receives_it() -> None:
    plan = demo().plan("e").to_dict()
    method = {**plan["hyperparameters"], "local": {"lrr": 1}}
    for read, values, named in (
        (Plan.from_dict, {**plan, "hyperparameters": method}, ["'local.lrr'", "'lr'"]),
        (Plan.from_dict, {**plan, "extra": 1}, ["'extra'"]),
        (Plan.from_dict, {**plan, "model": plan["model"] | {"hidden": 10**11}}, ["hidden", 4096]),
        (Schedule.from_dict, {"round": 3}, ["'rounds'"]),
        (Schedule.from_dict, {"name": "a", "title": "a", "rounds": 10**9}, ["schedule: rounds"]),
    ):
        with refused(*named, by=ConfigError):
            read(values)


def test_every_preset_is_a_job_of_the_papers_network(tmp_path: Path) -> None:
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
    assert preset_settings("demo", None) == []
    for job, name in (("demo", "paper"), ("fedlsm_nih", "papr")):
        with refused(name, by=ConfigError):
            preset_settings(job, name)
    for text in ("presets = 3", "presets.paper = 3", "[presets.paper.set]", '[presets.paper]\nnote = ""'):
        with refused("job.toml", by=ConfigError):
            preset_settings(written(tmp_path / "job.toml", text), "paper")


def test_a_job_is_a_name_or_the_path_of_a_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("mine/job.py", "other.py"):
        written(tmp_path / path, known_jobs()["demo"].read_text())
    monkeypatch.chdir(tmp_path)
    for job in (
        tmp_path / "mine",
        Path("mine"),
        "mine",
        "./mine/job.py",
        "other.py",
        Path("mine/../other.py"),
    ):
        assert load_job(job, trust=True) == demo()


@pytest.mark.parametrize(
    ("job", "text", "named"),
    [
        ("dmo", "", ["'demo'"]),
        ("absent/job.py", "", ["'absent/job.py'"]),
        ("flare_fedlsm", "", ["jobs/flare_fedlsm/job.py"]),
        (known_jobs()["demo"].parents[1] / "flare_fedlsm", "", ["jobs/flare_fedlsm/job.py"]),
        ("empty", None, ["empty", "job.toml", "job.py"]),
        ("study/alpha", {"suture.toml": ""}, ["alpha", "name {}/study"]),
        *(("a run", {file: "{}"}, ["suture model export 'a run'"]) for file in ("run.json", "model.json")),
        ("job.py", "x = 1\n", ["job.py", "JOB"]),
        ("job.py", "import nothing_of_this_name", ["job.py", "ModuleNotFoundError", "line 1"]),
        ("job.py", "JOB = (", ["job.py", "SyntaxError"]),
        ("job.py", "from suture import Job\n\nJOB = Job('mine', 'Mine')", ["job.py, line 3", "Job(name="]),
        ("job.py", "from suture import Job\nJOB = Job(name='a', rouns=3)", ["line 2", "'rouns'"]),
        ("job.toml", TOML + '[simulation]\nkind = "NihSite"', ["'NihSite'", "'NihSites'"]),
        ("job.toml", TOML + '[simulation]\nkind = "NihSites"\nclient = 3', ["[simulation]", "'clients'"]),
        ("job.toml", "simulation = 3\n" + TOML, ["[simulation]"]),
    ],
)
def test_what_is_no_job_is_named(
    job: str | Path,
    text: str | dict[str, str] | None,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(text, dict):
        for name, content in text.items():
            written(tmp_path / job / name, content)
    elif text:
        job = written(tmp_path / job, text)
    elif text is None:
        (tmp_path / job).mkdir()
    with refused(*(name.format(tmp_path) for name in named), by=ConfigError):
        load_job(job)


def test_relative_paths_of_a_job_file_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, elsewhere = tmp_path / "mine" / "job.toml", tmp_path / "elsewhere"
    written(elsewhere / "bare", "")
    monkeypatch.chdir(elsewhere)

    def loaded(text: str) -> Any:
        return load_job(written(job, f'rounds = 1\n[method]\nname = "fedmas"\n{text}'))

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
        written(job.parent / (word or "words"), "")
        for value in ("a/b", "./a"):
            assert getattr(loaded(f'[model]\n{name} = "{value}"\n').model, name) == str(job.parent / value)
        for value in ("/a", "bare", *([word] if word else [])):
            assert getattr(loaded(f'[model]\n{name} = "{value}"\n').model, name) == value
    phantoms = loaded('[model]\n[simulation]\nkind = "PhantomSites"\nimages = 27\n').simulation
    assert phantoms == PhantomSites(images=27)
    own = str(written(job.parent / "bare", ""))
    assert loaded('[model]\nweights = "bare"\n').model.weights == own
    assert loaded('[model]\n[method.prior]\npath = "bare"\n').method.prior.path == own


@pytest.mark.parametrize(
    ("method", "table", "field", "value"),
    [
        ("pmfl", "local = { lr = 0.02, iterations = 7 }", "local.optimiser", "sgd"),
        ("pmfl", "[method.server]\nlr = 0.1", "server.optimiser", "adam"),
        ("fedmas", "local = { lr = 0.02 }", "local.epochs", 10),
    ],
)
def test_what_a_part_of_a_method_leaves_out_is_the_methods(
    method: str, table: str, field: str, value: object, tmp_path: Path
) -> None:
    text = f'rounds = 1\n[model]\n[method]\nname = "{method}"\n{table}\n'
    found = load_job(written(tmp_path / "job.toml", text)).method
    assert operator.attrgetter(field)(found) == value
    assert str(getattr(found, field.partition(".")[0]).lr) in table
    with refused("lrr'", "'lr'", by=ConfigError):
        load_job(written(tmp_path / "job.toml", text.replace("lr =", "lrr =")))


def test_the_server_measures_no_model_that_stays_at_a_site() -> None:
    job = with_settings(load_job("surgical_nih"), ["method=pfl"])
    job.schedule()
    for selection in ("server_metric", "server_balanced_accuracy"):
        with refused("selection = 'site_loss'", by=ConfigError):
            with_settings(job, [f"selection={selection}"]).schedule()


def parsed(line: str | None) -> Job:
    """The job of a report's command, taken apart as a shell and the command line would."""
    assert line is not None
    words = shlex.split(line)
    assert words[:2] + words[3:5] == ["suture", "run", "--env", "local"]
    assert words[5::2] == ["--set"] * len(words[5::2])
    return with_settings(load_job(words[2]), words[6::2])


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["method=fedavg", "method.local.lr=0.00123", "patience=2"],
        ["method=vanilla", 'accept_labels=["it\'s", "a \\"b\\" $HOME"]'],
        ["label_map.Fluid=Effusion", "label_map.a b=true blue", "grace=0.5"],
        ['title="2"', "model.dropout=0.25", 'simulation.learning_rates={"harbor": 0.01}'],
    ],
)
def test_the_command_of_a_report_gives_the_same_job(settings: list[str]) -> None:
    assert parsed(command_of(demo(*settings), "local")) == demo(*settings)


def test_the_command_of_a_report_leaves_out_the_defaults_of_a_part_that_was_added() -> None:
    line = command_of(demo("decision.sensitivity=0.8"), "local")
    assert line is not None
    assert "decision.sensitivity=0.8" in line
    assert "decision.cost" not in line


def test_the_command_names_a_job_of_the_repository_or_the_folder_of_a_study(tmp_path: Path) -> None:
    for name in known_jobs():
        assert command_of(load_job(name), "sim") == f"suture run {name} --env sim"
    folder = written(tmp_path / "it's" / "study" / "job.toml", TOML).parent
    job = with_settings(load_job(folder), ["rounds=9"])
    line = command_of(job, "local")
    assert parsed(line) == job
    assert shlex.split(str(line))[2] == str(folder)
    assert command_of(dataclasses.replace(demo(), name="of-my-own"), "local") is None
