"""Experiment files: where they lie, and the check that their names refer to something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from suture.core.errors import ConfigError, unknown
from suture.core.plain import read_toml
from suture.core.validation import parse
from suture_papers.tables.spec import Experiment


def experiments_folder() -> Path:
    """Return the folder of the experiments: beside the package's source, else in the working directory."""
    beside = Path(__file__).resolve().parents[3] / "experiments"
    return beside if beside.is_dir() else Path("experiments").resolve()


def known_experiments() -> dict[str, Path]:
    """Return the files of the experiments by name."""
    return {path.stem: path for path in sorted(experiments_folder().glob("*.toml"))}


def load_experiment(name: str) -> Experiment:
    """Load the experiment of that name in experiments/, or of that path.

    Raises:
        ConfigError: there is none, or its file has an unknown or missing key.
    """
    path = Path(name) if name.endswith(".toml") else known_experiments().get(name, Path(name))
    if not path.is_file():
        raise unknown("experiment", name, known_experiments())
    experiment = parse(Experiment, read_toml(path), str(path))
    _check(experiment, path)
    return experiment


def _check(experiment: Experiment, path: Path) -> None:
    """Check that parts of the file that refer to one another agree.

    Raises:
        ConfigError: they do not.
    """
    _check_rows(experiment, path)
    _check_columns(experiment, path)
    if experiment.by_class is not None and experiment.series:
        raise ConfigError(
            f"{path}: by_class needs one model for each row, but a series has several; remove it"
        )
    _check_steady(experiment, path)
    _check_tasks(experiment, path)
    _check_plots(experiment, path)


def _check_rows(experiment: Experiment, path: Path) -> None:
    """Check the names of rows that other parts of the file use.

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
    for where, names in used.items():
        for row in names:
            if row not in experiment.rows:
                raise unknown(f"row in {where} of {path}", row, experiment.rows)


def _check_columns(experiment: Experiment, path: Path) -> None:
    """Check the names of columns that other parts of the file use, and the tests of columns.

    Raises:
        ConfigError: one of them does not exist.
    """
    heads = {column.name for column in experiment.columns}
    for name, preset in experiment.presets.items():
        for head in preset.columns or ():
            if head not in heads:
                raise unknown(f"column in presets.{name}.columns of {path}", head, heads)
    for row in experiment.rows.values():
        for head in row.published:
            if head not in heads:
                raise unknown(f"published column of {row.name!r} in {path}", head, heads)
    for column in experiment.columns:
        if column.test is not None and column.test not in experiment.tests:
            raise unknown(f"test of column {column.name!r} of {path}", column.test, experiment.tests)


def _check_steady(experiment: Experiment, path: Path) -> None:
    """Check rows that the series does not change.

    Raises:
        ConfigError: there is no series, or the series changes the classes of a column.
    """
    steady = [name for name, row in experiment.rows.items() if row.steady]
    groups = [column.name for column in experiment.columns if column.group != "mean"]
    if steady and not experiment.series:
        raise ConfigError(f"{path}: row {steady[0]!r} is steady, but there is no series; remove steady")
    if steady and groups:
        raise ConfigError(
            f"{path}: row {steady[0]!r} is steady, and the series changes which classes column {groups[0]!r} "
            "is about; remove one of the two"
        )


def _check_tasks(experiment: Experiment, path: Path) -> None:
    """Check columns of fine-tuned models.

    Raises:
        ConfigError: they are mixed with others, or with a series, or show a metric that such a model has not.
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


def _check_plots(experiment: Experiment, path: Path) -> None:
    """Check the tests and rows of further plots.

    Raises:
        ConfigError: one of them does not exist, or there is a run for each value of a series.
    """
    for name, plot in experiment.drawings.items():
        for source in plot.sources:
            if source not in experiment.tests:
                raise unknown(f"test in sources of plot {name!r} of {path}", source, experiment.tests)
        if plot.row is not None and plot.row not in experiment.rows:
            raise unknown(f"row of plot {name!r} of {path}", plot.row, experiment.rows)
        if plot.row is not None and experiment.series:
            raise ConfigError(f"{path}: plot {name!r} needs one model, but a series has several; remove it")
