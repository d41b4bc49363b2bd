"""What tests of a POC share: a port nobody else takes, a wait that quotes the logs, and how a job ended."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

from suture.core.errors import FederationError
from suture.flare.admin.kit import Kit, project_admin
from suture.flare.admin.poc import free_port
from suture.flare.admin.processes import Party, check_alive
from suture.flare.admin.remote import download
from suture.flare.admin.session import connected, wait_for_sites

_FIRST, _EACH = 12_000, 1_000
_NEXT = itertools.count(step=10)


def own_port() -> int:
    """A free port that no other worker takes, below those that the system gives to outgoing connections."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return free_port(_FIRST + _EACH * worker + next(_NEXT) % _EACH)


def wait_until_joined(root: Path, kits: dict[str, Kit], begun: Iterable[Party], seconds: float = 180) -> None:
    """Waits until the sites of a POC are connected; fails with the last lines of every party's log."""
    sites = {name for name, kit in kits.items() if kit.role == "site"}
    missing = wait_for_sites(project_admin(root), sites, seconds, lambda: check_alive(begun, kits))
    logs = {party.name: (kits[party.name].folder / "log.txt") for party in begun}
    lines = [
        f"{name}: {line}"
        for name, log in logs.items()
        for line in (log.read_text(errors="replace").splitlines()[-8:] if log.exists() else ["no log"])
    ]
    assert not missing, "\n".join([f"{sorted(missing)} did not connect", *lines])


def ended(kit: Kit, job_id: str, out: Path) -> str:
    """Wait for the end of a job; what its submitter is told of its failure, if it has failed."""
    with connected(kit) as federation:
        while not str(federation.meta(job_id)["status"]).startswith("FINISHED"):
            time.sleep(0.5)
        try:
            download(federation, kit, job_id, out)
        except FederationError as error:
            return str(error)
    return ""
