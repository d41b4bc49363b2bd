"""`suture demo`, `suture run`, `suture export`, and the command line of a job.py."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from suture.cli.common import (
    Amp,
    Detach,
    Device,
    FlareStudy,
    JobName,
    Sets,
    SiteThreads,
    StartupKit,
    Trust,
    bar,
    console,
    guard,
    job_with,
    literal,
    plain_table,
    print_line,
)
from suture.core.entry_points import hook, if_installed
from suture.core.errors import ConfigError
from suture.core.files import read_json
from suture.core.processes import usable_cores
from suture.execution.job_files import preset_settings

if TYPE_CHECKING:
    from suture.execution.job import Job


Env = Literal["local", "sim", "poc", "prod"]
"""Where a job runs."""

Where = Annotated[
    Env,
    typer.Option(
        "--env", help="local: a plain loop; sim: FLARE's simulator; poc, prod: a running federation."
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of initialisation, shuffling and augmentation.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/JOB-TIME.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the unfinished run in --out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]
Sites = Annotated[str | None, typer.Option(help="Names of the sites, comma-separated.")]
Preset = Annotated[
    str | None,
    typer.Option(help="A preset of the job, which `suture list jobs` shows; --set overrides it."),
]
Bundle = Annotated[
    bool, typer.Option(help="Send the package with the job; by default every party has it installed.")
]
Gpus = Annotated[
    int | None, typer.Option(min=0, help="GPUs of each site that FLARE reserves for the job; see flare.gpus.")
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        help="Accept a label that resembles another, or a general one such as 'Label', as a class; or "
        "'all'. Repeatable."
    ),
]


def demo(env: Where = "local", rounds: Rounds = None, out: Out = None) -> None:
    """Train on three simulated hospitals that annotate different findings; takes about a minute."""
    workers = 3 if env == "local" and usable_cores() > 1 else None
    run("demo", env=env, rounds=rounds, out=out, workers=workers)
    # As it was called: `make demo` has it in an environment that is not active.
    suture = "suture" if which("suture") else shlex.quote(sys.argv[0])
    if env == "local":
        print_line("the same in NVIDIA FLARE's simulator, with the same model byte for byte:")
        print_line(f"  {suture} demo --env sim")
    print_line("your own hospitals:")
    print_line(f"  {suture} init study/ --site alpha=DIR_OR_TABLE --site beta=DIR_OR_TABLE")
    print_line(f"  {suture} check study/")
    print_line(f"  {suture} run study/ --env local")


def run(
    job: JobName,
    env: Where = "local",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Out = None,
    preset: Preset = None,
    settings: Sets = None,
    accept_labels: Accept = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    site_threads: SiteThreads = None,
    amp: Amp = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that simulated sites share; by default 1 with local, one for each site with sim.",
        ),
    ] = None,
    startup_kit: StartupKit = None,
    sites: Sites = None,
    bundle: Bundle = False,
    study: FlareStudy = "default",
    gpus: Gpus = None,
    detach: Detach = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a live page of the run: see suture watch.")
    ] = False,
    limits: Annotated[
        bool,
        typer.Option(
            "--limits",
            help="Apply the sites' limits of disclosure in local and sim too; without it a study's metrics "
            "are exact there.",
        ),
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Compare methods on a study: their names, comma-separated. Each site alone is added."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --compare: number of seeds.")] = 1,
    folds: Annotated[
        int | None,
        typer.Option(help="With --compare: folds of cross-validation over each site's patients."),
    ] = None,
    trust: Trust = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print only the path of the report, and errors.")
    ] = False,
) -> None:
    """Run a job: in a local loop, FLARE's simulator, a POC or production."""
    if not compare and (folds is not None or seeds > 1):
        raise typer.BadParameter("--seeds and --folds are for --compare")
    if detach and watch:
        raise typer.BadParameter("--watch needs a command that waits for the end: leave out --detach")
    if quiet and (watch or env in ("poc", "prod")):
        raise typer.BadParameter("--quiet is for a run on this machine without --watch")
    if env in ("local", "sim") or compare:
        _refuse_submission(startup_kit, sites, study, bundle=bundle, detach=detach)
    every = preset_settings(job, preset, trust=trust)
    every += _all_settings(rounds, seed, settings, accept_labels, gpus)
    chosen = job_with(job, every, trust)
    if limits:
        chosen, every = _with_limits(chosen, env), [*every, "simulation.limits=true"]
    _compute_on(env, device, site_threads, amp)
    if compare:
        _compare(chosen, env, _names(compare), out, seeds, folds, workers, quiet=quiet)
        return
    options = {"--device": device, "--site-threads": site_threads, "--workers": workers}
    flags = [name for name, given in (("--amp", amp), ("--watch", watch), ("--trust", trust)) if given]
    execute(
        chosen,
        env,
        ["suture", "run", job, *_words(env, every, options), *flags],
        out=out,
        resume=resume,
        overwrite=overwrite,
        workers=workers,
        startup_kit=startup_kit,
        study=study,
        sites=_names(sites),
        bundle=bundle,
        detach=detach,
        watch=watch,
        quiet=quiet,
    )


