"""Jobs: what is trained, how, and (for a simulation) on which sites.

Each `jobs/NAME/` defines one: its `job.toml` where it is data, its `job.py` where it is code.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import shlex
import sys
import traceback
import types
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, SutureError, show_value, unknown
from suture.core.files import read_regular, read_toml
from suture.core.labels import as_job, check_job
from suture.core.ontology import study_atlas
from suture.core.validation import (
    LARGEST_SEED,
    LIMIT,
    NAMED_FILE,
    STRICT,
    bare,
    parse,
    refusal,
    with_paths,
)
from suture.data.batch import Augmentation
from suture.data.embedding import TFIDF
from suture.execution.job_files import job_file, known_jobs
from suture.execution.sites import SIMULATIONS, Simulation
from suture.execution.study import StudySites
from suture.federation.plan import Plan, Schedule, check_fits, check_secure, code_hash
from suture.federation.server.checks import check_has_models
from suture.methods import METHODS, method_class
from suture.methods.base import Method
from suture.methods.source import source_of
from suture.models import CORPUS, WEIGHTS, ModelSpec, encoder_of, is_stored, self_contained, vocabulary_of
from suture.models.documents import with_digest
from suture.privacy.secure_aggregation import SecureAggregation
from suture.protocol.packing import Transport

_FLARE: dict[str, tuple[type, str]] = {
    "scope": (str, "a name"),
    "gpus": (int, "a number, 0 or more"),
    "resource_spec": (dict, "a table"),
    "launcher_spec": (dict, "a table"),
}
"""The entries of `Job.flare`, with the type of each and how a message calls it."""

T = TypeVar("T")

TUNED = "tuned.json"
"""File of a run folder with the figures of fine-tuning."""


@validated(frozen=True, config=STRICT)
class FineTuning:
    """How a trained model is trained further on a learning task that no site has (PMFL, arXiv:2112.05321).

    Attributes:
        runs: random splits of the data; each run trains a model on one of them.
        epochs, batch_size, lr: of Adam, whose state is new in each run.
        test: share of the data in the test part.
        examples: maximum number of training examples; the others are the test part. None trains on all
            outside of the test part.
        few: if set, each target is also trained on at most this many examples, as a task of its own.
        start: ``model`` starts from the trained model, ``fresh`` from random weights, for comparison.
    """

    runs: Annotated[int, Field(ge=1, le=LIMIT)] = 5
    epochs: Annotated[int, Field(ge=1, le=LIMIT)] = 10
    batch_size: Annotated[int, Field(ge=2, le=LIMIT)] = 64
    lr: Annotated[float, Field(gt=0)] = 1e-3
    test: Annotated[float, Field(gt=0, lt=1)] = 0.1
    examples: Annotated[int, Field(ge=4, le=LIMIT)] | None = None
    few: Annotated[int, Field(ge=4, le=LIMIT)] | None = None
    start: Literal["model", "fresh"] = "model"


@validated(frozen=True, kw_only=True, config=STRICT)
class Job(Schedule):
    """One federated training job: what its server needs to know, and what all parties do.

    Attributes that are not described here are those of `Plan` and `Schedule`.

    Attributes:
        simulation: the simulated sites; None for a job of real sites only.
        shared_with: names of FLARE users who, besides the submitter, may continue the experiment. Others are
            refused.
        finetuning: how the global model is fine-tuned on tasks that no site has; None for no fine-tuning.
        flare: what FLARE is told of the job: ``scope``, ``gpus`` of each site, and ``resource_spec`` and
            ``launcher_spec`` as FLARE documents them.

    Raises:
        ConfigError: the name cannot be used in a path, the sites would train nothing, or `flare` has
            something else.
    """

    method: Method
    model: ModelSpec
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1
    augmentation: Augmentation = dataclasses.field(default_factory=Augmentation)
    transport: Transport = "float32"
    secure_aggregation: SecureAggregation | None = None
    shared_with: tuple[str, ...] = ()
    simulation: Simulation | None = None
    finetuning: FineTuning | None = None
    flare: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # `schedule` checks whether its settings contradict one another: --set changes them one at a time.
        check_job(self.name)
        for key, value in self.flare.items():
            if key not in _FLARE:
                raise unknown("setting of flare", key, _FLARE)
            kind, form = _FLARE[key]
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise ConfigError(f"{self.name}: flare.{key}={show_value(value)}: give {form}")
        check_trains(self.method)

    def plan(self, experiment: str) -> Plan:
        """Return the part of the job that every party receives.

        Args:
            experiment: identifier under which the parties store their state.
        """
        code = code_hash(type(self.method))
        rest = self.seed, experiment, code, self.transport, self.secure_aggregation
        return Plan(self.method, self._model(), self.augmentation, *rest)

    def _model(self) -> ModelSpec:
        """Return the model with what other parties lack: words, configuration of the encoder, digest."""
        spec = with_digest(self_contained(self.model))
        if encoder_of(spec).reads != "text" or spec.vocabulary == "clinical":
            return spec
        return dataclasses.replace(spec, vocabulary=vocabulary_of(spec).words)

    def schedule(self) -> Schedule:
        """Return the part of the job that only the server receives.

        Raises:
            ConfigError: the method needs more rounds, cannot be merged as `robust` says, or keeps the models
                that the server is to measure.
        """
        check_has_models(self.selection, self.method)
        self.method.phases(self.rounds)
        check_fits(self.robust, self.method)
        check_secure(self.secure_aggregation, self.method, self.robust, self.transport)
        return Schedule(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Schedule)})

    def _repr_html_(self) -> str:
        """What a notebook shows: the title, and every setting."""
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in settings_of(self).items()
        )
        return f"<p><b>{escape(self.title)}</b></p><table>{rows}</table>"


def load_job(job: str | Path, *, trust: bool = False) -> Job:
    """Return the job of that name in jobs/, or the job that a file or folder defines.

    Args:
        job: a name, or the path of a job file, or of the folder of a job.py or job.toml; it may be relative.
        trust: whether the job.py of a folder may be run, although somebody else may have written it. Without
            it, only jobs of this package and a .py file that `job` names itself are run.

    Raises:
        ConfigError: there is none, it is code that may not be run, or the file fails or defines no JOB.
    """
    path = job_file(job, trust=trust)
    return _with_atlas(_read_toml(path) if path.suffix == ".toml" else _run(path), path.parent)


def _with_atlas(job: Job, study: Path) -> Job:
    """Return the job with the parents, and the decisions about names, in the labels.toml beside it; the job's
    own go first.
    """
    atlas = study_atlas(study)
    if not job.parents:
        job = dataclasses.replace(job, parents=dict(atlas.relations().parents))
    if not atlas.decisions:
        return job
    same = {name: atlas.name(name) for name, _ in atlas.list_decisions("same")}
    accepted: bool | tuple[str, ...] = job.accept_labels
    if accepted is not True:
        accepted = (*(accepted or ()), *(name for name, _ in atlas.list_decisions("different"))) or False
    return dataclasses.replace(job, label_map=same | job.label_map, accept_labels=accepted)


def _run(path: Path) -> Job:
    """Return the job that a file of Python defines.

    Raises:
        ConfigError: the file fails, or defines no JOB.
    """
    module = types.ModuleType(f"suture_job_{path.parent.name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        # Not by an import, which may take bytecode that lies beside the file and says something else.
        exec(compile(read_regular(path), path, "exec"), vars(module))  # noqa: S102
    except SutureError:
        raise
    except Exception as error:  # whatever a file of a user does
        lines = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ValidationError):
            own = [line.lineno for line in lines if line.filename == str(path)]
            raise refusal(error, f"{path}, line {own[-1]}") from error
        line = lines[-1]
        where = f"{line.filename}, line {line.lineno}"
        raise ConfigError(f"{path} cannot be run: {type(error).__name__}: {error} ({where})") from error
    defined = getattr(module, "JOB", None)
    if not isinstance(defined, Job):
        raise ConfigError(f"{path} defines no JOB; it needs a line JOB = Job(...)")
    return beside(defined, path.parent)


def beside(job: Job, folder: Path) -> Job:
    """Return the job of a file in a folder, at which its relative paths start.

    A job without a simulation has the sites of its folder, if there are any.
    """
    if job.simulation is None and StudySites(str(folder)).find_sites():
        job = dataclasses.replace(job, simulation=StudySites())
    return job_in_folder(job, folder)


def job_in_folder(settings: T, folder: Path) -> T:
    """Return a job, or a part of it, whose relative paths start at a folder; files that others hold stay."""
    words = {"clinical", CORPUS, TFIDF, *WEIGHTS}

    def placed(key: str, value: str, mark: str) -> str:
        family, colon, name = value.partition(":") if key == "model.name" else ("", "", value)
        if colon and is_stored(value):
            return f"{family}:{placed('', name, mark)}"
        if key == "model.name":
            return value
        path = folder / Path(value).expanduser()
        elsewhere = mark == NAMED_FILE and (value in words or not ("/" in value or path.exists()))
        return value if elsewhere else str(path)

    return with_paths(settings, placed)


def _read_toml(path: Path) -> Job:
    """Return the job that a TOML file describes; the sites are those of its folder.

    The keys are those of a `Job`; ``[method]`` has the method's name and its hyperparameters.

    Raises:
        ConfigError: the file is not TOML, or a key is unknown, missing or out of range.
    """
    try:
        values = read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    chosen = values.get("method")
    if not isinstance(chosen, dict) or not isinstance(chosen.get("name"), str):
        raise ConfigError(f'{path}: name the method under [method]: name = "surgical"')
    kind = method_class(chosen["name"])
    parameters = {key: value for key, value in chosen.items() if key != "name"}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        usual, own = _default(field), parameters.get(field.name)
        if isinstance(own, dict) and dataclasses.is_dataclass(usual):  # of a part, the rest is the method's
            parameters[field.name] = {k.name: getattr(usual, k.name) for k in dataclasses.fields(usual)} | own
    method = parse(kind, parameters, f"{path}: [method]")
    folder = path.parent
    values.pop("presets", None)  # see `preset_settings`
    given = {"name": as_job(folder.name), "title": folder.name, **values, "method": method}
    sites = _sites(given.pop("simulation", {}), f"{path}: [simulation]")
    return beside(parse(Job, given | {"simulation": sites}, str(path)), folder)


def _sites(values: Any, where: str) -> Simulation:
    """Return the simulated sites of a job's section, whose `kind` names their class; by default a study."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is not a section; write its keys below it")
    kind = SIMULATIONS.find(str(values.get("kind", StudySites.__name__)))
    return parse(kind, {key: value for key, value in values.items() if key != "kind"}, where)


