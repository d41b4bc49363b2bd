"""Recovery of an experiment whose job has died: its job, its committed rounds, and a job that continues it.

The server's job store holds the job as it was submitted, with its plan, its schedule and an app for its
site; the parties store their states under the name of the experiment. A copy of the job therefore continues
after the last committed round. A job whose process at the server has died leaves no results in FLARE's store.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError, FederationError
from suture.core.escaping import printable
from suture.core.files import read_json
from suture.core.labels import check_experiment, shown_name
from suture.data.config import find_server_config
from suture.federation.ownership import NotOwner, may_use
from suture.federation.server.record import Record
from suture.federation.state_files import EXPERIMENTS, experiment_folder
from suture.flare import EXPERIMENT, SHARED_WITH, named_by
from suture.flare.kit import Kit, read_kit
from suture_admin.kits import options_of

if TYPE_CHECKING:
    from suture_admin.session import Connection

_POLL = 0.5
_WAIT_FOR_SITES = 60.0
_WAIT_FOR_END = 120.0
_WAITING = ("SUBMITTED", "APPROVED", "DISPATCHED")

Meta = Mapping[str, Any]


def experiment_of(job: Meta, jobs: Sequence[Meta]) -> str | None:
    """Return the experiment of a job of Suture; that of a clone is that of the job that it was cloned from.

    Args:
        jobs: FLARE's facts of all jobs.
    """
    submitted = _as_submitted(job, jobs)
    if SHARED_WITH not in submitted:
        return None
    return str(submitted.get(EXPERIMENT) or named_by(job, str(job["job_id"])))


def _as_submitted(job: Meta, jobs: Sequence[Meta]) -> Meta:
    by_id = {str(other["job_id"]): other for other in jobs}
    while SHARED_WITH not in job and job.get("cloned_from") in by_id:
        job = by_id.pop(job["cloned_from"])
    return job


def state_on_this_machine(kit: Kit, experiment: str) -> Path | None:
    """Return the server's folder of an experiment where the server runs on this machine, as in a POC.

    Another submitter's experiment is not returned: their job was refused, and its results are not this job's.

    Args:
        kit: of the administrator; the server's lies beside it.

    Raises:
        ConfigError: the experiment has a name that is none.
    """
    check_experiment(experiment)
    for startup in sorted(kit.folder.parent.glob("*/startup/fed_server.json")):
        root = read_kit(startup.parents[1]).folder
        folder = experiment_folder(find_server_config(root).storage.state, experiment)
        if (folder / "run.json").is_file() and may_use(folder, kit.name, kit.study):
            return folder
    return None


def how_to_continue(experiment: str, kit: Kit) -> str:
    """Return a sentence that says where the committed rounds of a crashed job are, and how to continue."""
    return (
        f"if it was cut off, its committed rounds are at the server, in {EXPERIMENTS}/{experiment}/ of the "
        "folder that [storage] state of its suture.toml names, or of suture/ in its workspace; it continues "
        "from there: "
        f"suture resume {experiment} {shlex.join(options_of(kit))}"
    )


def resume(kit: Kit, experiment: str, out: Path, env: str) -> tuple[str, str]:
    """End an experiment's last job where it still runs, and submit a clone of it.

    It waits up to a minute for the job's sites; those still missing do not take part, if `min_sites` permits.

    Args:
        kit: of a user who may abort and clone jobs.
        out: folder for the results; that of the run so far, or a new one.
        env: ``poc`` or ``prod``, for the report.

    Returns: FLARE's id of the new job, and its name.

    Raises:
        ConfigError: there is no job, or it has finished or waits to be started, or FLARE's clone would lack
            its scope; or OUT holds another run; or the experiment is another submitter's (`NotOwner`), whose
            job runs on.
        FederationError: the running job does not end, or the server does not accept the clone.
    """
    from suture_admin.session import connect, sites_of

    check_experiment(experiment)
    run = read_json(out / "run.json") if (out / "run.json").is_file() else {}
    if run.get("experiment", experiment) != experiment:
        raise ConfigError(f"{out} holds a run of {shown_name(run['experiment'])}; choose another --out")
    with connect(kit) as federation:
        last = newest(jobs := federation.metas(), experiment)
        _check_submitter(kit.name, jobs, experiment)
        status = str(last.get("status"))
        if status.endswith("COMPLETED"):
            raise ConfigError(
                f"{experiment} has finished; for more rounds: suture run JOB --rounds N --resume --out DIR"
            )
        if status in _WAITING:
            raise ConfigError(f"job {last['job_id']} of {experiment} waits to be started; see suture status")
        _check_clone(_as_submitted(last, jobs), experiment)
        _wait_for_sites(federation, sites_of(last))
        if not status.startswith("FINISHED"):
            _end(federation, str(last["job_id"]))
        # A copy of a copy would begin an experiment, where the job names none.
        job_id = federation.clone(str(last.get("cloned_from") or last["job_id"]))
    if run:
        Record(out).update(env=env, flare_job=job_id, status="running")
    return job_id, str(last["name"])


def newest(jobs: Sequence[Meta], experiment: str) -> Meta:
    """Return the newest job of an experiment.

    Args:
        jobs: FLARE's facts of all jobs, oldest first.

    Raises:
        ConfigError: the server has none.
    """
    if not (found := _jobs_of(experiment, jobs)):
        known = sorted({name for job in jobs if (name := experiment_of(job, jobs))})
        raise ConfigError(
            f"the server has no job of the experiment {experiment!r}; it has "
            f"{', '.join(map(shown_name, known)) or 'none'}. "
            "If the job was deleted: suture run JOB --resume --out DIR"
        )
    return found[-1]


def _jobs_of(experiment: str, jobs: Sequence[Meta]) -> list[Meta]:
    """The jobs of an experiment by its owner, and by those with whom the owner shares it.

    Anybody can write an experiment's name into a job. The server refuses that job, but would run the owner's
    clone of it.
    """
    owned: list[Meta] = []
    owner: object = None
    shared: Sequence[object] = ()
    for job in (one for one in jobs if experiment_of(one, jobs) == experiment):
        submitter = job.get("submitter_name")
        owner = submitter if owner is None else owner
        if submitter == owner:
            shared = job.get(SHARED_WITH, shared) or ()
        if submitter == owner or submitter in shared:
            owned.append(job)
    return owned


def _check_submitter(user: str, jobs: Sequence[Meta], experiment: str) -> None:
    """Refuse a user whose job the server would refuse, before the owner's running job is ended for it.

    Raises:
        NotOwner: names who submitted the experiment's first job, which FLARE shows to every user.
    """
    found = _jobs_of(experiment, jobs)
    submitters = [str(job["submitter_name"]) for job in found if "submitter_name" in job]
    shared = {str(name) for job in found for name in job.get(SHARED_WITH) or ()}
    if submitters and user not in shared.union(submitters):
        owner, add = printable(submitters[0], 80), f"shared_with={json.dumps([user])}"
        raise NotOwner(
            f"the experiment {experiment!r} belongs to {owner}, and this startup kit to {user}. "
            f"Name {owner}'s with --startup-kit DIR. Or ask {owner} to share the experiment, by submitting "
            f"its job again: suture run JOB --resume --out DIR --set {shlex.quote(add)}"
        )


def _check_clone(job: Meta, experiment: str) -> None:
    """Refuse a job of which FLARE's clone lacks a setting: it would run in each site's default scope.

    Raises:
        ConfigError: names the settings, and the command that continues the experiment with them.
    """
    if lost := [key for key in ("scope", "launcher_spec") if job.get(key)]:
        raise ConfigError(
            f"{experiment} has [flare] {' and '.join(lost)}, which FLARE's copy of its job would lack; "
            "submit the job again: suture run JOB --resume --out DIR"
        )


def _wait_for_sites(federation: Connection, sites: set[str]) -> None:
    end = time.monotonic() + _WAIT_FOR_SITES
    while sites - set(federation.sites()) and time.monotonic() < end:
        time.sleep(_POLL)


def _end(federation: Connection, job_id: str) -> None:
    """Abort a job and wait for its end; a stale job, which FLARE cannot abort, has already ended."""
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
