"""Experiments as files: where they lie, and what the names in one have to refer to."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from suture.core.errors import ConfigError, unknown
from suture.core.validation import parse
from suture.experiments.spec import Experiment


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
    if experiment.by_class is not None:
        used |= {
            "by_class.rows": experiment.by_class.rows,
            "by_class.published": experiment.by_class.published,
        }
    if experiment.goal is not None:
        used["goal"] = (experiment.goal,)
    for name, preset in experiment.presets.items():
        used |= {f"presets.{name}.rows": preset.rows, f"presets.{name}.skip": preset.skip}
        heads = {column.name for column in experiment.columns}
        for head in preset.columns or ():
            if head not in heads:
                raise unknown(f"column in presets.{name}.columns of {path}", head, heads)
    for where, names in used.items():
        for row in names:
            if row not in experiment.rows:
                raise unknown(f"row in {where} of {path}", row, experiment.rows)
    for column in experiment.columns:
        if column.test is not None and column.test not in experiment.tests:
            raise unknown(f"test of column {column.name!r} of {path}", column.test, experiment.tests)
    if experiment.by_class is not None and experiment.series:
        raise ConfigError(f"{path}: by_class is of one model a row, and a series has many; remove it")
    _check_steady(experiment, path)
    _check_tasks(experiment, path)
    _check_drawings(experiment, path)
    heads = {column.name for column in experiment.columns}
    for described in experiment.rows.values():
        for head in described.published:
            if head not in heads:
                raise unknown(f"published column of {described.name!r} in {path}", head, heads)


def _check_steady(experiment: Experiment, path: Path) -> None:
    """Rows that the series does not change.

    Raises:
        ConfigError: there is no series, or a column whose classes it changes.
    """
    steady = [name for name, row in experiment.rows.items() if row.steady]
    groups = [column.name for column in experiment.columns if column.group != "mean"]
    if steady and not experiment.series:
        raise ConfigError(f"{path}: row {steady[0]!r} is steady, and there is no series; remove steady")
    if steady and groups:
        raise ConfigError(
            f"{path}: row {steady[0]!r} is steady, and the series changes which classes column {groups[0]!r} "
            "is about; remove one of the two"
        )


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
        if column.metric in (("accuracy", "loss") if tuned else ("epochs",)):
            raise ConfigError(f"{path}: column {column.name!r} has no {column.metric}; choose another metric")
    if experiment.goal is None and any(column.metric == "epochs" for column in experiment.columns):
        raise ConfigError(
            f"{path}: a column of epochs needs a goal to count to; name a row, whose AUROC after its last "
            f'epoch that is: goal = "{next(iter(experiment.rows))}"'
        )
    for name, preset in experiment.presets.items():
        if tuned and preset.pairs:
            raise ConfigError(
                f'{path}: preset {name!r} has no pairs of its own where pairs = "tuned"; remove it'
            )
        if experiment.goal in preset.skip:
            raise ConfigError(f"{path}: preset {name!r} skips the goal {experiment.goal!r}; let it run")
    if tuned and experiment.series:
        raise ConfigError(f'{path}: pairs = "tuned" has no series; write a file for each value')


def _check_drawings(experiment: Experiment, path: Path) -> None:
    """Tests and rows that drawings use.

    Raises:
        ConfigError: one of them is not there, or there is a run for each value of a series.
    """
    for name, drawing in experiment.drawings.items():
        for source in drawing.sources:
            if source not in experiment.tests:
                raise unknown(f"test in sources of drawing {name!r} of {path}", source, experiment.tests)
        if drawing.row is not None and drawing.row not in experiment.rows:
            raise unknown(f"row of drawing {name!r} of {path}", drawing.row, experiment.rows)
        if drawing.row is not None and experiment.series:
            raise ConfigError(f"{path}: drawing {name!r} is of one model, and a series has many; remove it")
