"""`suture status`, `suture results` and `suture resume`: jobs at a server."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suture.cli.common import Detach, FlareStudy, Json, StartupKit, print_line
from suture.core.errors import ConfigError
from suture.core.escaping import printable
from suture.core.files import read_json, write_json
from suture.core.labels import check_experiment, shown_name
from suture_results.report_command import show_run

if TYPE_CHECKING:
    from suture.execution.job import Job
    from suture.flare.kit import Kit

Env = Annotated[str, typer.Option(help="poc or prod.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/EXPERIMENT.")]


def status(
    job_id: Annotated[str | None, typer.Argument(help="FLARE's id of a job; by default all jobs.")] = None,
    env: Env = "poc",
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
    as_json: Json = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="End with exit code 1 if a site is silent, missing or refused, a job failed, or the kit's "
            "disk is nearly full.",
        ),
    ] = False,
    silent: Annotated[
        float, typer.Option(min=1, help="Minutes after its last contact from which a site is silent.")
    ] = 1,
) -> None:
    """Show the jobs and sites of a running federation, or the progress of one job."""
    from suture_admin.kits import admin_kit
    from suture_admin.monitor import federation_state, full_disk, job_state
    from suture_admin.session import connect

    kit = admin_kit(startup_kit, env, study)
    with connect(kit) as federation:
        found = job_state(federation, job_id) if job_id else federation_state(federation, silent)
    found["faults"] += full_disk(kit.folder)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif job_id:
        print_line(f"{shown_name(found['name'])}: {printable(found['status'], 40)}")
        rounds = f"round {found['round']} of {found['rounds']}" if found["rounds"] else ""
        for line in filter(None, dict.fromkeys([found["why"], rounds, *found["events"], *found["faults"]])):
            print_line(line)
    else:
        sites = [f"{shown_name(site)} ({of['seconds']} s ago)" for site, of in found["sites"].items()]
        print_line(
            f"{kit.project} at {kit.server}, last contact: {', '.join(sites) or 'no site is connected'}"
        )
        for line in [*map(_line, found["jobs"]), *map(printable, found["faults"])]:
            print_line(line)
    if check and found["faults"]:
        raise typer.Exit(1)


def _line(job: dict[str, Any]) -> str:
    submitted, took = (
        printable(job[key] or "", 40).partition(".")[0] for key in ("submit_time_iso", "duration")
    )
    return (
        f"{printable(job['job_id'], 80)}  {printable(job['status'], 40):<20} {submitted:<19}  {took:>8}  "
        f"{shown_name(job['name'])}"
    )


def results(
    job_id: Annotated[str, typer.Argument(help="FLARE's id of the job; `suture status` lists them.")],
    out: Out = None,
    env: Env = "poc",
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
) -> None:
    """Download the results of a finished job into a run folder, and show its table."""
    from suture_admin.kits import admin_kit
    from suture_admin.remote import fetch

    if Path(job_id).is_dir():
        raise ConfigError(f"{job_id} is a folder, not FLARE's id of a job; suture report {job_id} shows it")
    try:
        kit = admin_kit(startup_kit, env, study)
    except ConfigError as error:
        raise ConfigError(f"job {job_id}: {error}") from error
    show_run(fetch(kit, job_id, out))


def run_remotely(
    job: Job,
    env: str,
    folder: Path,
    experiment: str,
    startup_kit: Path | None,
    study: str,
    detach: bool,
    **how: Any,
) -> None:
    """Run a job in a POC or in production, and show its table; Ctrl-C does not stop the job.

    Args:
        experiment: the name under which the parties store their states.
        how: the fields of a `Submission`.
    """
    from suture.execution.job import check_federated, check_finetuning
    from suture_admin.kits import admin_kit
    from suture_admin.poc import check_study
    from suture_admin.remote import Submission, submit

    check_federated(job.method)
    check_finetuning(job)
    submission = Submission(**how)
    kit = admin_kit(startup_kit, env, study)
    # A kit lies in FOLDER/PROJECT/prod_NN/NAME.
    poc = kit.folder.resolve().parents[2] if env == "poc" else None
    if poc:
        check_study(job, poc, submission.sites)
    job_id = submit(job, env, kit, folder, experiment, submission)
    if _follow(job.title, env, kit, folder, job_id, detach):
        if poc and getattr(job.simulation, "synthetic", False):
            _mark_synthetic(folder)
        if job.finetuning:
            _tune(job, poc, folder)
        show_run(folder)


def _mark_synthetic(folder: Path) -> None:
    """Say in the run's record, report and card that its images are drawn, which a server cannot know."""
    from suture_results.card import write_pages

    write_json(folder / "run.json", read_json(folder / "run.json") | {"synthetic": True})
    write_pages(folder)


def _tune(job: Job, poc: Path | None, folder: Path) -> None:
    """Fine-tune on the tasks of the job's simulation, which a POC has; in production their owner does it."""
    from suture.execution.run import finetune_on
    from suture_admin.poc import data_of

    if poc is None or not finetune_on(job, folder, data_of(job, poc)):
        model = shlex.quote(str(folder / "model"))
        print_line(f"not fine-tuned here; on the data of a task, run: suture finetune {model} suture.toml")


def resume(
    experiment: Annotated[
        str, typer.Argument(help="Name of the experiment: the name of its folder in runs/.")
    ],
    env: Env = "poc",
    out: Out = None,
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
    detach: Detach = False,
) -> None:
    """Continue an experiment after its last committed round, once a lost server, job or site is back."""
    from suture_admin.kits import admin_kit
    from suture_admin.recovery import resume as resume_job

    check_experiment(experiment)
    kit = admin_kit(startup_kit, env, study)
    folder = (out or Path("runs") / experiment).resolve()
    job_id, name = resume_job(kit, experiment, folder, env)
    if _follow(name, env, kit, folder, job_id, detach):
        show_run(folder)


def _follow(title: str, env: str, kit: Kit, folder: Path, job_id: str, detach: bool) -> bool:
    """Show the progress of a job and download its results; return False where the user does not wait."""
    from suture_admin.remote import follow

    if detach:
        print_line(f"submitted as {job_id}\n{_later(kit, folder, job_id)}")
        return False
    try:
        follow(title, env, kit, folder, job_id)
    except KeyboardInterrupt:
        print_line(f"the job continues at the server\n{_later(kit, folder, job_id)}", style="yellow")
        raise typer.Exit(130) from None
    return True


def _later(kit: Kit, folder: Path, job_id: str) -> str:
    """Return the commands for a job that nobody waits for, a line each."""
    from suture_admin.kits import options_of

    own = options_of(kit)
    commands = {
        "its progress": ["suture", "status", job_id, *own],
        "its results, after its end": ["suture", "results", job_id, "--out", str(folder), *own],
        "end it": ["nvflare", "job", "abort", job_id, *own],
    }
    return "\n".join(f"{what}: {shlex.join(words)}" for what, words in commands.items())
