"""A job: what is trained, how, and (for a simulation) on which sites. `jobs/<name>/job.py` holds one each."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError, unknown
from suture.core.validation import parse
from suture.data.augmentation import Augmentation
from suture.federation.plan import Plan, Quorum, Schedule, Selection, code_hash
from suture.learning.finetuning import FineTuning
from suture.methods import method_class
from suture.methods.base import Method
from suture.models import MODELS, ModelSpec, vocabulary_of
from suture.simulation import Simulation

_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True, config=_STRICT)
class Job:
    """One federated training job.

    Attributes:
        name: word of the command line.
        title: a line for people.
        simulation: the sites that a simulation makes; None for a job that real sites run.
        finetuning: how a simulation's model is put to tasks that no site has; None where it is not.
        The rest as in `Plan` and `Schedule`.
    """

    name: str
    title: str
    method: Method
    model: ModelSpec
    rounds: Annotated[int, Field(ge=1)]
    seed: int = 1
    augmentation: Augmentation = dataclasses.field(default_factory=Augmentation)
    selection: Selection = "site_loss"
    patience: Annotated[int, Field(ge=1)] | None = None
    min_sites: Quorum | None = None
    round_timeout: Annotated[int, Field(ge=1)] = 3600
    grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_failed_rounds: Annotated[int, Field(ge=1)] = 2
    label_map: dict[str, str] = dataclasses.field(default_factory=dict)
    accept_labels: bool | tuple[str, ...] = False
    simulation: Simulation | None = None
    finetuning: FineTuning | None = None

    def plan(self, experiment: str) -> Plan:
        """What every party needs to know."""
        return Plan(
            self.method, self._model(), self.augmentation, self.seed, experiment, code_hash(type(self.method))
        )

    def _model(self) -> ModelSpec:
        """The model with the words of its vocabulary file, which no other party has."""
        spec = self.model
        if MODELS[spec.name].reads != "text" or spec.vocabulary == "clinical":
            return spec
        return dataclasses.replace(spec, vocabulary=vocabulary_of(spec).words)

    def schedule(self) -> Schedule:
        """What the server alone needs to know."""
        return Schedule(
            rounds=self.rounds,
            job=self.name,
            title=self.title,
            min_sites=self.min_sites,
            round_timeout=self.round_timeout,
            grace=self.grace,
            selection=self.selection,
            patience=self.patience,
            max_failed_rounds=self.max_failed_rounds,
            label_map=self.label_map,
            accept_labels=self.accept_labels,
        )


def jobs_folder() -> Path:
    """The folder of the jobs: beside the source of the package, else in the working directory."""
    beside = Path(__file__).resolve().parents[3] / "jobs"
    return beside if beside.is_dir() else Path("jobs").resolve()


def known_jobs() -> dict[str, Path]:
    """The jobs by name."""
    return {path.parent.name: path for path in sorted(jobs_folder().glob("*/job.py"))}


def load_job(name: str) -> Job:
    """The job of that name in jobs/, or in the file or folder of that path.

    Raises:
        ConfigError: there is none, or the file defines no JOB.
    """
    path = Path(name)
    if path.suffix != ".py":
        path = (
            path / "job.py" if path.is_dir() and (path / "job.py").exists() else known_jobs().get(name, path)
        )
    if not path.is_file():
        raise unknown("job", name, known_jobs())
    spec = importlib.util.spec_from_file_location(f"suture_job_{path.parent.name}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    job = getattr(module, "JOB", None)
    if not isinstance(job, Job):
        raise ConfigError(f"{path} defines no JOB; it needs a line JOB = Job(...)")
    return job


def with_settings(job: Job, settings: Iterable[str]) -> Job:
    """The job with `key=value` settings applied, e.g. ``method.local.lr=1e-3``.

    A key is a dotted path, or its last word where only one place has it. Values are JSON, else text.

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
        job = (
            _with_method(job, text)
            if key.strip() == "method"
            else _set(job, _path(job, key.strip()), value, key)
        )
    return job


def _with_method(job: Job, name: str) -> Job:
    """The job with another method, which keeps the hyperparameters that both have, and has its title."""
    kind = method_class(name)
    fields = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    kept = {f.name: getattr(job.method, f.name) for f in dataclasses.fields(job.method) if f.name in fields}  # type: ignore[arg-type]
    title = job.title.replace(job.method.title, kind.title)
    return dataclasses.replace(job, method=parse(kind, kept, "method"), title=title)


def _leaves(value: Any, prefix: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Every setting of a value, by dotted path; a table of free keys counts as one."""
    found: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(value):
        path, inner = (*prefix, field.name), getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            found |= _leaves(inner, path)
        else:
            found[".".join(path)] = path
    return found


def _path(job: Job, key: str) -> tuple[str, ...]:
    leaves = _leaves(job)
    if key in leaves:
        return leaves[key]
    if key.startswith("label_map."):
        return ("label_map", key.removeprefix("label_map."))
    ends = [path for path in leaves.values() if path[-1] == key]
    if len(ends) > 1:
        raise ConfigError(f"{key!r} is ambiguous: {', '.join('.'.join(p) for p in ends)}; write one of them")
    if not ends:
        raise unknown("setting", key, {*leaves, *(path[-1] for path in leaves.values())}, listed=leaves)
    return ends[0]


def _set(value: Any, path: tuple[str, ...], new: Any, key: str) -> Any:
    """A copy of a nested value with one leaf replaced and validated."""
    name, *rest = path
    if isinstance(value, dict):
        return {**value, name: new}
    inner = _set(getattr(value, name), tuple(rest), new, key) if rest else new
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return parse(type(value), {**fields, name: inner}, f"--set {key}")
