"""Running a job on this machine: as a plain loop, or in FLARE's simulator."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from suture.core.errors import ConfigError, FederationError, SutureError
from suture.core.files import write_json
from suture.core.names import check_experiment
from suture.data.config import SiteConfig, load_server_config, load_site_config
from suture.data.readers import load_table
from suture.data.text import build_vocabulary
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan
from suture.federation.server.global_model import check_unchanged, fixed_settings
from suture.federation.server.record import Record, describe
from suture.federation.server.registry import Member
from suture.federation.server.server import open_server
from suture.federation.site.diagnostics import collect
from suture.federation.site.site import Site
from suture.federation.store import Rounds
from suture.learning.samples import SiteSamples, load_samples, pooled
from suture.learning.tuned import FILE, tune_targets
from suture.models import CORPUS
from suture.reports.progress import following
from suture.reports.report import try_report, write_report
from suture.simulation.job import Job
from suture.simulation.partition import SERVER

log = logging.getLogger(__name__)

_ENDED = ("finished",)

POOLED = "pooled"
"""The one party of a reference that holds the data of all sites."""


def run_here(job: Job, env: str, out: Path, *, resume: bool, overwrite: bool, threads: int | None) -> Path:
    """Runs a job with simulated sites, in this process (`local`) or in FLARE's simulator (`sim`).

    Args:
        out: DIR of the run; its last part is the experiment's name.
        resume: continue an unfinished run in DIR.
        overwrite: delete what DIR holds.
        threads: processes of the simulator; fewer than sites share them.

    Returns:
        the path of the report.

    Raises:
        SutureError: the run failed; run.json says so, and the first site's own error is in the message.
    """
    if job.method.here_only and env != "local":
        raise ConfigError(
            f"{job.method.title} {job.method.here_only}, so it cannot run in a federation; use --env local"
        )
    check_finetuning(job)
    if job.simulation is None:
        raise ConfigError(f"{job.name} simulates no sites; submit it with --env poc or --env prod")
    simulation = job.simulation
    check_experiment(out.name)
    make_way(out, job, resume=resume, overwrite=overwrite)
    with locked(out):
        with _undone(out):
            sites = simulation.prepare(out / "sites", out.parent, job.seed, job.method)
            job = _with_words(job, out / "sites")
            plan, schedule = job.plan(out.name), job.schedule()
        record = Record(out)
        record.update(env=env)
        describe(record, plan, schedule)
        content = {"name": job.name, "plan": plan.to_dict(), "schedule": schedule.to_dict(), "sites": sites}
        write_json(out / "job.json", {**content, "simulation": asdict(simulation)})
        (out / FILE).unlink(missing_ok=True)  # that of a model which is now trained further
        try:
            with following(out, job.title, env):
                if env == "local":
                    _loop(job, out, sites)
                else:
                    _simulate(out, threads)
            if job.finetuning:
                tune_targets(out, job.finetuning, job.seed)
            collect(out)
            write_report(out)
        except KeyboardInterrupt:
            Record(out).close("interrupted", "stopped by the user")
            try_report(out)
            raise
        except (SutureError, OSError) as error:
            whole = _first_error(out, str(error))
            Record(out).give_up("failed", whole)
            try_report(out)
            raise FederationError(whole) from error
    return out / "report.html"


def check_finetuning(job: Job) -> None:
    """Refuses what could not be fine-tuned, before anything is trained.

    Raises:
        ConfigError: the method leaves no global model, or the simulation has no task for it.
    """
    if job.finetuning is None:
        return
    if job.method.personal != "nothing":
        raise ConfigError(f"{job.method.title} leaves no global model to fine-tune; choose another method")
    if not getattr(job.simulation, "targets", ()):
        raise ConfigError(f"{job.name} has no task to fine-tune on; name some in simulation.targets")


def _with_words(job: Job, folder: Path) -> Job:
    """The job with the words of all documents of its simulation, where it asks for them."""
    if job.model.vocabulary != CORPUS:
        return job
    configs = [load_server_config(path).held_out for path in sorted(folder.rglob("suture.toml"))]
    tables = [load_table(config.data) for config in configs if config]
    words = build_vocabulary(text for table in tables for text in table.texts or ()).words
    return replace(job, model=replace(job.model, vocabulary=words))


def _loop(job: Job, out: Path, sites: list[str]) -> None:
    """The plain loop in one process."""
    plan = job.plan(out.name)
    members, known = _members(job, plan, out, sites)
    config = load_server_config(out / "sites" / SERVER / "suture.toml").held_out
    federate(open_server(plan, job.schedule(), config, out.parent, known), Loop(members))


def _members(
    job: Job, plan: Plan, out: Path, sites: list[str]
) -> tuple[dict[str, Site], dict[str, Member] | None]:
    """The sites of a simulation; or the one party that holds all their data, and whose data these are."""
    configs = {name: load_site_config(out / "sites" / name / "suture.toml") for name in sites}

    def site(name: str, config: SiteConfig, load: Callable[[], SiteSamples] | None = None) -> Site:
        return Site(name, config, plan, job.rounds, out / "sites" / name / "state" / plan.experiment, load)

    if not job.method.pooled:
        return {name: site(name, config) for name, config in configs.items()}, None
    parts, known = {}, {}
    for name, config in configs.items():
        every = config.data.model_copy(update={"labels": None}) if job.method.every_label else config.data
        labels, samples = load_samples(config.model_copy(update={"data": every}), job.model, name)
        own = config.data.labels or labels.names
        known[name] = Member(own, own, {s: len(part) for s, part in samples.items()}, threads=1)
        parts[name] = labels, samples
    together = pooled(parts, absent=job.method.missing_is_negative)
    return {POOLED: site(POOLED, _of_no_site(configs[sites[0]]), lambda: together)}, known


def _of_no_site(config: SiteConfig) -> SiteConfig:
    """A site's configuration without the learning rate that is its own: pooled data take the job's."""
    training = config.training.model_copy(update={"learning_rate": None})
    return config.model_copy(update={"training": training})


def _simulate(out: Path, threads: int | None) -> None:
    """FLARE's simulator, in a process of its own; what it prints goes to DIR/flare.log."""
    command = [sys.executable, "-m", "suture.flare.simulate", str(out), *([str(threads)] if threads else [])]
    environment = {**os.environ, "SUTURE_SITES": str((out / "sites").resolve())}
    with (out / "flare.log").open("ab") as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:
            # The simulator ends its own children when it is interrupted.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    status = Record(out).run
    if status.get("status") != "finished":
        raise FederationError(
            status.get("error") or f"the simulator ended with code {code}; see {out / 'flare.log'}"
        )


