"""Files of tables: where they lie, and the check that their names refer to something."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from suture.core.entry_points import find_entry_points, load
from suture.core.errors import ConfigError, check_known, nearest, show_value, unknown
from suture.core.files import read_toml
from suture.core.validation import parse
from suture_papers.tables.spec import TableSpec


def known_tables() -> dict[str, Path]:
    """Return the files of tables by name: those in ``tables/`` of each package of the entry points.

    Raises:
        ConfigError: one of these packages cannot be imported.
    """
    named = (point for points in find_entry_points("suture.tables").values() for point in points)
    packages = [load(point, "tables", "a package", inspect.ismodule) for point in named]
    files = (path for package in packages for path in Path(package.__file__).parent.glob("tables/*.toml"))
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def load_spec(name: str) -> TableSpec:
    """Load the table of that name, or of that path.

    Raises:
        ConfigError: there is none, or its file has an unknown or missing key.
    """
    path = Path(name) if name.endswith(".toml") else known_tables().get(name, Path(name))
    if not path.is_file():
        raise _no_table(name)
    spec = parse(TableSpec, read_toml(path), str(path))
    _check(spec, path)
    return spec


def _no_table(name: str) -> ConfigError:
    """Return an error that names the nearest table, or else all by package."""
    known = known_tables()
    if not nearest(name, known).startswith("known: "):
        return unknown("table", name, known)
    packages: dict[str, list[str]] = {}
    for table, path in known.items():
        packages.setdefault(path.parents[1].name, []).append(table)
    listed = (f"{package}: {', '.join(tables)}" for package, tables in sorted(packages.items()))
    return ConfigError("\n".join([f"unknown table {show_value(name)}; known, by package:", *listed]))


def _check(spec: TableSpec, path: Path) -> None:
    """Check that parts of the file that refer to one another agree.

    Raises:
        ConfigError: they do not.
    """
    _check_rows(spec, path)
    _check_columns(spec, path)
    if spec.by_class is not None and spec.series:
        raise ConfigError(
            f"{path}: by_class needs one model for each row, but a series has several; remove it"
        )
    _check_steady(spec, path)
    _check_tasks(spec, path)
    _check_plots(spec, path)
    _check_plan(spec, path)


def _check_rows(spec: TableSpec, path: Path) -> None:
    """Check the names of rows that other parts of the file use.

    Raises:
        ConfigError: one of them is no row.
    """
    used: dict[str, Mapping[str, object] | tuple[str, ...]] = {"reference": (spec.reference,)}
    if spec.by_class is not None:
        used |= {
            "by_class.rows": spec.by_class.rows,
            "by_class.published": spec.by_class.published,
        }
    if spec.goal is not None:
        used["goal"] = (spec.goal,)
    for name, preset in spec.presets.items():
        used |= {f"presets.{name}.rows": preset.rows, f"presets.{name}.skip": preset.skip}
    for where, names in used.items():
        for row in names:
            check_known(f"row in {where} of {path}", row, spec.rows)


def _check_columns(spec: TableSpec, path: Path) -> None:
    """Check the names of columns that other parts of the file use, and the tests of columns.

    Raises:
        ConfigError: one of them does not exist.
    """
    heads = {column.name for column in spec.columns}
    for name, preset in spec.presets.items():
        for head in preset.columns or ():
            check_known(f"column in presets.{name}.columns of {path}", head, heads)
    for row in spec.rows.values():
        for head in row.published:
            check_known(f"published column of {row.name!r} in {path}", head, heads)
    for column in spec.columns:
        if column.test is not None and column.test not in spec.tests:
            raise unknown(f"test of column {column.name!r} of {path}", column.test, spec.tests)


def _check_steady(spec: TableSpec, path: Path) -> None:
    """Check rows that the series does not change.

    Raises:
        ConfigError: there is no series, or the series changes the classes of a column.
    """
    steady = [name for name, row in spec.rows.items() if row.steady]
    groups = [column.name for column in spec.columns if column.group != "mean"]
    if steady and not spec.series:
        raise ConfigError(f"{path}: row {steady[0]!r} is steady, but there is no series; remove steady")
    if steady and groups:
        raise ConfigError(
            f"{path}: row {steady[0]!r} is steady, and the series changes which classes column {groups[0]!r} "
            "is about; remove one of the two"
        )


def _check_tasks(spec: TableSpec, path: Path) -> None:
    """Check columns of fine-tuned models.

    Raises:
        ConfigError: they are mixed with others, or with a series, or show a metric that such a model has not.
    """
    tuned = spec.pairs == "tuned"
    for column in spec.columns:
        if (column.task is not None) != tuned:
            raise ConfigError(
                f'{path}: column {column.name!r} has {"no" if tuned else "a"} task; pairs = "tuned" and a '
                "task in every column go together"
            )
        if column.metric in (("accuracy", "loss") if tuned else ("epochs",)):
            raise ConfigError(f"{path}: column {column.name!r} has no {column.metric}; choose another metric")
    if spec.goal is None and any(column.metric == "epochs" for column in spec.columns):
        raise ConfigError(
            f"{path}: a column of epochs needs a goal to count to; name a row, whose AUROC after its last "
            f'epoch that is: goal = "{next(iter(spec.rows))}"'
        )
    for name, preset in spec.presets.items():
        if tuned and preset.pairs:
            raise ConfigError(
                f'{path}: preset {name!r} has no pairs of its own where pairs = "tuned"; remove it'
            )
        if spec.goal in preset.skip:
            raise ConfigError(f"{path}: preset {name!r} skips the goal {spec.goal!r}; let it run")
    if tuned and spec.series:
        raise ConfigError(f'{path}: pairs = "tuned" has no series; write a file for each value')


def _check_plan(spec: TableSpec, path: Path) -> None:
    """Check that a study can be judged as its plan says, and that all rows tune equally much.

    Raises:
        ConfigError: it has a series, pairs other than runs, a single seed or no control; or a row tries more
            or fewer values than a preset.
    """
    for name, preset in spec.presets.items():
        for key, row in spec.rows.items():
            if row.tune and not preset.tune:
                raise ConfigError(f"{path}: row {key!r} has a tune, but preset {name!r} has none; write one")
            if row.tune and preset.tune and len(row.tune.values) != len(preset.tune.values):
                raise ConfigError(
                    f"{path}: row {key!r} tries {len(row.tune.values)} values, preset {name!r} "
                    f"{len(preset.tune.values)}; give all rows the same budget"
                )
        if spec.plan and spec.reference in preset.skip:
            raise ConfigError(f"{path}: preset {name!r} skips the control {spec.reference!r}; let it run")
        if spec.plan and len(preset.seeds) < 2:
            raise ConfigError(f"{path}: preset {name!r} of a study needs two seeds or more")
    if spec.plan and (spec.series or spec.pairs != "runs" or any(p.pairs for p in spec.presets.values())):
        raise ConfigError(f"{path}: a study compares runs of the same seed; remove series and pairs")


def _check_plots(spec: TableSpec, path: Path) -> None:
    """Check the tests and rows of further plots.

    Raises:
        ConfigError: one of them does not exist, or there is a run for each value of a series.
    """
    for name, plot in spec.drawings.items():
        for source in plot.sources:
            check_known(f"test in sources of plot {name!r} of {path}", source, spec.tests)
        if plot.row is not None and plot.row not in spec.rows:
            raise unknown(f"row of plot {name!r} of {path}", plot.row, spec.rows)
        if plot.row is not None and spec.series:
            raise ConfigError(f"{path}: plot {name!r} needs one model, but a series has several; remove it")
