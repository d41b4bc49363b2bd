"""`suture status`, `suture results`, `suture resume` and `suture report`: jobs and their results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suture.cli.common import Detach, FlareStudy, RunFolder, StartupKit, console, print_line, stated
from suture.core.files import read_json, write_json
from suture.core.names import check_experiment, shown_name
from suture.core.printable import printable

if TYPE_CHECKING:
    from suture.flare.admin.kit import Kit
    from suture.flare.admin.remote import Submission
    from suture.simulation.job import Job

Out = Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/EXPERIMENT.")]


def status(
    job_id: Annotated[str | None, typer.Argument(help="FLARE's id of a job; by default all jobs.")] = None,
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
) -> None:
    """Show the jobs and sites of a running federation, or the progress of one job."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.session import connected

    kit = admin_kit(startup_kit, study=study)
    with connected(kit) as federation:
        if job_id is None:
            sites = ", ".join(map(shown_name, federation.sites()))
            print_line(f"{kit.project} at {kit.server}, sites: {sites or 'none'}")
            for job in federation.jobs():
                print_line(_line(job))
            return
        meta = federation.meta(job_id)
        ended = str(meta.get("status"))
        recent = federation.recent(job_id) if ended == "RUNNING" else {}
        why = ""
        if ended.startswith("FINISHED") and not ended.endswith("COMPLETED"):
            from suture.flare.admin.remote import why_ended  # imports torch

            why = why_ended(federation, job_id)
    _show(meta, recent, why)


def _line(job: dict[str, Any]) -> str:
    submitted, took = (
        printable(job.get(key, ""), 40).partition(".")[0] for key in ("submit_time", "duration")
    )
    status = printable(job.get("status", ""), 40)
    return (
        f"{printable(job.get('job_id'), 80)}  {status:<20} {submitted:<19}  {took:>8}  "
        f"{shown_name(job.get('job_name'))}"
    )


def _show(meta: dict[str, Any], recent: dict[str, Any], why: str) -> None:
    from suture.flare.admin.remote import state
    from suture.reports.progress import Progress

    print_line(f"{shown_name(meta.get('name'))}: {printable(meta.get('status'), 40)}")
    progress = Progress("", "")
    lines = [progress.take(event) for event in recent.get("events", [])]
    for line in filter(None, [why or state(meta), *lines[-10:]]):
        print_line(line)


def results(
    job_id: Annotated[str, typer.Argument(help="FLARE's id of the job; `suture status` lists them.")],
    out: Out = None,
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
) -> None:
    """Download the results of a finished job into a run folder, and show its table."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.remote import fetch

    show_run(fetch(admin_kit(startup_kit, study=study), job_id, out))


def run_remotely(
    job: Job,
    env: str,
    folder: Path,
    experiment: str,
    startup_kit: Path | None,
    study: str,
    how: Submission,
    detach: bool,
) -> None:
    """Run a job in a POC or in production, and show its table; Ctrl-C does not stop the job."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.poc import check_study
    from suture.flare.admin.remote import submit
    from suture.simulation.job import check_federated, check_finetuning

    check_federated(job.method)
    check_finetuning(job)
    kit = admin_kit(startup_kit, env, study)
    # A kit lies in FOLDER/PROJECT/prod_NN/NAME.
    poc = kit.folder.resolve().parents[2] if env == "poc" else None
    if poc:
        check_study(job, poc, how.sites)
    job_id = submit(job, env, kit, folder, experiment, how)
    if _follow(job.title, env, kit, folder, job_id, detach):
        if poc and getattr(job.simulation, "synthetic", False):
            _mark_synthetic(folder)
        if job.finetuning:
            _tune(job, poc, folder)
        show_run(folder)


def _mark_synthetic(folder: Path) -> None:
    """Say in the run's record, report and card that its images are drawn, which a server cannot know."""
    from suture.simulation.run import write_pages

    write_json(folder / "run.json", read_json(folder / "run.json") | {"synthetic": True})
    write_pages(folder)


def _tune(job: Job, poc: Path | None, folder: Path) -> None:
    """Fine-tune on the tasks of the job's simulation, which a POC has; in production their owner does it."""
    from suture.flare.admin.poc import data_of
    from suture.simulation.run import finetune_on

    if poc is None or not finetune_on(job, folder, data_of(job, poc)):
        model = shlex.quote(str(folder / "model"))
        print_line(f"not fine-tuned here; on the data of a task, run: suture finetune {model} suture.toml")


def resume(
    experiment: Annotated[
        str, typer.Argument(help="Name of the experiment: the name of its folder in runs/.")
    ],
    env: Annotated[str, typer.Option(help="poc or prod.")] = "poc",
    out: Out = None,
    startup_kit: StartupKit = None,
    study: FlareStudy = "default",
    detach: Detach = False,
) -> None:
    """Continue an experiment after its last committed round, once a lost server, job or site is back."""
    from suture.flare.admin.kit import admin_kit
    from suture.flare.admin.recovery import resume as resume_job

    check_experiment(experiment)
    kit = admin_kit(startup_kit, env, study)
    folder = (out or Path("runs") / experiment).resolve()
    job_id, name = resume_job(kit, experiment, folder, env)
    if _follow(name, env, kit, folder, job_id, detach):
        show_run(folder)


def _follow(title: str, env: str, kit: Kit, folder: Path, job_id: str, detach: bool) -> bool:
    """Show the progress of a job and download its results; return False where the user does not wait."""
    from suture.flare.admin.remote import follow

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
    from suture.flare.admin.kit import options_of

    own = options_of(kit)
    commands = {
        "its progress": ["suture", "status", job_id, *own],
        "its results, after its end": ["suture", "results", job_id, "--out", str(folder), *own],
        "end it": ["nvflare", "job", "abort", job_id, *own],
    }
    return "\n".join(f"{what}: {shlex.join(words)}" for what, words in commands.items())


def show_run(folder: Path) -> None:
    """Show the table of a run, and the path of its report."""
    from suture.reports.frames import open_results

    results = open_results(folder)
    for table in results.tables():
        console.print(table)
    for word, sentences in (("warning", results.info.left_out), ("caution", results.info.cautions)):
        for sentence in sentences:
            print_line(f"{word}: {sentence}", style="yellow")
    if said := results.info.without_limits:
        here, changes, _ = said.partition("With the sites' limits")  # a line for each site and split
        in_short = "In a federation (or with --limits) the sites' limits change some; the report lists them."
        print_line(f"{here}{in_short if changes else ''}")
    print_line(f"report: {folder / 'report.html'}")


def report(
    directory: RunFolder,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="Also write report_with_examples.html, with test images of each class if they are on this "
            "machine.",
        ),
    ] = False,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(help="'CLASS=0.02': show PPV and NPV of the class at this prevalence. Repeatable."),
    ] = None,
) -> None:
    """Render the report of a run again, and show its table."""
    from suture.reports.report import write_report, write_report_with_examples

    write_report(directory, stated(prevalence or ()))
    show_run(directory)
    if examples:
        from suture.simulation.example_images import example_images

        path = write_report_with_examples(directory, example_images(directory))
        print_line(f"with images of patients (do not pass it on): {path}", style="yellow")