def _first_error(out: Path, message: str) -> str:
    """The message, with the first site's own error where one was noted."""
    notes: list[dict[str, Any]] = []
    for path in sorted((out / "sites").glob("*/state/*/errors.jsonl")):
        notes += [json.loads(line) for line in path.read_text().splitlines()]
    if not notes:
        return message
    first = min(notes, key=lambda note: str(note["time"]))
    return f"{first['message']}\n({message})"


def make_way(out: Path, job: Job, *, resume: bool, overwrite: bool) -> None:
    """Makes DIR ready, and never touches a run that is there without being told to."""
    path = out / "run.json"
    if not out.exists() or not any(out.iterdir()):
        if resume:
            raise ConfigError(f"{out} holds no run to resume")
        out.mkdir(parents=True, exist_ok=True)
        return
    if not path.exists():
        raise ConfigError(f"{out} is not empty and holds no run of suture; choose another --out")
    run = json.loads(path.read_text())
    what = f"{out} holds a run of {run.get('job')} ({run.get('status')})"
    if overwrite:
        with locked(out):
            shutil.rmtree(out)
        out.mkdir(parents=True)
    elif not resume:
        raise ConfigError(
            f"{what}; choose another --out, continue it with --resume or replace it with --overwrite"
        )
    elif run.get("job") != job.name:
        raise ConfigError(f"{what}, not of {job.name}; choose another --out")
    elif run.get("status") in _ENDED and run.get("rounds", 0) >= job.rounds and not _untuned(out, job):
        raise ConfigError(f"{what} with all its {run['rounds']} rounds; ask for more with --rounds")
    else:
        _refuse_another(out, job)


def _refuse_another(out: Path, job: Job) -> None:
    """Before anything is written; the server looks once more, at its state."""
    path = out / "job.json"
    if not path.exists():  # it stopped before it said what it was about to do
        return
    before, now = json.loads(path.read_text())["plan"], fixed_settings(job.plan(out.name))
    if job.model.vocabulary == CORPUS:  # its words are read later, from what the simulation writes
        now["model"]["vocabulary"] = before["model"]["vocabulary"]
    check_unchanged(before, now, out.name)
    Rounds(out / "state").newest()  # refuses a state of another version


def _untuned(out: Path, job: Job) -> bool:
    """Whether a run was cut off between the end of its rounds and that of its fine-tuning."""
    return job.finetuning is not None and not (out / FILE).exists()


@contextmanager
def _undone(out: Path) -> Iterator[None]:
    """Leaves no folder behind where sites or plan could not even be made, so that DIR may be named again."""
    try:
        yield
    except BaseException:
        if not (out / "run.json").exists():
            shutil.rmtree(out)
        raise


@contextmanager
def locked(out: Path) -> Iterator[IO[str]]:
    """Holds DIR against a second run at the same time.

    Raises:
        ConfigError: another process runs in it.
    """
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another run is using {out}; wait for it, or choose another --out") from None
        yield file