def check_trains(method: Method) -> None:
    """Raise `ConfigError` if a method's settings leave the sites nothing to train."""
    if not (method.local.epochs or method.local.iterations):
        raise ConfigError("method.local.epochs=0 would not train; set 1 or more, or local.iterations")


def check_federated(method: Method) -> None:
    """Check that a method can run in a federation of several processes.

    Raises:
        ConfigError: the method exchanges nothing or needs the pooled data, would not train, or is in no
            installed package, so that no other process can load it.
    """
    check_trains(method)
    if method.about.local_only:
        raise ConfigError(
            f"{method.about.title} {method.about.local_only}, so it cannot run in a federation; "
            "use --env local"
        )
    source_of(type(method))


def check_finetuning(job: Job) -> None:
    """Check, before anything is trained, that the model of a job can be fine-tuned where the job says so.

    Raises:
        ConfigError: the method leaves no global model, or the simulation has no task to fine-tune on.
    """
    if job.finetuning is None:
        return
    if job.method.sharing.personal != "nothing":
        raise ConfigError(
            f"{job.method.about.title} does not produce a global model to fine-tune; choose another method"
        )
    if not getattr(job.simulation, "targets", ()):
        raise ConfigError(f"{job.name} has no task to fine-tune on; name some in simulation.targets")


