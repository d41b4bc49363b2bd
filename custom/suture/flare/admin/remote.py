"""A run in a POC or in production: hand the job in, show how it goes, bring its results here."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError, FederationError
from suture.core.files import whole_lines
from suture.federation.server.record import Record, describe
from suture.flare.admin.crashed import experiment_of, how_to_go_on, kept_by_server
from suture.flare.admin.kit import Kit
from suture.flare.admin.refusals import explain, refusals
from suture.flare.admin.tail import Tail
from suture.reports.progress import following
from suture.reports.report import write_report
from suture.simulation.job import Job
from suture.simulation.run import locked, make_way

if TYPE_CHECKING:
    from suture.flare.admin.session import Connection

_POLL, _START = 1.0, 4.0
_PATIENCE = 600.0
"""Seconds that the server may be out of reach while a run is followed."""


def submit(
    job: Job,
    env: str,
    kit: Kit,
    out: Path,
    experiment: str,
    *,
    sites: Sequence[str] = (),
    bundle: bool = True,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Hands a job in and prepares the run folder DIR for its results.

    Args:
        env: ``poc`` or ``prod``, for the report.
        kit: of an administrator who may submit.
        experiment: identifier under which the parties keep their state.
        sites: that take part; by default all that are connected. Each gets an app of its own.
        bundle: whether the package travels with the job.
        resume: continue the run in DIR, under its own identifier.
        overwrite: delete what DIR holds.

    Returns:
        FLARE's id of the job.

    Raises:
        FederationError: no site is connected, or the server does not take the job.
        ConfigError: DIR is in use.
    """
    from suture.flare.admin.session import connected
    from suture.flare.submit import export_job

    with connected(kit) as federation, tempfile.TemporaryDirectory() as folder:
        names = list(sites) or federation.sites()
        if not names:
            raise FederationError(f"no site is connected to {kit.server}; start them, then try again")
        make_way(out, job, resume=resume, overwrite=overwrite)
        record = Record(out)
        experiment = str(record.run["experiment"]) if resume else experiment
        job_id = federation.submit(export_job(job, Path(folder), experiment, names, bundle))
    record.update(env=env, flare_job=job_id)
    describe(record, job.plan(experiment), job.schedule())
    return job_id


def accompany(title: str, env: str, kit: Kit, out: Path, job_id: str) -> None:
    """Shows how a job goes until it has ended, and brings its results into DIR.

    Raises:
        FederationError: it failed; says which party refused it and why.
    """
    from suture.flare.admin.session import NoAnswer, connected

    tail = Tail(out)
    heard = time.monotonic()
    with locked(out), following(out, title, env):
        tail.say(f"job {job_id} at {kit.server}")
        while True:
            try:
                with connected(kit) as federation:
                    while not _ended(federation, job_id, tail):
                        heard = time.monotonic()
                        time.sleep(_POLL)
                    place(federation, kit, job_id, out, tail)
                    return
            except NoAnswer:
                if time.monotonic() - heard > _PATIENCE:
                    raise
                tail.say(f"{kit.server} does not answer; trying again")
                time.sleep(5 * _POLL)


def _ended(federation: Connection, job_id: str, tail: Tail) -> bool:
    """Takes note of what is new; returns whether the job has ended."""
    meta = federation.meta(job_id)
    tail.say(state(meta))
    if meta.get("status") == "RUNNING":
        recent = federation.recent(job_id)
        if recent:
            tail.take(recent["first"], recent["events"])
        else:
            # The job's process at the server is starting, and logs an error for each question until it has.
            time.sleep(_START)
    return str(meta.get("status")).startswith("FINISHED")


def state(meta: Mapping[str, Any]) -> str:
    """Where a job stands, and who refused it."""
    lines = refusals(meta, {})
    history = [str(line) for line in meta.get("schedule_history") or ()]
    if meta.get("status") in ("SUBMITTED", "APPROVED", "DISPATCHED"):
        waits = history[-1].partition(": ")[2] if history else ""
        lines.append("waiting to be started" + (f": {waits}" if waits not in ("", "scheduled") else ""))
    return "\n".join(lines)


def fetch(kit: Kit, job_id: str, out: Path | None) -> Path:
    """Brings the results of a job that has ended into DIR, by default runs/EXPERIMENT, and returns it.

    Raises:
        FederationError: the job has not ended, or failed; says why.
        ConfigError: DIR holds another run.
    """
    from suture.flare.admin.session import connected

    with connected(kit) as federation:
        status = str(federation.meta(job_id).get("status"))
        if not status.startswith("FINISHED"):
            raise FederationError(f"job {job_id} has not ended ({status}); see `suture status {job_id}`")
        return place(federation, kit, job_id, out)


def place(federation: Connection, kit: Kit, job_id: str, out: Path | None, tail: Tail | None = None) -> Path:
    """Brings what the server's run left to where a run in the simulator would have it, and returns DIR.

    A job whose process at the server has died left nothing to download; what it committed is then taken from
    the server's own folder, where that is on this machine.

    Raises:
        FederationError: the job failed; says which party refused it and why, or how it continues.
        ConfigError: DIR holds another run.
    """
    with tempfile.TemporaryDirectory() as folder:
        workspace = federation.download(job_id, Path(folder))
        experiment = None
        left: Path | None = workspace
        if not (workspace / "run.json").is_file():
            experiment = experiment_of(federation.meta(job_id), federation.metas())
            left = kept_by_server(kit, experiment) if experiment else None
        run: dict[str, Any] = json.loads((left / "run.json").read_text()) if left else {}
        target = out or (Path("runs") / str(run["experiment"]) if run else None)
        if target:
            target.mkdir(parents=True, exist_ok=True)
            if left:
                _copy(left, target, tail)
            if (workspace / "log.txt").exists():
                shutil.copy2(workspace / "log.txt", target / "flare.log")
        if target and run.get("status") == "finished":
            return target
        reason = _reason(federation, job_id, workspace, run)
        if experiment and not refusals(federation.meta(job_id), {}):
            reason += f"\n- {how_to_go_on(experiment, kit)}"
        if target and (target / "run.json").exists():
            Record(target).close("failed", reason)
            write_report(target)
        raise FederationError(reason)


def _reason(federation: Connection, job_id: str, workspace: Path, run: Mapping[str, Any]) -> str:
    """Why a job did not finish, from all that this administrator may read."""
    logs = federation.error_logs(job_id)
    own = workspace / "log.txt"
    if own.is_file():
        logs["server"] = own.read_text(errors="replace")
    return explain(job_id, federation.meta(job_id), logs, run)


def _copy(workspace: Path, out: Path, tail: Tail | None) -> None:
    """Copies the files of a run into DIR and renders the report again, with DIR's environment."""
    from suture.flare.controller import RESULTS

    run, here = json.loads((workspace / "run.json").read_text()), Record(out)
    if here.run and here.run.get("experiment") != run["experiment"]:
        raise ConfigError(f"{out} holds a run of {here.run.get('experiment')}; choose another --out")
    kept = {key: here.run[key] for key in ("env", "flare_job") if key in here.run}
    for name in RESULTS:
        source = workspace / name
        if name == "events.jsonl" and tail and source.exists():
            tail.finish([json.loads(line) for line in whole_lines(source)])
        elif source.is_dir():
            shutil.copytree(source, out / name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy2(source, out / name)
    Record(out).update(**kept)
    write_report(out)
