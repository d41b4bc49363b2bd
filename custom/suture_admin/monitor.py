"""The state of a running federation and of its jobs as plain values, for people, programs and cron."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suture.execution.progress import Progress
from suture_admin.session import Connection, sites_of

_FACTS = ("job_id", "name", "status", "submit_time_iso", "duration")

_FULL = 1.0
"""GiB of free space below which a disk is nearly full, as for `suture doctor`."""


def federation_state(federation: Connection, minutes: float = 1) -> dict[str, Any]:
    """Return the sites with their last contact, the jobs, oldest first, and what is wrong.

    Wrong are a silent site, by the clock of this machine; one that a running job or the newest one lacks; a
    site's failure in a round of a running job; and the failure of the newest job that has ended.

    Args:
        minutes: after its last contact from which a site is silent. FLARE lists it for ten more.
    """
    now, contacts, jobs = time.time(), federation.contacts(), federation.metas()
    ages = {site: max(0, round(now - at)) for site, at in contacts.items()}
    silent = {site: age for site, age in ages.items() if age >= 60 * minutes}
    faults = [f"{site} is silent: its last contact was {age} s ago" for site, age in silent.items()]
    running = [job for job in jobs if job.get("status") == "RUNNING"]
    for job in running or jobs[-1:]:
        lost, took = sorted(sites_of(job) - ages.keys()), "runs with" if running else "was the last with"
        faults += [f"{site} is not connected, and job {job['job_id']} {took} it" for site in lost]
    for job in running:
        faults += [
            f"job {job['job_id']}: {fault}" for fault in job_state(federation, job["job_id"])["faults"]
        ]
    ended = [job for job in jobs if str(job.get("status")).startswith("FINISHED")]
    if ended and not str(ended[-1]["status"]).endswith("COMPLETED"):
        faults.append(f"job {ended[-1]['job_id']} failed: {ended[-1]['status']}")
    return {
        "sites": {
            site: {
                "last_contact": datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
                "seconds": ages[site],
            }
            for site, at in contacts.items()
        },
        "jobs": [{key: job.get(key) for key in _FACTS} for job in jobs],
        "faults": faults,
    }


def full_disk(folder: Path) -> list[str]:
    """Say that the disk of a folder is nearly full, if it is."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    return [f"the disk of {there} is nearly full: {free:.1f} GiB are free"] if free < _FULL else []


def job_state(federation: Connection, job_id: str) -> dict[str, Any]:
    """Return the progress of a job, or why it ended, and what is wrong.

    Wrong are a failure, and a site whose newest answer was not accepted, or that is lost or gone.
    """
    from suture_admin.remote import state, why_ended  # imports torch

    meta = federation.meta(job_id)
    status = str(meta.get("status"))
    recent: Mapping[str, Any] = federation.recent(job_id) if status == "RUNNING" else {}
    failed = status.startswith("FINISHED") and not status.endswith("COMPLETED")
    why, progress = why_ended(federation, job_id) if failed else state(meta), Progress("", "")
    progress.take(recent.get("begin") or {})
    lines = [line for event in recent.get("events", []) if (line := progress.take(event))]
    faults = [f"{site}: {said}" for site, said in progress.newest.items() if said != "accepted"]
    return {
        "job_id": job_id,
        "name": meta.get("name"),
        "status": status,
        "round": progress.round,
        "rounds": progress.rounds,
        "why": why,
        "events": lines[-10:],
        "faults": [why] if failed else faults,
    }
