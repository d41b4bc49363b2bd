"""The command `suture table`: the runs of a paper's table, and its rendering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suture.cli.common import Amp, Device, SiteThreads, print_line

if TYPE_CHECKING:
    from suture_papers.tables.results import ResultStore
    from suture_papers.tables.spec import Table

_DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets.", envvar="SUTURE_DATA")]


def list_tables() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each table, and what describes it, for `suture list`."""
    from suture_papers.tables.loading import known_tables

    for name, path in known_tables().items():
        yield name, partial(_describe, path)


def _describe(path: Path) -> str:
    from suture_papers.tables.loading import load_spec

    found = load_spec(str(path))
    return f"{found.title}; presets {', '.join(found.presets)}"


def table(
    name: Annotated[
        str | None,
        typer.Argument(help="A table, or the path of its .toml; with --render, by default all."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A preset; by default the first.")] = None,
    data_root: _DataRoot = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/tables"),
    results: Annotated[Path, typer.Option(help="Folder of tables and results.")] = Path("docs/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    device: Device = None,
    site_threads: SiteThreads = None,
    amp: Amp = False,
    amend: Annotated[
        str | None, typer.Option(help="Why the plan of a study has changed since its first run.")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Only render the stored results.")] = False,
) -> None:
    """Do the missing runs of a paper's table or figure, and render it."""
    from suture.core.errors import ConfigError
    from suture.execution.sites import compute_on
    from suture_papers.tables.conduct import Session, compare_classes, conduct
    from suture_papers.tables.figures import write_plots
    from suture_papers.tables.loading import load_spec
    from suture_papers.tables.render import stem_of
    from suture_papers.tables.results import ResultStore

    if name is None and not (render and preset is None):
        raise ConfigError("name the table; without a name, use --render alone to render all")
    if name is None:
        return _render_all(results)
    chosen, stem = load_spec(name).preset(preset), Path(name).stem
    store = ResultStore(results / "runs", stem)
    if render:
        _render(chosen, store, results)
        return None
    session = Session(store, work.resolve(), data_root.resolve() if data_root else None, _report, amend)
    compute_on(device, site_threads, amp)
    conduct(chosen, session, jobs)
    try:
        write_plots(chosen, session, results, stem_of(chosen, stem))
        compare_classes(chosen, session)
    finally:  # the tables are written even where a plot fails
        _render(chosen, store, results)


def _render(chosen: Table, store: ResultStore, results: Path, *, whole: bool = False) -> bool:
    """Write the tables and figures of one preset from the stored results, and return whether it did.

    Args:
        whole: only if each cell has a result.
    """
    from suture_papers.tables.outcome import collect
    from suture_papers.tables.render import write_tables

    outcome = collect(chosen, store)
    if whole and not all(outcome.results.values()):
        return False
    for path in write_tables(outcome, results, store.table):
        print_line(f"written: {path}")
    return True


def _render_all(results: Path) -> None:
    """Write each preset with a result in every cell, the leaderboard, and the claims' page."""
    from suture.core.errors import ConfigError
    from suture.core.files import atomic_write
    from suture_papers.tables.claims import page_of
    from suture_papers.tables.leaderboard import write_leaderboard
    from suture_papers.tables.loading import known_tables, load_spec
    from suture_papers.tables.results import ResultStore

    rendered = 0
    for name in known_tables():
        spec, store = load_spec(name), ResultStore(results / "runs", name)
        for preset in spec.presets:
            rendered += _render(spec.preset(preset), store, results, whole=True)
    if not rendered:
        raise ConfigError(
            f"no table of `suture list tables` has all its results in {results / 'runs'}; name a table, the "
            "file of your own, or another folder with --results"
        )
    for path in write_leaderboard(results):
        print_line(f"written: {path}")
    if (claims := results / "claims.toml").exists():
        atomic_write(results / "claims.md", page_of(claims, results / "runs").encode())
        print_line(f"written: {results / 'claims.md'}")


def _report(line: str) -> None:
    print_line(f"{datetime.now():%H:%M:%S} {line}")
