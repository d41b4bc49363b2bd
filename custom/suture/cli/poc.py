"""`suture poc`: a federation of processes with TLS on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from suture.cli.data import Sets
from suture.core.errors import ConfigError, FederationError

poc_app = typer.Typer(help="A federation of processes with TLS on this machine.", no_args_is_help=True)
console = Console()

JobName = Annotated[str, typer.Argument(help="A name in jobs/, or a path: whose simulated sites take part.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder of it; by default FLARE's own for a POC.")]
_WAIT = 120.0


@poc_app.command()
def up(
    job: JobName,
    settings: Sets = None,
    folder: Dir = None,
    port: Annotated[int, typer.Option(help="Of the server; another one where it is in use.")] = 8002,
    strict: Annotated[
        bool, typer.Option("--strict", help="Sites filter every job, refuse code that travels, keep logs.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Make the federation in --dir anew.")
    ] = False,
    project: Annotated[Path | None, typer.Option(help="Another project.yml than poc_workspace's.")] = None,
) -> None:
    """Provision a server and a job's sites, give them data and a policy, and start what does not run."""
    from suture.flare.admin.kit import project_admin
    from suture.flare.admin.poc import chosen_folder, parties, prepare, project_template
    from suture.flare.admin.processes import check_alive, parties_of, running, start
    from suture.flare.admin.session import wait_for_sites
    from suture.simulation.job import load_job, with_settings

    chosen, root = with_settings(load_job(job), settings or []), chosen_folder(folder)
    if running(root) and (overwrite or strict):
        raise ConfigError(f"the federation in {root} is running; stop it first: suture poc down")
    kits = prepare(chosen, root, project or project_template(), port, strict=strict, overwrite=overwrite)
    server, sites = parties(kits)
    alive, since = running(root), time.monotonic()
    if begun := start(root, (server, *sites.values())):
        if alive:
            names = ", ".join(party.name for party in begun)
            console.print(f"running already: {', '.join(alive)}; started: {names}", highlight=False)
        if missing := wait_for_sites(
            project_admin(root), set(sites), _WAIT, lambda: check_alive(parties_of(root), kits)
        ):
            raise FederationError(
                f"{', '.join(sorted(missing))} did not register within {_WAIT:.0f} s; see poc_console.log in "
                f"their folders in {server.folder.parent}, and stop the rest: suture poc down"
            )
        console.print(f"ready after {time.monotonic() - since:.0f} s", highlight=False)
    kit = project_admin(root)
    console.print(f"{kit.server}, sites: {', '.join(sites)}, folder: {root}", soft_wrap=True, highlight=False)
    option = f" --startup-kit {kit.folder}" if folder else ""
    console.print(f"next: suture run {job} --env poc{option}", soft_wrap=True, highlight=False)
    option = f" --dir {root}" if folder else ""
    console.print(f"then: suture poc down{option}", soft_wrap=True, highlight=False)


@poc_app.command()
def partition_table(job: JobName, settings: Sets = None, folder: Dir = None) -> None:
    """Give the sites of a prepared federation the data of a job: after `nvflare poc prepare`."""
    from suture.flare.admin.kit import kits_in
    from suture.flare.admin.poc import chosen_folder, hand_out, simulate
    from suture.simulation.job import load_job, with_settings

    chosen, root = with_settings(load_job(job), settings or []), chosen_folder(folder)
    kits = kits_in(root)
    names, data = simulate(chosen, root)
    hand_out(chosen, names, data, kits)
    for name in names:
        console.print(f"{kits[name].folder / 'local' / 'suture.toml'}", soft_wrap=True, highlight=False)


@poc_app.command()
def status(folder: Dir = None) -> None:
    """Show which processes live."""
    from suture.flare.admin.poc import chosen_folder
    from suture.flare.admin.processes import parties_of

    started = parties_of(chosen_folder(folder))
    if not started:
        console.print("nothing was started; suture poc up JOB")
    for party in started:
        console.print(f"{party.name}: {'running' if party.process() else 'ended'} (process {party.pid})")


@poc_app.command()
def down(folder: Dir = None) -> None:
    """Stop the processes that `suture poc up` started, and no others."""
    from suture.flare.admin.poc import chosen_folder
    from suture.flare.admin.processes import stop

    stopped = stop(chosen_folder(folder))
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
