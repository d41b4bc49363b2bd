"""`suture demo`, `suture run`, `suture export`, and the command line of a job.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from suture.cli.data import Sets
from suture.cli.guarded import guarded
from suture.cli.jobs import Submission, run_remotely, show_run
from suture.cli.machine import Amp, Device, SiteThreads

console = Console()


class Env(StrEnum):
    """Where a job runs."""

    local = "local"
    sim = "sim"
    poc = "poc"
    prod = "prod"


Rounds = Annotated[int | None, typer.Option(help="Communication rounds.")]
Seed = Annotated[int | None, typer.Option(help="Seed of initialisation, shuffling and augmentation.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/JOB-TIME.")]
Sites = Annotated[str | None, typer.Option(help="Names of the sites, comma-separated: an app for each.")]
Bundle = Annotated[
    bool, typer.Option(help="Whether the package travels with the job, or is installed at every party.")
]
Accept = Annotated[
    list[str] | None, typer.Option(help="A look-alike label that is a class of its own, or 'all'.")
]


def demo(
    env: Env = Env.sim, rounds: Rounds = None, seed: Seed = None, out: Out = None, device: Device = None
) -> None:
    """Run the main job on embedded data: three sites with different findings."""
    run("demo", env=env, rounds=rounds, seed=seed, out=out, device=device)


def run(
    job: Annotated[str, typer.Argument(help="A name in jobs/, or a path.")],
    env: Annotated[
        Env,
        typer.Option(help="local: a plain loop; sim: FLARE's simulator; poc, prod: a running federation."),
    ] = Env.sim,
    rounds: Rounds = None,
    seed: Seed = None,
    out: Out = None,
    settings: Sets = None,
    accept_labels: Accept = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    device: Device = None,
    site_threads: SiteThreads = None,
    amp: Amp = False,
    threads: Annotated[
        int | None, typer.Option(help="Simulator processes; fewer than sites share them.")
    ] = None,
    startup_kit: Annotated[
        Path | None, typer.Option(help="Admin startup kit, for --env poc and prod.")
    ] = None,
    sites: Sites = None,
    bundle: Bundle = True,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --env poc and prod: do not wait; see suture results.")
    ] = False,
) -> None:
    """Run a job."""
    from suture.simulation.job import load_job

    _compute_on(env, device, site_threads, amp)
    execute(
        load_job(job),
        env=env,
        settings=_all_settings(rounds, seed, settings, accept_labels),
        out=out,
        resume=resume,
        overwrite=overwrite,
        threads=threads,
        startup_kit=startup_kit,
        sites=_names(sites),
        bundle=bundle,
        detach=detach,
    )


def _compute_on(env: Env, device: str | None, threads: int | None, amp: bool) -> None:
    """Settles what simulated sites compute on, before anything is written."""
    from suture.core.errors import ConfigError
    from suture.simulation.machine import compute_on

    if env in (Env.local, Env.sim):
        compute_on(device, threads, amp)
    elif device is not None or threads is not None or amp:
        raise ConfigError(
            f"--device, --site-threads and --amp are for simulated sites; with --env {env.value} each site's "
            "own suture.toml says it: [training] device, threads, amp"
        )


def _names(sites: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (sites or "").split(",") if name.strip())


def _all_settings(
    rounds: int | None, seed: int | None, settings: list[str] | None, accept: list[str] | None
) -> list[str]:
    import json

    found = list(settings or ())
    if rounds is not None:
        found.append(f"rounds={rounds}")
    if seed is not None:
        found.append(f"seed={seed}")
    if accept:
        found.append(f"accept_labels={'true' if accept == ['all'] else json.dumps(accept)}")
    return found


def execute(
    job: Any,
    *,
    env: Env,
    settings: list[str],
    out: Path | None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    startup_kit: Path | None = None,
    sites: Sequence[str] = (),
    bundle: bool = True,
    detach: bool = False,
) -> None:
    """Runs a job and shows its table."""
    from suture.simulation.job import with_settings
    from suture.simulation.run import run_here

    job = with_settings(job, settings)
    name = f"{job.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = (out or Path("runs") / name).resolve()
    if env in (Env.poc, Env.prod):
        how = Submission(sites, bundle, resume, overwrite, detach)
        run_remotely(job, env.value, folder, name, startup_kit, how)
        return
    run_here(job, env.value, folder, resume=resume, overwrite=overwrite, threads=threads)
    show_run(folder)


def export(
    job: Annotated[str, typer.Argument(help="A name in jobs/, or a path.")],
    out: Annotated[Path, typer.Option(help="Folder to write the job into.")],
    experiment: Annotated[str | None, typer.Option(help="Identifier that a later job continues.")] = None,
    settings: Sets = None,
    sites: Sites = None,
    bundle: Bundle = True,
) -> None:
    """Write a job as a folder that FLARE's admin console accepts."""
    from suture.flare.submit import export_job
    from suture.simulation.job import load_job, with_settings

    chosen = with_settings(load_job(job), settings or [])
    console.print(f"job: {export_job(chosen, out, experiment, _names(sites), bundle)}", soft_wrap=True)


def run_job_file(job: Any) -> None:
    """The command line of a job.py: the options of `suture run` without the job's name."""
    file_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @file_app.command(help=job.title)
    def main_(
        env: Env = Env.sim,
        rounds: Rounds = None,
        seed: Seed = None,
        out: Out = None,
        settings: Sets = None,
        device: Device = None,
        resume: bool = False,
        overwrite: bool = False,
        export: Annotated[
            bool, typer.Option("--export", help="Write the job for the admin console.")
        ] = False,
        export_dir: Annotated[Path, typer.Option(help="Where to.")] = Path("exported"),
        startup_kit: Annotated[Path | None, typer.Option(help="Admin startup kit.")] = None,
    ) -> None:
        chosen = _all_settings(rounds, seed, settings, None)
        if export:
            from suture.flare.submit import export_job
            from suture.simulation.job import with_settings

            console.print(f"job: {export_job(with_settings(job, chosen), export_dir)}", soft_wrap=True)
            return
        _compute_on(env, device, None, amp=False)
        execute(
            job,
            env=env,
            settings=chosen,
            out=out,
            resume=resume,
            overwrite=overwrite,
            startup_kit=startup_kit,
        )

    guarded(file_app)
