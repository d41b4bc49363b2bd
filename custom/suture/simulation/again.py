"""The command line that runs a job again with the settings that it has."""

from __future__ import annotations

import json
import shlex

from suture.core.errors import SutureError
from suture.simulation.job import Job, load_job, settings_of, with_settings
from suture.simulation.job_files import known_jobs
from suture.simulation.study import StudySites


def command(job: Job, env: str) -> str | None:
    """Return a command line, quoted for a POSIX shell, that runs an equal job.

    Returns:
        None where there is none: the job is no file in jobs/ and no study folder, or it differs from its file
        in what ``--set`` cannot express.
    """
    source = job.name if job.name in known_jobs() else None
    if isinstance(job.simulation, StudySites):
        source = job.simulation.folder
    if source is None:
        return None
    try:
        settings = _differing(load_job(source), job)
        if with_settings(load_job(source), settings) != job:
            return None
    except (SutureError, TypeError):  # a file that has changed since, or a value that JSON has not
        return None
    options = [option for setting in settings for option in ("--set", setting)]
    return shlex.join(["suture", "run", source, "--env", env, *options])


def _differing(base: Job, job: Job) -> list[str]:
    """Return the settings, as for ``--set``, in which a job differs from that of its file."""
    settings = []
    if type(base.method) is not type(job.method):
        settings = [f"method={job.method.about.name}"]
        base = with_settings(base, settings)
    usual = settings_of(base)
    differing = {k: v for k, v in settings_of(job).items() if k not in usual or usual[k] != v}
    return settings + [f"{key}={json.dumps(value)}" for key, value in differing.items()]