def _refuse_submission(
    startup_kit: Path | None, sites: str | None, study: str, *, bundle: bool, detach: bool
) -> None:
    """Refuse the options of a job that is submitted, where none is.

    Raises:
        ConfigError: names those that were given.
    """
    given = {"--startup-kit": startup_kit, "--sites": sites, "--study": study != "default"}
    idle = [name for name, value in (given | {"--bundle": bundle, "--detach": detach}).items() if value]
    if idle:
        raise ConfigError(f"{' and '.join(idle)}: for a job submitted with --env poc or prod; leave it out")


def _compare(
    job: Job,
    env: Env,
    methods: Sequence[str],
    out: Path | None,
    seeds: int,
    folds: int | None,
    workers: int | None,
    *,
    quiet: bool,
) -> None:
    """Compare methods on a study, and show their means; Ctrl-C leaves what the same command continues."""
    if env != "local":
        raise ConfigError("--compare trains each site alone, too, which needs --env local")
    folder = (out or Path("runs") / f"{job.name}-comparison").resolve()
    with bar(shown=not quiet) as progress:
        how = {"seeds": seeds, "folds": folds, "workers": workers, "progress": progress}
        how |= {} if quiet else {"report": print_line}
        done = hook("compare_methods")(job, methods, folder, **how)
    if quiet:
        print_line(str(done.page))
        return
    print_line(done.verdict, style="bold")
    table = plain_table("method", "mean AUROC", "difference (95 % CI)", "p (Holm)", "seeds")
    for line, found in zip(done.lines(), list(done.methods.values())[1:], strict=True):
        signs = " ".join("+" if gain > 0 else "-" if gain < 0 else "0" for gain in found.gains)
        table.add_row(
            escape(line.name), f"{found.mean[0]:.3f}", f"{line.shown} ({line.bounds})", line.p_value, signs
        )
    console.print(table)
    print_line(f"the figures of each site: {done.page}")


def _with_limits(job: Job, env: Env) -> Job:
    """Return the job with the limits of its sites.

    Raises:
        ConfigError: they apply anyhow, or the sites have none.
    """
    from suture.execution.job import with_settings
    from suture.execution.study import StudySites

    if env in ("poc", "prod"):
        raise ConfigError(f"the sites' limits always apply with --env {env}; leave out --limits")
    if not isinstance(job.simulation, StudySites):
        raise ConfigError(f"the sites of {job.name} are simulated and have no limits; leave out --limits")
    return with_settings(job, ["simulation.limits=true"])


def _compute_on(env: Env, device: str | None, threads: int | None, amp: bool) -> None:
    """Choose device, threads and precision of simulated sites, before anything is written.

    Raises:
        ConfigError: torch cannot use the device, or the sites are not simulated.
    """
    from suture.execution.sites import compute_on

    if env in ("local", "sim"):
        compute_on(device, threads, amp)
    elif device is not None or threads is not None or amp:
        raise ConfigError(
            f"--device, --site-threads and --amp are for simulated sites; with --env {env} they are "
            "settings of each site's own suture.toml: [training] device, threads, amp"
        )


