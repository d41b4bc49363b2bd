"""What tests of a POC share: a port nobody else takes, and a federation whose parties start when needed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from suture.core.errors import FederationError
from suture.execution.job import Job
from suture.flare.kit import Kit, kits_in, lead
from suture_admin.poc import free_port, parties, provision
from suture_admin.processes import Party, check_alive, start, stop
from suture_admin.remote import Submission, download, submit
from suture_admin.session import connect, wait_for_sites


def own_port() -> int:
    """A free port that no other test takes, below those that the system gives to outgoing connections."""
    return free_port(12_000 + 10 * secrets.randbelow(1_800))


class Federation:
    """Startup kits with TLS, and the processes of the parties that have joined.

    Attributes:
        root: folder of the POC.
        kits: of all parties and users; server, sites and lead are among them.
        begun: the processes of parties.
    """

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self.kits = kits_in(root)
        self.server, self.sites = parties(self.kits)
        self.lead = lead(root)
        self.begun: list[Party] = []
        self._environment = {**environment, "HOME": str(root)}  # a test's HOME ends with it

    def join(self, *sites: str) -> None:
        """Start the server and sites, unless they run, and wait until these are connected.

        Raises:
            AssertionError: a site does not connect; contains the last lines of every party's log.
        """
        with patch.dict(os.environ, self._environment):
            self.begun += start(self.root, (self.server, *(self.sites[name] for name in sites)))
        missing = wait_for_sites(self.lead, set(sites), 180, lambda: check_alive(self.begun, self.kits))
        assert not missing, "\n".join([f"{sorted(missing)} did not connect", *self._logged()])

    def _logged(self) -> Iterator[str]:
        for party in self.begun:
            log = self.kits[party.name].folder / "log.txt"
            lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else ["no log"]
            yield from (f"{party.name}: {line}" for line in lines)

    def run(self, job: Job, out: Path, sites: Sequence[str], *, bundle: bool = False) -> str:
        """Run a job of the lead to its end; what they are told of its failure, if it has failed."""
        how = Submission(sites, bundle)
        return ended(self.lead, submit(job, "poc", self.lead, out, out.name, how), out)


@contextmanager
def provisioned(
    root: Path, project: dict[str, Any], make: Callable[[Path, Path], None] = provision, **environment: str
) -> Iterator[Federation]:
    """A federation that is stopped at the end, whatever happens; no party is left.

    Args:
        make: writes the startup kits of a project file into a folder.
        environment: further variables of its parties.
    """
    with patch.dict(os.environ, {"HOME": str(root)}):  # where FLARE notes its POC
        (root / "project.yml").write_text(yaml.safe_dump(project))
        make(root / "project.yml", root)
    federation = Federation(root, environment)
    try:
        yield federation
    finally:
        stop(root)
    assert not [party.name for party in federation.begun if party.process()]


def with_keys_of_their_own(path: Path, root: Path) -> None:
    """Make the kits of a project as its sites do whose private keys never leave them.

    FLARE issues no certificate of a project_admin in this way, and wants the server named as its host is.
    """
    project = yaml.safe_load(path.read_text())
    (server,) = (own for own in project["participants"] if own["type"] == "server")
    server["name"] = "localhost"
    profile, ca, listens = root / "profile.yml", root / "ca", {"fed_learn_port": server["fed_learn_port"]}
    about = {"name": project["name"], "scheme": "grpc", "connection_security": "mtls"}
    profile.write_text(yaml.safe_dump({**about, "server": {"host": "localhost", **listens}}))
    _nvflare("cert", "init", "--profile", profile, "-o", ca)
    for own in project["participants"]:
        if own.get("role") == "project_admin":
            continue
        name = own["name"]
        definition, request = root / f"{name}.yml", root / name
        definition.write_text(yaml.safe_dump({"name": project["name"], "participants": [own]}))
        _nvflare("cert", "request", "-p", definition, "--out", request)
        zipped, signed = request / f"{name}.request.zip", root / f"{name}.signed.zip"
        _nvflare("cert", "approve", zipped, "-c", ca, "--profile", profile, "--out", signed)
        _nvflare("package", signed, "--request-dir", request, "-w", root)


def _nvflare(*words: str | Path) -> None:
    from nvflare.cli import main

    with patch("sys.argv", ["nvflare", *map(str, words)]), suppress(SystemExit):
        main()


def ended(kit: Kit, job_id: str, out: Path) -> str:
    """Wait for the end of a job; what its submitter is told of its failure, if it has failed."""
    with connect(kit) as federation:
        while not str(federation.meta(job_id)["status"]).startswith("FINISHED"):
            time.sleep(0.5)
        try:
            download(federation, kit, job_id, out)
        except FederationError as error:
            return str(error)
    return ""
