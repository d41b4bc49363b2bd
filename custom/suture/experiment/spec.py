"""An experiment: which runs make a table or a figure, and what the paper printed there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.errors import ConfigError, unknown
from suture.messages import STRICT
from suture.validation import parse

Value = str | int | float | bool | None | list[Any] | dict[str, Any]
Settings = dict[str, Value]
Group = Literal["mean", "shared", "unique"]


@dataclass(frozen=True, config=STRICT)
class Row:
    """A row of a table, or a line of a figure.

    Attributes:
        name: for people.
        set: settings of the job, as of `suture run --set`.
        site: of methods that leave a model at each site, the site whose model the row is about; by default
            the one that a test set is at home at, and else all of them.
        published: what the paper printed, by column.
    """

    name: str
    set: Settings = field(default_factory=dict)
    site: str | None = None
    published: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class ExternalTest:
    """A test set of its own, beside what a run measures by itself.

    Attributes:
        data: as under [data] of a suture.toml; ``{data}`` in a text stands for the data root.
        home: the site that its training images are at.
    """

    data: dict[str, Any]
    home: str | None = None


@dataclass(frozen=True, config=STRICT)
class Column:
    """A mean AUROC, or another figure of a run.

    Attributes:
        name: for people.
        test: one of the experiment's tests; None for what the run measured by itself.
        group: all classes, those of several sites, or those of one.
        classes: only these.
        metric: ``auroc``, or a figure of a multiclass task that is not class by class.
        frequency: accuracy of the ``head``, ``medium`` or ``tail`` classes, or of ``all``, the mean of these.
        attribute: of the test images with this value alone, or ``mean``, over all its values.
        models: ``global`` or the sites' ``local`` ones, the mean over the sites at their own test data.
        task: a task that the model was fine-tuned on. The figure is of those runs: one at the threshold of
            Youden's index, or ``epochs``, those until the AUROC is that of the experiment's `goal`.

    Raises:
        ValueError: two that exclude each other.
    """

    name: str
    test: str | None = None
    group: Group = "mean"
    classes: tuple[str, ...] | None = None
    metric: Literal["auroc", "accuracy", "balanced_accuracy", "f1", "precision", "recall", "epochs"] = "auroc"
    frequency: Literal["head", "medium", "tail", "all"] | None = None
    attribute: str | None = None
    models: Literal["global", "local"] | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.test, self.task, *self.parts)) > 1:
            raise ValueError("a column takes one of test, task, frequency, attribute and models")
        if self.frequency is not None and self.metric != "accuracy":
            raise ValueError(f'frequency = {self.frequency!r} is of metric = "accuracy"; write that too')

    @property
    def parts(self) -> tuple[str | None, str | None, str | None]:
        """What part of a run's own figures it shows."""
        return self.frequency, self.attribute, self.models


OWN_COLUMNS = (
    Column("AUROC, all classes"),
    Column("AUROC, classes of several sites", group="shared"),
    Column("AUROC, classes of one site", group="unique"),
)


@dataclass(frozen=True, config=STRICT)
class Series:
    """A setting that takes several values: the x axis of a figure."""

    key: str
    values: Annotated[tuple[Value, ...], Field(min_length=1)]
    label: str


@dataclass(frozen=True, config=STRICT)
class Tuning:
    """A setting chosen for each row by its mean validation AUROC; test data have no say.

    Attributes:
        key, values: the setting and the values that are tried.
        seed: of the runs that choose.
    """

    key: str
    values: Annotated[tuple[Value, ...], Field(min_length=2)]
    seed: int = 1


@dataclass(frozen=True, config=STRICT)
class Preset:
    """A size of the experiment: the paper's, or one for a small machine.

    Attributes:
        note: what it costs and how it differs.
        seeds: of the runs of each row.
        set: settings of every run; ``{data}`` in a text stands for the data root.
        rows: further settings of single rows.
        skip: rows that this preset leaves out.
        tune: a setting to be tuned on validation data.
        series: values of the experiment's series, where they are fewer.
    """

    note: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    set: Settings = field(default_factory=dict)
    rows: dict[str, Settings] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    tune: Tuning | None = None
    series: tuple[Value, ...] | None = None


