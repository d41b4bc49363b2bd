"""A kit's certificates, and whether the server can be reached with them."""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from suture.core.errors import ConfigError
from suture.flare.admin.findings import Finding, error, ok, warning
from suture.flare.admin.kit import CERTIFICATES, Kit, certificate

_SOON = timedelta(days=30)
_WAIT = 5.0
_ANEW = "have this kit provisioned anew (docs/deployment.md, Certificates)"


def check_certificates(kit: Kit) -> Iterator[Finding]:
    """The party's own certificate and the project's root: dates, signature, key."""
    startup, own = kit.folder / "startup", CERTIFICATES[kit.role]
    found: dict[str, x509.Certificate] = {}
    for name in (own, "rootCA.pem"):
        try:
            found[name] = certificate(startup / name)
        except ConfigError as problem:
            yield error("certificate", str(problem), _ANEW)
        else:
            yield _dates(name, found[name])
    if len(found) == 2:
        try:
            found[own].verify_directly_issued_by(found["rootCA.pem"])
        except (ValueError, TypeError, InvalidSignature):
            yield error("certificate", f"{own} is not signed by this project's rootCA.pem", _ANEW)
    if own in found:
        yield from _key(kit, found[own])


def _dates(name: str, cert: x509.Certificate) -> Finding:
    now, begins, ends = datetime.now(UTC), cert.not_valid_before_utc, cert.not_valid_after_utc
    if now < begins:
        return error(
            "certificate", f"{name} is valid from {begins:%Y-%m-%d %H:%M} UTC only", "set the clock right"
        )
    if now > ends:
        return error("certificate", f"{name} expired on {ends:%Y-%m-%d}", _ANEW)
    text = f"{name} is valid until {ends:%Y-%m-%d}, {(ends - now).days} more days"
    return warning("certificate", text, _ANEW) if ends - now < _SOON else ok("certificate", text)


def _key(kit: Kit, cert: x509.Certificate) -> Iterator[Finding]:
    """Whether the private key is that of the certificate, and nobody else may read it."""
    path = kit.folder / "startup" / CERTIFICATES[kit.role].replace(".crt", ".key")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as problem:
        yield error("private key", f"{path}: {problem}", _ANEW)
        return
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != cert.public_key().public_bytes(*form):
        yield error("private key", f"{path.name} is not the key of the certificate", _ANEW)
    elif path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield warning("private key", f"{path} can be read by other users", f"chmod 600 {path}")
    else:
        yield ok("private key", path.name)


def check_connection(kit: Kit) -> Iterator[Finding]:
    """The server's port, with mutual TLS; at the server itself it may also be free."""
    host = "localhost" if kit.role == "server" else kit.host
    where = f"{host}:{kit.port}"
    try:
        plain = socket.create_connection((host, kit.port), timeout=_WAIT)
    except socket.gaierror as problem:
        yield error(
            "connection", f"the name {host} has no address ({problem})", "add it to the DNS or /etc/hosts"
        )
        return
    except OSError as problem:
        if kit.role == "server":
            yield ok("connection", f"port {kit.port} is free: the server is not running")
        else:
            remedy = "is the server running, and may this machine open TCP connections to that port?"
            yield error("connection", f"{where} does not answer ({problem})", remedy)
        return
    with plain:
        try:
            with _context(kit).wrap_socket(plain, server_hostname=host):
                yield ok("connection", f"{where} answers with a certificate of this project")
        except (OSError, ssl.SSLError) as problem:
            remedy = (
                "another program has the port, a proxy opens TLS on the way, or the kit is of another project"
            )
            yield error(
                "connection", f"{where} answers, but not as this project's server ({problem})", remedy
            )


def _context(kit: Kit) -> ssl.SSLContext:
    startup = kit.folder / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # FLARE's certificates name parties; it checks the name itself after the handshake.
    context.check_hostname = False
    context.load_verify_locations(startup / "rootCA.pem")
    crt = startup / CERTIFICATES[kit.role]
    context.load_cert_chain(crt, crt.with_suffix(".key"))
    return context
