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


@data_app.command()
def draw(
    configs: Annotated[list[Path], typer.Argument(help="The suture.toml of each data set.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
) -> None:
    """Draw how often each class occurs in some data sets, and which classes occur together in each."""
    from suture.config import load_site_config
    from suture.data import load_table
    from suture.evaluation.drawings import draw_cooccurrence, draw_frequencies
    from suture.evaluation.labels_overview import cooccurrence, frequencies
    from suture.files import atomic_write

    tables = {path.resolve().parent.name: load_table(load_site_config(path).data) for path in configs}
    if len(tables) < len(configs):
        raise ConfigError(
            "two of the data sets lie in folders of one name, by which they are told apart; rename one"
        )
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"frequencies.svg": draw_frequencies({name: frequencies(t) for name, t in tables.items()})}
    for name, table in tables.items():
        drawn[f"cooccurrence-{name}.svg"] = draw_cooccurrence(table.labels.names, cooccurrence(table), name)
    for file, content in drawn.items():
        atomic_write(out / file, content)
        console.print(f"written: {out / file}", soft_wrap=True, highlight=False)
