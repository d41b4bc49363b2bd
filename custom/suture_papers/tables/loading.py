"""Files of tables: where they lie, and the check that their names refer to something."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from suture.core.entry_points import find_entry_points, load
from suture.core.errors import ConfigError, check_known, nearest, show_value, unknown
from suture.core.files import read_toml
from suture.core.validation import parse
from suture_papers.tables.spec import TableSpec


@dataclass(frozen=True)
class Paper:
    """Tables that stand on one page.

    Attributes:
        name, title: of the page.
        tables: files by name.
    """

    name: str
    title: str
    tables: Mapping[str, Path]


def papers() -> list[Paper]:
    """Return the packages of the entry points, with the files in their ``tables/``.

    The docstring of a package, up to a colon, is the title.

    Raises:
        ConfigError: one of these packages cannot be imported.
    """
    found = []
    for point in (point for points in find_entry_points("suture.tables").values() for point in points):
        package = load(point, "tables", "a package", inspect.ismodule)
        folder = Path(package.__file__).parent
        title = (package.__doc__ or folder.name).partition(":")[0].strip().removesuffix(".")
        files = {path.stem: path for path in sorted(folder.glob("tables/*.toml"))}
        found.append(Paper(folder.name, title, files))
    return found


def known_tables() -> dict[str, Path]:
    """Return the files of all tables by name."""
    return dict(sorted((name, path) for paper in papers() for name, path in paper.tables.items()))


def paper_of(name: str) -> Paper:
    """Return the paper of a table; a table that is named by its path has a page of its own.

    Raises:
        ConfigError: there is no such table.
    """
    for paper in papers():
        if name in paper.tables:
            return paper
    path = Path(name)
    return Paper(path.stem, load_spec(name).title, {path.stem: path})


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


def _check_rows(spec: TableSpec, path: Path) -> None:
    """Check the names of rows that other parts of the file use.

    Raises:
        ConfigError: one of them is no row.
    """
    used: dict[str, Mapping[str, object] | tuple[str, ...]] = {"reference": (spec.reference,)}
    if spec.by_class is not None:
        used["by_class.published"] = spec.by_class.published
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
