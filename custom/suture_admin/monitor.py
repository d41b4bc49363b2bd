"""The state of a running federation and of its jobs as plain values, for people, programs and cron."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from suture.execution.progress import Progress
from suture_admin.session import Connection, sites_of

_FACTS = ("job_id", "name", "status", "submit_time_iso", "duration")

SILENT = 60.0
"""Seconds after its last contact from which a site is silent. FLARE lists it for ten minutes more."""


def federation_state(federation: Connection) -> dict[str, Any]:
    """Return the sites with their last contact, the jobs, oldest first, and what is wrong.

    Wrong are a silent site, by the clock of this machine, and one that a running job lacks.
    """
    now, contacts, jobs = time.time(), federation.contacts(), federation.metas()
    ages = {site: max(0, round(now - at)) for site, at in contacts.items()}
    faults = [
        f"{site} is silent: its last contact was {age} s ago" for site, age in ages.items() if age >= SILENT
    ]
    for job in (job for job in jobs if job.get("status") == "RUNNING"):
        lost = sorted(sites_of(job) - ages.keys())
        faults += [f"{site} is not connected, and job {job['job_id']} runs with it" for site in lost]
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
