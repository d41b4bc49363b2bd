"""`suture data`: a site's own data, checked or made up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from suture.errors import ConfigError, SutureError

data_app = typer.Typer(help="A site's own data.", no_args_is_help=True)
console = Console()

Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: key=value. Repeatable.")]


@data_app.command()
def simulate(
    job: Annotated[str, typer.Argument(help="A name in jobs/, or a path.")],
    out: Annotated[Path, typer.Option(help="Folder to write the sites into.")],
    settings: Sets = None,
) -> None:
    """Write the sites of a job's simulation as ordinary hospital folders, for a POC on this machine."""
    from suture.job import load_job, with_settings

    chosen = with_settings(load_job(job), settings or [])
    if chosen.simulation is None:
        raise ConfigError(f"{chosen.name} simulates no sites")
    out = out.resolve()
    names = chosen.simulation.prepare(out, out, chosen.seed, chosen.method)
    for name in [*names, "server"]:
        console.print(f"{out / name / 'suture.toml'}", soft_wrap=True, highlight=False)


@data_app.command("check")
def check(
    config: Annotated[Path, typer.Argument(help="A site's suture.toml.")],
) -> None:
    """Check a site's configuration and data: counts, unreadable images, empty classes, split leaks."""
    from suture.config import load_site_config
    from suture.data.check import check as check_data
    from suture.data.check import render

    findings = check_data(load_site_config(config))
    console.print(render(findings))
    if findings.problems:
        raise SutureError(f"{config}: {len(findings.problems)} problems; mend them before you take part")