def with_settings(job: Job, settings: Iterable[str]) -> Job:
    """Return the job with `key=value` settings applied, e.g. ``method.local.lr=1e-3``.

    A key is a dotted path, or the last word of one where that is unambiguous. Values are JSON, else text.

    Raises:
        ConfigError: an unknown or ambiguous key (names the nearest), or a value that does not fit.
    """
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting!r} has no '='; write key=value")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        if key.strip() in ("simulation.kind", "simulation"):
            raise ConfigError(
                f"--set {setting}: --set changes settings of simulated sites, not which sites; choose their "
                "kind in a job.toml, as `kind` below [simulation]"
            )
        if key.strip() == "method.name":
            raise ConfigError(f"--set {setting}: write --set method={text}")
        job = (
            _with_method(job, text)
            if key.strip() == "method"
            else with_setting(job, _path(job, key.strip()), value, key)
        )
    return job


def _with_method(job: Job, name: str) -> Job:
    """Return the job with another method, its title, and what the job has set that both methods have.

    What the job has left at its method's default takes that of the other method; local training and batch
    norm are the job's in any case, so that both methods train alike.

    Raises:
        ConfigError: the other method refuses what the job has set.
    """
    kind = method_class(name)
    fields = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    shared = {}
    for field in dataclasses.fields(job.method):  # type: ignore[arg-type]
        value = getattr(job.method, field.name)
        if field.name in fields and (field.name in ("local", "batch_norm") or value != _default(field)):
            shared[field.name] = value
    title = job.title.replace(job.method.about.title, kind.about.title)
    try:
        method = parse(kind, shared, "method")
    except ConfigError as refusal:
        raise ConfigError(
            f"--set method={name} keeps the settings of {job.name}'s method, and {kind.about.title} "
            f"refuses them: {refusal}. Change them with --set before it, or use a job that is made for "
            "the method"
        ) from refusal
    return dataclasses.replace(job, method=method, title=title)


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def leaves(value: Any, prefix: tuple[str, ...] = (), *, absent: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the path of every setting of a value by its dotted name; a table of free keys counts as one.

    Args:
        absent: with the settings of optional parts that are not there, which setting one of them adds.
    """
    paths: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(value):
        path, inner = (*prefix, field.name), getattr(value, field.name)
        if not dataclasses.is_dataclass(inner):
            paths[".".join(path)] = path
            inner = _optional_part(value, field.name) if absent and inner is None else None
        if inner is not None:
            paths |= leaves(inner, path, absent=absent)
    return paths


def _optional_part(value: Any, name: str) -> Any:
    """Return the part that an optional field would hold, as it is by default; None if it holds none."""
    kind: Any = bare(type(value).__pydantic_fields__[name].annotation)
    return kind() if hasattr(kind, "__dataclass_fields__") else None


def settings_of(job: Job) -> dict[str, Any]:
    """Return the value of every setting of a job by its dotted name."""
    return {name: operator.attrgetter(name)(job) for name in leaves(job)}


def _path(job: Job, key: str) -> tuple[str, ...]:
    present = leaves(job)
    if path := present.get(key) or (possible := leaves(job, absent=True)).get(key):
        return path
    if table := next((table for table in ("label_map", "flare") if key.startswith(f"{table}.")), ""):
        return (table, key.removeprefix(f"{table}."))
    ends = [path for path in present.values() if path[-1] == key]
    if len(ends) > 1:
        raise ConfigError(f"{key!r} is ambiguous: {', '.join('.'.join(p) for p in ends)}; write one of them")
    if inside := [name for name in present if name.startswith(f"{key}.")]:
        raise ConfigError(
            f"{key!r} stands for several settings; set one of them: {', '.join(sorted(inside))}"
        )
    if not ends:
        if others := _methods_with(key):
            raise ConfigError(
                f"{job.method.about.title} has no setting {key!r}; {', '.join(others)} "
                f"{'has' if len(others) == 1 else 'have'} it: set method before it"
            )
        first, _, last = key.rpartition(".")
        for path in present.values():
            if first and path[0] == key.split(".")[0] and path[-1] == last:
                raise ConfigError(f"unknown setting {key!r}; did you mean {'.'.join(path)!r}?")
        raise unknown(
            "setting", key, {*possible, "method", *(path[-1] for path in present.values())}, listed=present
        )
    return ends[0]


def _methods_with(key: str) -> list[str]:
    """The names of this package's methods that have a setting."""
    return [name for name, kind in METHODS.items() if key in leaves(kind(), ("method",), absent=True)]


def with_setting(value: Any, path: tuple[str, ...], new: Any, key: str) -> Any:
    """Return a copy of a nested value with one setting replaced and validated."""
    name, *rest = path
    if isinstance(value, dict):
        return {**value, name: new}
    part = getattr(value, name)
    if part is None and rest:
        part = _optional_part(value, name)
    inner = with_setting(part, tuple(rest), new, key) if rest else new
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return parse(type(value), {**fields, name: inner}, f"--set {key}")


# The command line of a job
def command_of(job: Job, env: str) -> str | None:
    """Return a command line, quoted for a POSIX shell, that runs an equal job.

    Returns:
        None where there is none: the job is no file in jobs/ and no study folder, or it differs from its file
        in what ``--set`` cannot express.
    """
    source = job.name if job.name in known_jobs() else None
    if isinstance(job.simulation, StudySites):
        source = job.simulation.folder
    if source is None:
        return None
    try:
        settings = _differing(load_job(source), job)
        if with_settings(load_job(source), settings) != job:
            return None
    except (SutureError, TypeError):  # a file that has changed since, or a value that JSON has not
        return None
    options = [option for setting in settings for option in ("--set", setting)]
    return shlex.join(["suture", "run", source, "--env", env, *options])


def _differing(base: Job, job: Job) -> list[str]:
    """Return the settings, as for ``--set``, in which a job differs from that of its file."""
    settings = []
    if type(base.method) is not type(job.method):
        settings = [f"method={job.method.about.name}"]
        base = with_settings(base, settings)
    usual = settings_of(base)
    for key, value in settings_of(job).items():
        known = key in usual
        if not known or usual[key] != value:
            settings.append(f"{key}={json.dumps(value)}")
        if not known:  # of a part that the file does not have: its other settings begin at their defaults
            usual |= settings_of(with_settings(base, settings[-1:]))
    return settings
