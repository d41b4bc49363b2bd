"""The command `suture study`: the runs of a comparison of methods whose plan is registered, and its pages."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Device, SiteThreads, print_line
from suture_papers.tables.command import DataRoot


def study(
    name: Annotated[str | None, typer.Argument(help="A study, or the path of its .toml.")] = None,
    setting: Annotated[str | None, typer.Option(help="One of its settings; by default all.")] = None,
    data_root: DataRoot = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/studies"),
    results: Annotated[Path, typer.Option(help="Folder of pages and records.")] = Path("docs/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    device: Device = None,
    site_threads: SiteThreads = None,
    amend: Annotated[str | None, typer.Option(help="Why the plan has changed since its first run.")] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Only write the pages of the stored runs.")
    ] = False,
) -> None:
    """Compare methods over five folds of patients by a registered plan; continues where it stopped."""
    from suture.core.errors import ConfigError, check_known
    from suture.execution.sites import compute_on
    from suture_papers.studies.conduct import Conduct, conduct
    from suture_papers.studies.design import known_studies, load_study
    from suture_papers.studies.page import write_pages
    from suture_papers.tables.results import ResultStore

    if name is None and not render:
        raise ConfigError(f"name a study, one of {', '.join(known_studies())}; or give --render")
    designs = {} if name is None else load_study(name)
    if not render:
        check_known("setting", setting or next(iter(designs)), designs)
        if data_root is None:
            raise ConfigError("give --data-root DIR, the folder of the data sets, or set SUTURE_DATA")
        compute_on(device, site_threads)
        for design in designs.values() if setting is None else [designs[setting]]:
            store = ResultStore(results / "runs", design.stem)
            conduct(design, Conduct(store, work.resolve(), data_root.resolve(), jobs, _report, amend))
    for path in write_pages(results, designs.values()):
        print_line(f"written: {path}")


def _report(line: str) -> None:
    print_line(f"{datetime.now():%H:%M:%S} {line}")
