"""Continuing an experiment whose job has died, or that a site has dropped out of.

The server's job store has the job as it was handed in, with its plan, its schedule and an app for each site,
and the parties have their states under the experiment's name. So a copy of the job continues after the last
committed round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError, FederationError
from suture.federation.server.record import Record
from suture.flare.admin.crashed import experiment_of
from suture.flare.admin.kit import Kit

if TYPE_CHECKING:
    from suture.flare.admin.session import Connection

_POLL = 0.5
_WAIT_FOR_SITES = 60.0
_WAIT_FOR_END = 120.0
_WAITING = ("SUBMITTED", "APPROVED", "DISPATCHED")

Meta = Mapping[str, Any]


def resume(kit: Kit, experiment: str, out: Path, env: str) -> tuple[str, str]:
    """Ends what is left of an experiment's last job and hands it in again.

    Waits for the job's sites to be connected, up to a minute: those that are not then do not take part, where
    the job's `min_sites` permits it.

    Args:
        kit: of an administrator who may abort and clone jobs.
        out: DIR for the results; that of the run so far, or a new one.
        env: ``poc`` or ``prod``, for the report.

    Returns:
        FLARE's id of the new job, and its name.

    Raises:
        ConfigError: the server has no job of the experiment, or it has finished, or waits to be started; or
            DIR holds another run.
        FederationError: the running job does not end, or the server does not take the new one.
    """
    from suture.flare.admin.session import connected

    record = Record(out)
    if record.run.get("experiment", experiment) != experiment:
        raise ConfigError(f"{out} holds a run of {record.run['experiment']}; choose another --out")
    with connected(kit) as federation:
        last = newest(federation.metas(), experiment)
        status = str(last.get("status"))
        if status.endswith("COMPLETED"):
            raise ConfigError(
                f"{experiment} has finished; for more rounds: suture run JOB --rounds N --resume --out DIR"
            )
        if status in _WAITING:
            raise ConfigError(f"job {last['job_id']} of {experiment} waits to be started; see suture status")
        _wait_for_sites(federation, _sites(last))
        if not status.startswith("FINISHED"):
            _end(federation, str(last["job_id"]))
        job_id = federation.clone(str(last["job_id"]))
    record.update(experiment=experiment, env=env, flare_job=job_id, status="running")
    return job_id, str(last["name"])


def newest(jobs: Sequence[Meta], experiment: str) -> Meta:
    """The newest job of an experiment.

    Args:
        jobs: FLARE's facts of all jobs, oldest first.

    Raises:
        ConfigError: there is none.
    """
    of = {str(job["job_id"]): experiment_of(job, jobs) for job in jobs}
    found = [job for job in jobs if of[str(job["job_id"])] == experiment]
    if not found:
        known = sorted({name for name in of.values() if name})
        raise ConfigError(
            f"the server has no job of the experiment {experiment!r}; it has {', '.join(known) or 'none'}. "
            "If the job was deleted: suture run JOB --resume --out DIR"
        )
    return found[-1]


def _sites(job: Meta) -> set[str]:
    """The sites that a job names."""
    names = {str(name) for places in dict(job.get("deploy_map", {})).values() for name in places}
    return {name for name in names if name != "server" and not name.startswith("@")}


def _wait_for_sites(federation: Connection, sites: set[str]) -> None:
    end = time.monotonic() + _WAIT_FOR_SITES
    while sites - set(federation.sites()) and time.monotonic() < end:
        time.sleep(_POLL)


def _end(federation: Connection, job_id: str) -> None:
    """Aborts a job and waits until it has ended; the job of a server that was killed since is none."""
    try:
        federation.abort(job_id)
    except FederationError as error:
        if "is not running" not in str(error):
            raise
        return
    end = time.monotonic() + _WAIT_FOR_END
    while not str(federation.meta(job_id).get("status")).startswith("FINISHED"):
        if time.monotonic() > end:
            raise FederationError(f"job {job_id} was aborted and has not ended after {_WAIT_FOR_END:.0f} s")
        time.sleep(_POLL)
