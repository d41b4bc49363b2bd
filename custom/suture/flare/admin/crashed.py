"""What a job leaves whose process at the server has died: nothing in FLARE's store, all in suture's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suture.federation.server.server import find_server_config
from suture.flare.admin.kit import Kit, read_kit
from suture.flare.event_feed import EXPERIMENT

Meta = Mapping[str, Any]


def experiment_of(job: Meta, jobs: Sequence[Meta]) -> str | None:
    """The experiment of a job; a copy does not say whose it is, but what it is a copy of.

    Args:
        jobs: all that FLARE knows of all jobs.
    """
    by_id = {str(other["job_id"]): other for other in jobs}
    while EXPERIMENT not in job and job.get("cloned_from") in by_id:
        job = by_id[job["cloned_from"]]
    return str(job[EXPERIMENT]) if EXPERIMENT in job else None


def kept_by_server(kit: Kit, experiment: str) -> Path | None:
    """The experiment's folder at the server, where this machine is the server's too: in a POC.

    Args:
        kit: of the administrator; the server's lies beside it.
    """
    for startup in sorted(kit.folder.parent.glob("*/startup/fed_server.json")):
        root = read_kit(startup.parents[1]).folder
        folder = find_server_config(root).storage.state / experiment
        if (folder / "run.json").is_file():
            return folder
    return None


def how_to_go_on(experiment: str, kit: Kit) -> str:
    """Where the committed rounds of a job that crashed are, and how it continues."""
    return (
        f"if it was cut off, what it committed is at the server, in {experiment}/ of the folder that "
        "[storage] state of its suture.toml names, or of suture/ in its workspace; it continues from there: "
        f"suture resume {experiment} --startup-kit {kit.folder}"
    )