def _words(env: Env, settings: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that has these settings, and the options that were given."""
    words = ["--env", env, *(word for setting in settings for word in ("--set", setting))]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return words


def _names(sites: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (sites or "").split(",") if name.strip())


def _all_settings(
    rounds: int | None,
    seed: int | None,
    settings: list[str] | None,
    accept: list[str] | None,
    gpus: int | None = None,
) -> list[str]:
    """Return the settings of --set, with those that have an option of their own added."""
    named = {"rounds": rounds, "flare.gpus": gpus, "seed": seed}
    found = [*(settings or ()), *(f"{key}={value}" for key, value in named.items() if value is not None)]
    if accept:
        found.append(f"accept_labels={'true' if accept == ['all'] else json.dumps(accept)}")
    return found


def execute(
    job: Job,
    env: Env,
    command: Sequence[str],
    *,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    workers: int | None = None,
    startup_kit: Path | None = None,
    study: str = "default",
    sites: Sequence[str] = (),
    bundle: bool = False,
    detach: bool = False,
    watch: bool = False,
    quiet: bool = False,
) -> None:
    """Run a job and show its table; Ctrl-C says how to go on.

    Args:
        command: the words of the command line that continues a run of simulated sites, but for its folder.
        startup_kit, study, sites, bundle, detach: of a job that is submitted to a POC or in production.

    The others are the options of `suture run` of that name.
    """
    from suture.execution.run import new_run_folder, run_job

    if env == "poc" or env == "prod":
        if workers is not None:
            raise ConfigError(
                f"--workers is for simulated sites; with --env {env} each site has its own process"
            )
        new = new_run_folder(job)
        folder = new_run_folder(job, out) if out else new
        how = {"sites": sites, "bundle": bundle, "resume": resume, "overwrite": overwrite}
        # The parties store their states under the new name, whatever the folder is called here.
        with _accompany(folder, watch):
            hook("run_remotely")(job, env, folder, new.name, startup_kit, study, detach, **how)
        return
    folder = new_run_folder(job, out)
    if env == "sim" and not quiet:
        _say_who_can_join()
    try:
        with _accompany(folder, watch):
            run_job(
                job,
                env,
                folder,
                resume=resume,
                overwrite=overwrite,
                workers=workers,
                progress=not quiet,
            )
        if quiet:
            print_line(str(folder / "report.html"))
        else:
            if_installed("show_run")(folder)
    except KeyboardInterrupt:
        print_line(_how_to_go_on(folder, command), style="yellow")
        raise typer.Exit(130) from None


def _say_who_can_join() -> None:
    """Say who else can join FLARE's simulator on this machine, once a command."""
    from suture.execution.simulator import open_to_others

    if note := open_to_others():
        print_line(note, style="yellow")


def _accompany(folder: Path, watch: bool) -> AbstractContextManager[None]:
    """Serve the page of a run while a block runs, where that is wanted."""
    return hook("accompanied")(folder) if watch else nullcontext()


def _how_to_go_on(folder: Path, command: Sequence[str]) -> str:
    """Say what an interruption has left, and the command that continues it."""
    if not (folder / "run.json").is_file():
        return "interrupted before the run began; no files are left"
    if read_json(folder / "run.json").get("status") == "finished":
        shows = shlex.join(["suture", "report", str(folder)])
        return f"interrupted after the end of the run. Its table: {shows}"
    again = shlex.join([*command, "--out", str(folder), "--resume"])
    return f"interrupted; every committed round is saved. Continue with:\n{again}"


def export(
    job: JobName,
    out: Annotated[Path, typer.Option(help="Folder to write the job into.")],
    experiment: Annotated[
        str | None, typer.Option(help="Name of the experiment, by which a later job continues it.")
    ] = None,
    rounds: Rounds = None,
    seed: Seed = None,
    preset: Preset = None,
    settings: Sets = None,
    accept_labels: Accept = None,
    sites: Sites = None,
    bundle: Bundle = False,
    gpus: Gpus = None,
    simulator: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write data and policy of the simulated sites for FLARE's own simulator."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a job as a folder that FLARE's admin console accepts."""
    every = preset_settings(job, preset, trust=trust)
    every += _all_settings(rounds, seed, settings, accept_labels, gpus)
    chosen, names = job_with(job, every, trust), _names(sites)
    if simulator:
        from suture.flare.simulate import simulator_workspace

        if names:
            raise typer.BadParameter("--simulator runs the sites of the job; leave --sites out")
        chosen, written = simulator_workspace(chosen, simulator)
        names = tuple(written)
    _export(chosen, out, experiment, names, bundle)
    if simulator:
        folder, workspace = ((path / chosen.name).resolve() for path in (out, simulator))
        # FLARE 2.9 calls `nvflare simulator` deprecated, and its `SimEnv` takes recipes alone.
        places = f'"{folder}", "{workspace}", threads={len(names)}'
        code = f"from nvflare import SimulatorRunner as Run; raise SystemExit(Run({places}).run())"
        print_line(f"run it: {shlex.join(['python', '-c', code])}")
        _say_who_can_join()


def _export(
    job: Job, out: Path, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = False
) -> None:
    from suture.flare.recipe import export_job

    print_line(f"job: {export_job(job, out, experiment, sites, bundle)}")


def run_job_file(job: Job) -> None:
    """Run the command line of a job.py: the options of `suture run` without the job's name."""
    from suture.execution.job import beside, with_settings

    job = beside(job, Path(sys.argv[0]).resolve().parent)
    file_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @file_app.command(help=job.title)
    def main_(
        env: Where = "local",
        rounds: Rounds = None,
        seed: Seed = None,
        out: Out = None,
        settings: Sets = None,
        device: Device = None,
        resume: Resume = False,
        overwrite: Overwrite = False,
        export: Annotated[
            bool, typer.Option("--export", help="Write the job for the admin console.")
        ] = False,
        export_dir: Annotated[Path, typer.Option(help="Folder for --export.")] = Path("exported"),
        startup_kit: StartupKit = None,
    ) -> None:
        every = _all_settings(rounds, seed, settings, None)
        chosen = with_settings(job, every)
        if export:
            _export(chosen, export_dir)
            return
        _compute_on(env, device, None, amp=False)
        again = ["python", sys.argv[0], *_words(env, every, {"--device": device})]
        execute(chosen, env, again, out=out, resume=resume, overwrite=overwrite, startup_kit=startup_kit)

    guard(literal(file_app))