@dataclass(frozen=True, config=STRICT)
class Experiment:
    """A table or figure.

    Attributes:
        title, source: what it shows, and where the paper has it.
        job: whose settings the rows change.
        rows: by a short name.
        presets: by name; the first one is the default.
        reference: the row that all others are compared with.
        pairs: what the paired t-test pairs: ``runs`` (over seeds, and over a series' values), ``classes``, or
            ``tuned``, fine-tuning runs of the same seed on the same division; then every column has a task.
        goal: of columns of epochs, the row whose mean AUROC after its last epoch they count to.
        columns: by default the mean over all classes, over those of several sites and over those of one.
        tests: test sets by name.
        series: the x axis, for a figure.
        set: settings of every run.
        note: what a reader should know besides.
    """

    title: str
    source: str
    job: str
    rows: dict[str, Row]
    presets: Annotated[dict[str, Preset], Field(min_length=1)]
    reference: str
    pairs: Literal["runs", "classes", "tuned"] = "runs"
    goal: str | None = None
    columns: tuple[Column, ...] = OWN_COLUMNS
    tests: dict[str, ExternalTest] = field(default_factory=dict)
    series: Series | None = None
    set: Settings = field(default_factory=dict)
    note: str = ""

    def preset(self, name: str | None) -> Preset:
        """The preset of that name, or the first.

        Raises:
            ConfigError: unknown; names the nearest.
        """
        chosen = name or next(iter(self.presets))
        if chosen not in self.presets:
            raise unknown("preset", chosen, self.presets)
        return self.presets[chosen]


def experiments_folder() -> Path:
    """The folder of the experiments: beside the source of the package, else in the working directory."""
    beside = Path(__file__).resolve().parents[3] / "experiments"
    return beside if beside.is_dir() else Path("experiments").resolve()


def known_experiments() -> dict[str, Path]:
    """The experiments by name."""
    return {path.stem: path for path in sorted(experiments_folder().glob("*.toml"))}


def load_experiment(name: str) -> Experiment:
    """The experiment of that name in experiments/, or in the file of that path.

    Raises:
        ConfigError: there is none, or its file has an unknown or missing key.
    """
    path = Path(name) if name.endswith(".toml") else known_experiments().get(name, Path(name))
    if not path.is_file():
        raise unknown("experiment", name, known_experiments())
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    experiment = parse(Experiment, raw, str(path))
    _check(experiment, path)
    return experiment


def _check(experiment: Experiment, path: Path) -> None:
    """Names of rows that other parts of the file use.

    Raises:
        ConfigError: one of them is no row.
    """
    used: dict[str, Mapping[str, object] | tuple[str, ...]] = {"reference": (experiment.reference,)}
    if experiment.goal is not None:
        used["goal"] = (experiment.goal,)
    for name, preset in experiment.presets.items():
        used |= {f"presets.{name}.rows": preset.rows, f"presets.{name}.skip": preset.skip}
    for where, names in used.items():
        for row in names:
            if row not in experiment.rows:
                raise unknown(f"row in {where} of {path}", row, experiment.rows)
    for column in experiment.columns:
        if column.test is not None and column.test not in experiment.tests:
            raise unknown(f"test of column {column.name!r} of {path}", column.test, experiment.tests)
    _check_tasks(experiment, path)
    heads = {column.name for column in experiment.columns}
    for described in experiment.rows.values():
        for head in described.published:
            if head not in heads:
                raise unknown(f"published column of {described.name!r} in {path}", head, heads)


def _check_tasks(experiment: Experiment, path: Path) -> None:
    """Columns of fine-tuned models stand by themselves.

    Raises:
        ConfigError: they are mixed with others, or with a series, or show what such a model has not.
    """
    tuned = experiment.pairs == "tuned"
    for column in experiment.columns:
        if (column.task is not None) != tuned:
            raise ConfigError(
                f'{path}: column {column.name!r} has {"no" if tuned else "a"} task; pairs = "tuned" and a '
                "task in every column go together"
            )
        if column.metric in (("accuracy",) if tuned else ("epochs",)):
            raise ConfigError(f"{path}: column {column.name!r} has no {column.metric}; choose another metric")
    if experiment.goal is None and any(column.metric == "epochs" for column in experiment.columns):
        raise ConfigError(
            f"{path}: a column of epochs needs a goal to count to; name a row, whose AUROC after its last "
            f'epoch that is: goal = "{next(iter(experiment.rows))}"'
        )
    for name, preset in experiment.presets.items():
        if experiment.goal in preset.skip:
            raise ConfigError(f"{path}: preset {name!r} skips the goal {experiment.goal!r}; let it run")
    if tuned and experiment.series:
        raise ConfigError(f'{path}: pairs = "tuned" has no series; write a file for each value')
