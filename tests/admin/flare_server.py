"""FLARE's server, as an administrator meets it: what it knows of jobs and sites, and what it was asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suture.core.errors import FederationError
from suture.flare.kit import Kit

KIT = Kit(Path("nowhere"), "admin", "lead@a.org", "trial", "localhost", 8002)


class FlareServer:
    """Its sites are there when it is asked for the second time.

    Args:
        ends, runs: whether a job ends when it is told to, and runs at all.
        workspace: what a job has left.
        contacts: seconds of each site's last one.
        recent: the newest events of a job.
    """

    def __init__(
        self,
        *jobs: Mapping[str, Any],
        ends: bool = True,
        runs: bool = True,
        workspace: Path = Path(),
        contacts: Mapping[str, float] | None = None,
        recent: Mapping[str, Any] | None = None,
    ) -> None:
        self.jobs = [dict(job) for job in jobs]
        self.did: list[str] = []
        self._ends, self._runs, self._workspace = ends, runs, workspace
        self._connected = [["a"], ["a", "b"]]
        self.contacts = lambda: contacts
        self.recent = lambda _: recent
        self.metas = lambda: self.jobs
        self.error_logs = lambda _: {}

    def meta(self, job_id: str) -> dict[str, Any]:
        return next(job for job in self.jobs if job["job_id"] == job_id)

    def sites(self) -> list[str]:
        self.did.append("sites")
        return self._connected.pop(0) if len(self._connected) > 1 else self._connected[0]

    def abort(self, job_id: str) -> None:
        self.did.append(f"abort {job_id}")
        if not self._runs:
            raise FederationError(f"refused: failed to abort job: Job {job_id} is not running.")
        if self._ends:
            self.meta(job_id)["status"] = "FINISHED:ABORTED"

    def clone(self, job_id: str) -> str:
        self.did.append(f"clone {job_id}")
        return "new"

    def download(self, job_id: str, folder: Path) -> Path:
        return Path(shutil.copytree(self._workspace, folder / job_id / "workspace"))


Serve = Callable[[Any], Any]
"""Puts a server in FLARE's place, and returns it."""
