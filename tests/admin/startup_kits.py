"""Made-up startup kits: real certificates, and the files that FLARE's provisioning writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

LAUNCHER = {"id": "process_launcher", "path": "nvflare.ClientProcessJobLauncher", "args": {}}
CLASSES = ["nvflare.app_common.workflows.fedavg.FedAvg"]
PERMISSIONS: dict[str, Any] = {
    "project_admin": "any",
    "lead": {"submit_job": "any", "view": "any", "byoc": "any"},
    "member": {"view": "any"},
}


@dataclass
class Authority:
    """Signs the certificates of a project."""

    name: str = "trial"

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.cert = self.sign(self.name, self.key, -1, 400)

    def sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, begins: int, ends: int, role: str = ""
    ) -> x509.Certificate:
        """A certificate that is valid from and to so many days from now."""
        now = datetime.now(UTC)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if name != self.name:
            subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, "trial_org"))
        subject += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]),
            x509.Name(subject),
            key.public_key(),
            x509.random_serial_number(),
            now + timedelta(days=begins),
            now + timedelta(days=ends),
        )
        root = x509.BasicConstraints(ca=name == self.name, path_length=None)
        return builder.add_extension(root, critical=True).sign(self.key, hashes.SHA256())


MakeKit = Callable[..., Path]
_FILES = {"server": "fed_server.json", "site": "fed_client.json", "admin": "fed_admin.json"}


def write_kit(
    folder: Path,
    authority: Authority,
    role: str,
    name: str,
    *,
    begins: int = -1,
    ends: int = 300,
    port: int = 1,
    right: str = "project_admin",
) -> Path:
    """A startup kit in `folder`; nothing listens at its server's port. RIGHT is a user's role in FLARE."""
    startup, local = folder / "startup", folder / "local"
    startup.mkdir(parents=True)
    local.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    cert = authority.sign(name, key, begins, ends, right if role == "admin" else "")
    own = "server" if role == "server" else "client"
    (startup / f"{own}.crt").write_bytes(cert.public_bytes(Encoding.PEM))
    (startup / "rootCA.pem").write_bytes(authority.cert.public_bytes(Encoding.PEM))
    secret = startup / f"{own}.key"
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    secret.chmod(0o600)
    service = {"target": f"localhost:{port}", "scheme": "http"}
    listens = {"name": "trial", "service": service, "identity": "server"}
    content: dict[str, Any] = {"servers": [listens]}
    if role == "admin":
        content = {
            "admin": {
                "project_name": "trial",
                "host": "localhost",
                "port": port,
                "server_identity": "server",
                "scheme": "http",
            }
        }
    (startup / _FILES[role]).write_text(json.dumps(content))
    resources = {
        "format_version": 2,
        "class_allow_list": CLASSES,
        "allow_log_streaming": True,
        "components": [LAUNCHER, {"id": "job_scheduler", "path": "nvflare.DefaultJobScheduler", "args": {}}],
    }
    (local / "resources.json.default").write_text(json.dumps(resources))
    (local / "authorization.json.default").write_text(json.dumps({"permissions": PERMISSIONS}))
    return folder
