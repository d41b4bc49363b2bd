"""Jobs and their results: status, results, resume and report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from suture.flare.admin.kit import Kit
    from suture.simulation.job import Job

console = Console()

StartupKit = Annotated[
    Path | None, typer.Option(help="Startup kit of an administrator; by default that of the POC.")
]


def status(
    job_id: Annotated[str | None, typer.Argument(help="FLARE's id of a job; by default all jobs.")] = None,
    startup_kit: StartupKit = None,
) -> None:
    """Show the jobs of a running federation and its sites; or how far one job is."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.session import connected

    kit = admin_kit(startup_kit)
    with connected(kit) as federation:
        if job_id is None:
            console.print(f"{kit.project} at {kit.server}, sites: {', '.join(federation.sites()) or 'none'}")
            for job in federation.jobs():
                console.print(_line(job), soft_wrap=True, highlight=False)
            return
        meta = federation.meta(job_id)
        recent = federation.recent(job_id) if meta.get("status") == "RUNNING" else {}
    _show(meta, recent)


def _line(job: dict[str, Any]) -> str:
    submitted, took = (str(job.get(key, "")).partition(".")[0] for key in ("submit_time", "duration"))
    return f"{job['job_id']}  {job.get('status', ''):<20} {submitted:<19}  {took:>8}  {job.get('job_name')}"


def _show(meta: dict[str, Any], recent: dict[str, Any]) -> None:
    from suture.flare.admin.remote import state
    from suture.reports.progress import Progress

    console.print(f"{meta.get('name')}: {meta.get('status')}")
    progress = Progress(str(meta.get("name")), "")
    lines = [progress.take(event) for event in recent.get("events", [])]
    for line in [state(meta), *lines[-10:]]:
        if line:
            console.print(line, highlight=False, markup=False)


def results(
    job_id: Annotated[str, typer.Argument(help="FLARE's id of the job; `suture status` lists them.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/EXPERIMENT.")] = None,
    startup_kit: StartupKit = None,
) -> None:
    """Bring the results of a job that has ended into a run folder, and show its table."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.remote import fetch

    show_run(fetch(admin_kit(startup_kit), job_id, out))


@dataclass(frozen=True)
class Submission:
    """How a job is handed in; as in `suture.flare.admin.remote.submit`."""

    sites: Sequence[str] = ()
    bundle: bool = True
    resume: bool = False
    overwrite: bool = False
    detach: bool = False


def run_remotely(
    job: Job, env: str, folder: Path, experiment: str, startup_kit: Path | None, how: Submission
) -> None:
    """Runs a job in a POC or in production, and shows its table; Ctrl-C leaves the job alone."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.remote import submit
    from suture.simulation.run import check_finetuning

    check_finetuning(job)
    kit = admin_kit(startup_kit, env)
    job_id = submit(
        job,
        env,
        kit,
        folder,
        experiment,
        sites=how.sites,
        bundle=how.bundle,
        resume=how.resume,
        overwrite=how.overwrite,
    )
    if _follow(job.title, env, kit, folder, job_id, how.detach):
        if job.finetuning:
            _tune(job, env, kit, folder)
        show_run(folder)


def _tune(job: Job, env: str, kit: Kit, folder: Path) -> None:
    """A POC has the tasks of its job's simulation; in production they lie with whoever has such data."""
    from suture.flare.admin.poc import data_of
    from suture.learning.finetuning import TARGETS, tune_targets
    from suture.reports.report import write_report

    # A kit lies in FOLDER/PROJECT/prod_NN/NAME.
    tasks = data_of(job, kit.folder.resolve().parents[2]) / TARGETS
    if env == "poc" and job.finetuning and tasks.is_dir():
        tune_targets(folder, job.finetuning, job.seed, tasks)
        write_report(folder)
    else:
        console.print(
            f"not fine-tuned; with data of a task: suture finetune {folder / 'model'} suture.toml",
            soft_wrap=True,
            highlight=False,
        )


def resume(
    experiment: Annotated[str, typer.Argument(help="Name of the experiment: that of its folder in runs/.")],
    env: Annotated[str, typer.Option(help="poc or prod.")] = "poc",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/EXPERIMENT.")] = None,
    startup_kit: StartupKit = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait; see suture results.")] = False,
) -> None:
    """Continue an experiment after its last committed round: a server, job or site was lost and is back."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.resume import resume as hand_in_again

    kit = admin_kit(startup_kit, env)
    folder = (out or Path("runs") / experiment).resolve()
    job_id, name = hand_in_again(kit, experiment, folder, env)
    if _follow(name, env, kit, folder, job_id, detach):
        show_run(folder)


def _follow(title: str, env: str, kit: Kit, folder: Path, job_id: str, detach: bool) -> bool:
    """Shows how a job goes until its results are here; returns whether they are, or nobody waits."""
    from suture.flare.admin.remote import accompany

    later = f"when it has ended: suture results {job_id} --out {folder} --startup-kit {kit.folder}"
    if detach:
        console.print(f"submitted as {job_id}; {later}", soft_wrap=True, highlight=False)
        return False
    try:
        accompany(title, env, kit, folder, job_id)
    except KeyboardInterrupt:
        console.print(f"the job goes on without you; {later}", soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    return True


def show_run(folder: Path) -> None:
    """The table of a run, and where its report is."""
    from suture.protocol.records import read_metrics
    from suture.reports.finetuning_results import finetuning_table, nothing_measured, read_finetuning_results
    from suture.reports.tables import per_class_table

    run_facts, tuned = json.loads((folder / "run.json").read_text()), read_finetuning_results(folder)
    measured = (folder / "metrics.json").exists() and not (tuned and nothing_measured(read_metrics(folder)))
    if measured:
        console.print(per_class_table(run_facts, json.loads((folder / "metrics.json").read_text())))
    if tuned:
        console.print(finetuning_table(tuned))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)


def report(directory: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Render the report of a run again, and show its table."""
    from suture.reports.report import write_report

    write_report(directory)
    show_run(directory)
