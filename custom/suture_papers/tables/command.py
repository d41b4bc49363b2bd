"""The command `suture table`: the runs of a paper's table, and its rendering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Amp, Device, SiteThreads, print_line

DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets.", envvar="SUTURE_DATA")]


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
    data_root: DataRoot = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/tables"),
    results: Annotated[Path, typer.Option(help="Folder of pages and results.")] = Path("docs/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    device: Device = None,
    site_threads: SiteThreads = None,
    amp: Amp = False,
    render: Annotated[bool, typer.Option("--render", help="Only render the stored results.")] = False,
) -> None:
    """Do the missing runs of a paper's table or figure, and render its page."""
    from suture.core.errors import ConfigError
    from suture.execution.sites import compute_on
    from suture_papers.tables.conduct import Session, conduct
    from suture_papers.tables.loading import load_spec, paper_of
    from suture_papers.tables.render import stem_of, write_page
    from suture_papers.tables.results import ResultStore

    if name is None and not (render and preset is None):
        raise ConfigError("name the table; without a name, use --render alone to render all")
    if name is None:
        return _render_all(results)
    chosen, stem = load_spec(name).preset(preset), Path(name).stem
    if not render:
        store, root = ResultStore(results / "runs", stem), data_root.resolve() if data_root else None
        compute_on(device, site_threads, amp)
        conduct(chosen, Session(store, work.resolve(), root, _report), jobs)
    _tell(write_page(paper_of(name), results, stem_of(chosen, stem)))
    return None


def _render_all(results: Path) -> None:
    """Write the pages of all papers, and the claims' page."""
    from suture.core.errors import ConfigError
    from suture.core.files import atomic_write
    from suture_papers.tables.claims import page_of
    from suture_papers.tables.loading import papers
    from suture_papers.tables.render import write_page

    written = [path for paper in papers() for path in write_page(paper, results)]
    if not written:
        raise ConfigError(
            f"no table of `suture list tables` has all its results in {results / 'runs'}; name a table, the "
            "file of your own, or another folder with --results"
        )
    if (claims := results / "claims.toml").exists():
        atomic_write(results / "claims.md", page_of(claims, results / "runs").encode())
        written.append(results / "claims.md")
    _tell(written)


def _tell(written: list[Path]) -> None:
    for path in written:
        print_line(f"written: {path}")


def _report(line: str) -> None:
    print_line(f"{datetime.now():%H:%M:%S} {line}")
