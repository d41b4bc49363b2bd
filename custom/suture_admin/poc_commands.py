"""`suture poc`: a federation of processes with TLS on this machine."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suture.cli.common import Sets, Trust, job_with, known_names, print_line
from suture.core.errors import ConfigError, FederationError

if TYPE_CHECKING:
    from suture.flare.kit import Kit

poc_app = typer.Typer(
    name="poc", help="A federation of processes with TLS on this machine.", no_args_is_help=True
)

_SimulatedJob = Annotated[
    str,
    typer.Argument(
        help="A name in jobs/, or a path: the job whose simulated sites take part.",
        autocompletion=known_names,
    ),
]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder of the POC; by default FLARE's own.")]
_WAIT = 120.0


@poc_app.command()
def up(
    job: _SimulatedJob,
    settings: Sets = None,
    folder: Dir = None,
    port: Annotated[int, typer.Option(help="Port of the server, or the next free one.")] = 8002,
    loose: Annotated[
        bool, typer.Option("--loose", help="Jobs may bring code; sites have no filter and send logs.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the federation in --dir.")] = False,
    project: Annotated[
        Path | None, typer.Option(help="A project.yml to use instead of poc_workspace's.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Provision a server and a job's sites, give them data and a policy, and start those that do not run."""
    from suture.flare.kit import lead
    from suture_admin.poc import chosen_folder, prepare, project_template
    from suture_admin.processes import running

    chosen, root = job_with(job, settings, trust), chosen_folder(folder)
    if running(root) and (overwrite or loose):
        raise ConfigError(f"the federation in {root} is running; stop it first: suture poc down")
    kits = prepare(chosen, root, project or project_template(), port, loose=loose, overwrite=overwrite)
    sites = _start(root, kits)
    kit = lead(root)
    print_line(f"{kit.server}, user: {kit.name}, sites: {', '.join(sites)}, folder: {root}")
    option = f" --startup-kit {shlex.quote(str(kit.folder))}" if folder else ""
    option += " --trust" if trust else ""
    print_line(f"next: suture run {shlex.quote(job)} --env poc{option}")
    option = f" --dir {shlex.quote(str(root))}" if folder else ""
    print_line(f"then: suture poc down{option}")


def _start(root: Path, kits: dict[str, Kit]) -> list[str]:
    """Start the parties that do not run, wait for the sites to connect, and return their names.

    Raises:
        FederationError: a process ends, or a site does not register in time.
    """
    from suture.flare.kit import project_admin
    from suture_admin.poc import parties
    from suture_admin.processes import check_alive, last_error, parties_of, running, start
    from suture_admin.session import wait_for_sites

    server, sites = parties(kits)
    alive, since, clock = running(root), time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S")
    started = start(root, (server, *sites.values()))
    if not started:
        return list(sites)
    if alive:
        names = ", ".join(party.name for party in started)
        print_line(f"running already: {', '.join(alive)}; started: {names}")
    missing = wait_for_sites(
        project_admin(root), set(sites), _WAIT, lambda: check_alive(parties_of(root), kits)
    )
    if missing:
        asked = [server, *(sites[name] for name in sorted(missing))]
        errors = {kit.name: last_error(kit, clock) for kit in asked}
        said = "".join(f"\n- {name}: {error}" for name, error in errors.items() if error)
        raise FederationError(
            f"{', '.join(sorted(missing))} did not register within {_WAIT:.0f} s. See log.txt and "
            f"poc_console.log in their folders in {server.folder.parent}, and stop the rest: suture poc down"
            f"{said}"
        )
    print_line(f"ready after {time.monotonic() - since:.0f} s")
    return list(sites)


@poc_app.command()
def data(job: _SimulatedJob, settings: Sets = None, folder: Dir = None, trust: Trust = False) -> None:
    """Give the sites of a prepared POC the data of a job, after `nvflare poc prepare`."""
    from suture.flare.kit import kits_in
    from suture_admin.poc import chosen_folder, place_configs, simulate

    chosen, root = job_with(job, settings, trust), chosen_folder(folder)
    kits = kits_in(root)
    names, written = simulate(chosen, root)
    place_configs(chosen, names, written, kits)
    for name in names:
        print_line(f"{kits[name].folder / 'local' / 'suture.toml'}")


@poc_app.command()
def status(folder: Dir = None) -> None:
    """Show which processes run."""
    from suture_admin.poc import chosen_folder
    from suture_admin.processes import parties_of

    started = parties_of(chosen_folder(folder))
    if not started:
        print_line("nothing was started; suture poc up JOB")
    for party in started:
        print_line(f"{party.name}: {'running' if party.process() else 'ended'} (process {party.pid})")


@poc_app.command()
def down(folder: Dir = None) -> None:
    """Stop the processes that `suture poc up` started, and no others."""
    from suture_admin.poc import chosen_folder
    from suture_admin.processes import stop

    stopped = stop(chosen_folder(folder))
    print_line(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
