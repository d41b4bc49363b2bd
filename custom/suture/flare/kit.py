"""Startup kits: the folder that FLARE's provisioning makes for one party, and the files in it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID

from suture.core.errors import ConfigError
from suture.core.files import read_regular
from suture.federation.ownership import DEFAULT_STUDY

Role = Literal["server", "site", "admin"]

_FILES: dict[Role, str] = {"server": "fed_server.json", "site": "fed_client.json", "admin": "fed_admin.json"}
_RELAY = "fed_relay.json"
"""The file that only a relay's kit has."""

CERTIFICATES: dict[Role, str] = {"server": "server.crt", "site": "client.crt", "admin": "client.crt"}


@dataclass(frozen=True)
class Kit:
    """A startup kit, which is also the FLARE workspace of its party.

    Attributes:
        folder: holds ``startup/`` and ``local/``.
        role: of the party.
        name: of the party, read from its certificate.
        project: name of the provisioned project.
        host, port: where the server listens; it has one port for sites and administrators.
        identity: name of the server, as in its certificate.
        scheme: of the connections to it: ``grpc``, ``tcp`` or ``http``.
        study: of FLARE, in which a user acts.
    """

    folder: Path
    role: Role
    name: str
    project: str
    host: str
    port: int
    identity: str = ""
    scheme: str = ""
    study: str = DEFAULT_STUDY

    @property
    def server(self) -> str:
        """The server's address, ``host:port``."""
        return f"{self.host}:{self.port}"


def read_kit(folder: Path) -> Kit:
    """Return the startup kit in a folder.

    Raises:
        ConfigError: the folder holds none, or one of its files is broken; names the file.
    """
    folder = folder.expanduser().resolve()
    startup = folder / "startup"
    roles: list[Role] = [role for role, name in _FILES.items() if (startup / name).is_file()]
    if not roles:
        raise ConfigError(
            f"{folder} is not a startup kit: {startup} holds none of {', '.join(_FILES.values())}; name the "
            "folder that provisioning made for one party"
        )
    role = roles[0]
    settings = read_kit_json(startup / _FILES[role])
    try:
        if role == "admin":
            admin = settings["admin"]
            project, host, port = admin["project_name"], admin["host"], admin["port"]
            identity, scheme = admin.get("server_identity", ""), admin.get("scheme", "")
        else:
            first = settings["servers"][0]
            project, identity = first["name"], first.get("identity", "")
            host, _, port = first["service"]["target"].rpartition(":")
            scheme = first["service"].get("scheme", "")
        name = common_name(certificate(startup / CERTIFICATES[role]))
        identity = name if role == "server" else str(identity)
        return Kit(folder, role, name, project, host, int(port), identity, str(scheme))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{startup / _FILES[role]} is broken ({error}); provision the kit again") from error


def read_kit_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a kit, which is an object.

    Raises:
        ConfigError: it is absent, not JSON or no object; names the file and line.
    """
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not valid: it holds no JSON object")
    return content


def certificate(path: Path) -> x509.Certificate:
    """Return a certificate of a kit.

    Raises:
        ConfigError: the file is absent or no certificate.
    """
    try:
        return x509.load_pem_x509_certificate(read_regular(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; provision the kit again") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate: {error}; provision the kit again") from error


def out_of_date(cert: x509.Certificate, renew: str) -> tuple[str, str] | None:
    """Return when a certificate expired, or from when it is valid, and the remedy; None if it is valid now.

    Args:
        renew: the remedy where it has expired.
    """
    now, begins, ends = datetime.now(UTC), cert.not_valid_before_utc, cert.not_valid_after_utc
    if now < begins:
        return f"is valid from {begins:%Y-%m-%d %H:%M} UTC only", "set the clock of this machine right"
    return (f"expired on {ends:%Y-%m-%d}", renew) if now > ends else None


def common_name(cert: x509.Certificate) -> str:
    """Return the name of the party in its certificate."""
    return str(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def poc_folder() -> Path:
    """Return the folder of this machine's POC: NVFLARE_POC_WORKSPACE, else FLARE's default."""
    return Path(os.environ.get("NVFLARE_POC_WORKSPACE", "/tmp/nvflare/poc"))


def kits_in(folder: Path) -> dict[str, Kit]:
    """Return the startup kits of a provisioned project by party: those of the newest ``PROJECT/prod_NN``.

    Relays are left out: they run no jobs.

    Raises:
        ConfigError: the folder holds no provisioned project, or more than one.
    """
    produced = sorted(folder.glob("*/prod_*"))
    if len({path.parent for path in produced}) != 1:
        what = "more than one provisioned project" if produced else "no provisioned project (PROJECT/prod_00)"
        raise ConfigError(
            f"{folder} holds {what}; make a federation on this machine with `suture poc up JOB`"
        )
    startups = (path / "startup" for path in sorted(produced[-1].iterdir()))
    kits = (read_kit(s.parent) for s in startups if s.is_dir() and not (s / _RELAY).is_file())
    return {kit.name: kit for kit in kits}


def project_admin(folder: Path) -> Kit:
    """Return the kit of a provisioned project's administrator.

    Raises:
        ConfigError: the project has none.
    """
    return _user(folder, "project_admin")


def lead(folder: Path) -> Kit:
    """Return the kit of a provisioned project's lead, or where it has none of its administrator.

    Raises:
        ConfigError: the project has neither.
    """
    return _user(folder, "lead", "project_admin")


def _user(folder: Path, *roles: str) -> Kit:
    """Return the kit of the first user with one of these roles; earlier roles come first."""
    users = [kit for kit in kits_in(folder).values() if kit.role == "admin"]
    for role in roles:
        for kit in users:
            subject = certificate(kit.folder / "startup" / "client.crt").subject
            # FLARE writes the role of a user into their certificate, under this name.
            if any(a.value == role for a in subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)):
                return kit
    raise ConfigError(f"{folder} has no kit of a {' or '.join(roles)}; name one with --startup-kit DIR")
