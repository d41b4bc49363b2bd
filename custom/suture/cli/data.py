"""`suture data`: a site's own data, checked or made up."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from suture.cli.machine import Device
from suture.core.errors import ConfigError, SutureError

data_app = typer.Typer(help="A site's own data.", no_args_is_help=True)
console = Console()

Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: key=value. Repeatable.")]


class Per(StrEnum):
    """What classes are counted in."""

    patient = "patient"
    image = "image"


@data_app.command()
def simulate(
    job: Annotated[str, typer.Argument(help="A name in jobs/, or a path.")],
    out: Annotated[Path, typer.Option(help="Folder to write the sites into.")],
    settings: Sets = None,
    device: Device = None,
) -> None:
    """Write the sites of a job's simulation as ordinary hospital folders, for a POC on this machine."""
    from suture.simulation.job import load_job, with_settings
    from suture.simulation.machine import compute_on

    compute_on(device)
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
    from suture.data.config import load_site_config
    from suture.data.quality import check as check_data
    from suture.data.quality import render

    findings = check_data(load_site_config(config))
    console.print(render(findings))
    if findings.problems:
        raise SutureError(f"{config}: {len(findings.problems)} problems; mend them before you take part")


@data_app.command()
def draw(
    configs: Annotated[
        list[Path],
        typer.Argument(help="The suture.toml of each data set, or a file of its own name: nih.toml."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    per: Annotated[Per, typer.Option(help="What classes occur together in.")] = Per.patient,
) -> None:
    """Draw how often each class occurs in some data sets, and which classes occur together in each."""
    from suture.cli.sources import load_sources
    from suture.core.files import atomic_write
    from suture.data.readers import load_table
    from suture.reports.cooccurrence import Unit, cooccurrence, frequencies, unit_of
    from suture.reports.plots import plot_cooccurrence, plot_frequencies

    tables = {name: load_table(config.data) for name, config in load_sources(configs).items()}
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"frequencies.svg": plot_frequencies({name: frequencies(t) for name, t in tables.items()})}
    for name, table in tables.items():
        unit: Unit = "image" if per is Per.image else unit_of(table)
        shares = cooccurrence(table, per=unit)
        drawn[f"cooccurrence-{name}.svg"] = plot_cooccurrence(table.labels.names, shares, name, unit)
    for file, content in drawn.items():
        atomic_write(out / file, content)
        console.print(f"written: {out / file}", soft_wrap=True, highlight=False)
