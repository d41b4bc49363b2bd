"""A study as data: which methods are compared on which label lists, and how they are tuned and tested."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from dataclasses import dataclass as plain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError, check_known, unknown
from suture.core.files import read_toml
from suture.core.validation import STRICT, parse
from suture.data.split import FOLDS
from suture.execution.job_files import job_file
from suture_papers.tables.runs import as_options
from suture_papers.tables.spec import Key, Settings

Record = Mapping[str, Any]
"""A stored run."""

Metric = Literal["auroc", "balanced_accuracy"]
"""The mean over classes of the AUROC, or of the recall where an image has one class."""
Whole = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=STRICT)
class Tuning:
    """What each method tunes on the validation data of fold 1, with the number of rounds.

    Values lie on a ladder, ``start * ratio**k``. It begins with k of -1, 0 and 1 and is extended while the
    best value, or the last round, is at its end.

    Attributes:
        key: a setting of the job.
        rounds: of the runs that tune; doubled while the last of them is the best, up to `most_rounds`.
        seeds: whose mean decides.
        most: values that are tried at most.
    """

    start: float
    key: str = "method.local.lr"
    ratio: Annotated[float, Field(gt=1)] = 10**0.5
    rounds: Whole = 16
    most_rounds: Whole = 64
    seeds: tuple[int, ...] = (1, 2, 3)
    most: Whole = 7

    def value(self, k: int) -> float:
        """Return the k-th value, with three digits."""
        return float(f"{self.start * self.ratio**k:.3g}")


@dataclass(frozen=True, config=STRICT)
class Row:
    """A method as it is compared.

    Attributes:
        name: on pages.
        set: settings of the job, as of `suture run --set`.
        like: the row whose tuned values it takes; by default it is tuned itself.
        tuning: what it tunes in place of the study's setting.
        single: whether it is tested in fold 1 alone, and so described but not tested for significance.
    """

    name: str
    set: Settings = field(default_factory=dict)
    like: str | None = None
    tuning: Tuning | None = None
    single: bool = False


@dataclass(frozen=True, config=STRICT)
class Setting:
    """The label lists of the sites.

    Attributes:
        title: follows the study's.
        set: settings of every run.
    """

    title: str
    set: Settings = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Study:
    """The file of a study.

    Attributes:
        title, data: what is compared on which data.
        job: the job whose settings the rows change; its simulation divides the patients into folds.
        control: the row that all others are compared with.
        primary: the row whose difference from the control the study is about, fixed before its runs.
        rows: by a short name.
        settings: by a short name.
        tuning: of each row.
        metric: what is compared.
        set: settings of every run.
        seeds: of the runs in each fold.
        note: what a reader should know besides.
    """

    title: str
    data: str
    job: str
    control: str
    primary: str
    rows: dict[Key, Row]
    settings: Annotated[dict[Key, Setting], Field(min_length=1)]
    tuning: Tuning
    metric: Metric = "auroc"
    set: Settings = field(default_factory=dict)
    seeds: Annotated[tuple[int, ...], Field(min_length=2)] = (1, 2)
    note: str = ""


@plain(frozen=True)
class Design:
    """A study in one of its settings.

    Attributes:
        name, study: the file's name and content.
        key: the name of the setting.
    """

    name: str
    study: Study
    key: str

    @property
    def stem(self) -> str:
        """The name of its page and its file of records."""
        return f"{self.name}-{self.key}"

    @property
    def title(self) -> str:
        """Of study and setting."""
        return f"{self.study.title}: {self.study.settings[self.key].title}"

    @property
    def rows(self) -> dict[str, Row]:
        """The rows of the study."""
        return self.study.rows

    def tuning(self, row: str) -> Tuning:
        """Return what a row tunes, or the row that it is tuned like."""
        return self.rows[self.rows[row].like or row].tuning or self.study.tuning

    def folds(self, row: str) -> range:
        """Return the folds that a row is tested in."""
        return range(1, 2 if self.rows[row].single else FOLDS + 1)

    def run(self, row: str, fold: int, seed: int, extra: Settings) -> Run:
        """Return a run of a row; what the row itself sets holds against the study's and the setting's."""
        own = self.study.rows[row].set
        # The method comes first: another one forgets hyperparameters that it does not have.
        settings = {
            **own,
            **self.study.set,
            **self.study.settings[self.key].set,
            **extra,
            **own,
            "simulation.fold": fold,
            "seed": seed,
        }
        return Run(row, self.study.job, settings)

    def plan(self) -> dict[str, Any]:
        """Return all that decides the runs and how they are judged; titles and notes are left out.

        Raises:
            ConfigError: the job is no file of TOML, whose settings could be compared.
        """
        study, setting = self.study, self.study.settings[self.key]
        job = read_toml(job_file(study.job))
        content = {
            "control": study.control,
            "primary": study.primary,
            "metric": study.metric,
            "rows": {key: asdict(row) | {"name": None} for key, row in self.rows.items()},
            "tuning": asdict(study.tuning),
            "seeds": study.seeds,
            "set": study.set | setting.set,
            "job": {key: value for key, value in job.items() if key not in ("title", "presets", "selection")},
        }
        found: dict[str, Any] = json.loads(json.dumps(content))
        return found


@plain(frozen=True)
class Run:
    """One run of a job.

    Attributes:
        row: of the study.
        job: whose settings it changes.
        settings: those that differ from the job's own; paths with ``{data}``.
    """

    row: str
    job: str
    settings: Settings = field(hash=False)

    @property
    def name(self) -> str:
        """The row, and a hash of job and settings."""
        content = json.dumps([self.job, sorted(self.settings.items())], sort_keys=True)
        return f"{self.row}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def options(self, data_root: Path) -> list[str]:
        """Return the settings as ``key=value``."""
        return as_options(self.settings, data_root)


def known_studies() -> dict[str, Path]:
    """Return the files of studies that come with this package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def load_study(name: str) -> dict[str, Design]:
    """Return the designs of a study by setting.

    Args:
        name: of a study, or the path of its file.

    Raises:
        ConfigError: there is none, or the file has an unknown or missing key, or names a row that it lacks.
    """
    path = Path(name) if name.endswith(".toml") else known_studies().get(name, Path(name))
    if not path.is_file():
        raise unknown("study", name, known_studies())
    study = parse(Study, read_toml(path), str(path))
    named = {"control": study.control, "primary": study.primary}
    named |= {f"rows.{key}.like": row.like for key, row in study.rows.items() if row.like}
    for where, name_of_row in named.items():
        check_known(f"row in {where} of {path}", name_of_row, study.rows)
    if study.primary == study.control or study.rows[study.primary].single or study.rows[study.control].single:
        raise ConfigError(f"{path}: control and primary must be two rows that run in all folds")
    for key, row in study.rows.items():
        if row.like and row.tuning:
            raise ConfigError(
                f"{path}: row {key!r} has a tuning and is tuned like another; remove one of the two"
            )
        if row.like and study.rows[row.like].like:
            raise ConfigError(
                f"{path}: row {key!r} is tuned like {row.like!r}, which is not tuned; name another"
            )
    return {key: Design(path.stem, study, key) for key in study.settings}
