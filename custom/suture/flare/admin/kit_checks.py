"""Checks of one party's startup kit: certificates, connection to the server, and policy."""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from suture.core.errors import ConfigError
from suture.flare.admin.kit import CERTIFICATES, Kit, certificate, read_json
from suture.flare.admin.policy import (
    bypasses,
    code_rights,
    missing_classes,
    moved_components,
    permits,
    policy_file,
    survives,
)
from suture.methods import outside
from suture.methods.source import class_path, list_entry

_SOON = timedelta(days=30)
_WAIT = 5.0
_ANEW = "have this kit provisioned again (docs/deployment.md, Certificates)"
_RESTORE = "restore it from the startup kit's archive"

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; a line of `suture doctor`.

    Attributes:
        about: the subject of the check, in a word or two.
        text: what the check found.
        remedy: what to do about it; empty where nothing has to be done.
    """

    about: str
    status: Status
    text: str
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(about, "ok", text)


def warning(about: str, text: str, remedy: str) -> Finding:
    """Return a finding that the administrator should know of."""
    return Finding(about, "warning", text, remedy)


def error(about: str, text: str, remedy: str) -> Finding:
    """Return a finding that must be corrected before the party can take part."""
    return Finding(about, "error", text, remedy)


def check_certificates(kit: Kit) -> Iterator[Finding]:
    """Check the party's own certificate and the project's root certificate: dates, signature, key."""
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
    """Check that the private key belongs to the certificate, and that no other user can read it."""
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
    """Connect to the server's port with mutual TLS; on the server's own machine the port may also be free."""
    host = "localhost" if kit.role == "server" else kit.host
    where = f"{host}:{kit.port}"
    try:
        plain = socket.create_connection((host, kit.port), timeout=_WAIT)
    except socket.gaierror as problem:
        yield error(
            "connection", f"the name {host} has no address ({problem})", "add it to the DNS or to /etc/hosts"
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


def check_policy(kit: Kit) -> list[Finding]:
    """Check resources.json, authorization.json and privacy.json of one party."""
    return [*_code(kit), *_methods(kit), *_killed_processes(kit), *_logs(kit), *_filter(kit)]


def _code(kit: Kit) -> Iterator[Finding]:
    """Check whose code may run: the installed package's, code that travels with jobs, both or none."""
    try:
        missing = missing_classes(kit)
    except ConfigError as problem:
        yield error("resources.json", str(problem), _RESTORE)
        return
    try:
        granted = [role for role, right in code_rights(kit).items() if right != "none"]
    except ConfigError as problem:
        yield error("authorization.json", str(problem), _RESTORE)
        return
    path, rights = policy_file(kit, "resources"), policy_file(kit, "authorization")
    remedy = (
        f"suture policy {kit.folder}: adds {', '.join(missing)} to class_allow_list in local/resources.json"
    )
    refused = f"{path} does not allow suture's classes"
    if not missing:
        yield ok("installed code", f"{path} allows suture's classes")
    elif granted:
        yield warning("installed code", f"{refused}: jobs must bring the package", remedy)
    else:
        yield error("installed code", f"{refused}, and jobs may bring no code", remedy)
    if not granted:
        yield ok("code of jobs", f"{rights} refuses it (byoc)")
    elif kit.role == "site":
        yield warning(
            "code of jobs",
            f"{rights} lets jobs of {', '.join(granted)} bring code (byoc); it can bypass the filter",
            f"suture policy {kit.folder} --refuse-code: sets byoc to none for every role",
        )
    else:
        yield ok("code of jobs", f"{rights} lets jobs of {', '.join(granted)} bring code (byoc)")


def _methods(kit: Kit) -> Iterator[Finding]:
    """Check which methods of other packages are installed, and whether the party allows them."""
    try:
        found = {point: permits(kit, class_path(point)) for point in outside().values()}
    except ConfigError as problem:
        if "resources.json" not in str(problem):  # `_code` reports it
            yield error("methods", str(problem), "uninstall one of the packages")
        return
    for point, permitted in found.items():
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        text = f"{point.name} ({class_path(point)}{package}) is installed"
        if permitted:
            yield ok("methods", f"{text} and allowed")
        else:
            yield warning(
                "methods",
                f"{text} and not allowed: jobs with it are refused, unless they bring their code",
                f"suture policy {kit.folder} --allow {list_entry(point)}",
            )


def _killed_processes(kit: Kit) -> Iterator[Finding]:
    """Check whether the death of a process ends more than it must, and whether its component still exists."""
    try:
        prepared, moved = survives(kit), moved_components(kit)
    except ConfigError:
        return  # `_code` reports it
    lost = "a killed job process ends the whole job, or a lost request is noticed after five minutes"
    what = lost if kit.role == "site" else "jobs of before a crash stay"
    remedy = f"suture policy {kit.folder} --survive"
    for old, new in moved.items():
        path = policy_file(kit, "resources")
        yield error(
            "components",
            f"{path} names {old}, which this version of suture does not have: it is now {new}",
            f"{remedy}: replaces it; then start {kit.name} again",
        )
    if prepared:
        yield ok("killed processes", "are started again" if kit.role == "site" else "leave no job as RUNNING")
    elif not moved:
        yield warning("killed processes", what, f"{remedy}, where suture is installed")


def _logs(kit: Kit) -> Iterator[Finding]:
    """Check whether the error log stays at a site, since it may name files and patients."""
    if kit.role != "site":
        return
    path = policy_file(kit, "resources")
    if path.exists() and read_json(path).get("allow_log_streaming", False):
        yield warning(
            "logs",
            f"{path} sends the site's error log to the server; it may name files",
            f"suture policy {kit.folder} --keep-logs: sets allow_log_streaming to false",
        )
    else:
        yield ok("logs", "stay at the site")


def _filter(kit: Kit) -> Iterator[Finding]:
    """Check whether only what the method of a job declares can leave a site, whatever the job contains."""
    if kit.role != "site":
        return
    try:
        ways = list(bypasses(kit))
    except ConfigError as problem:
        if "privacy.json" in str(problem):  # `_code` reports the other files
            yield error("filter", str(problem), "correct it, or move it away")
        return
    if ways:
        yield warning(
            "filter",
            f"a job could send what its method does not declare: {'; '.join(ways)}",
            f"suture policy {kit.folder} --strict, where all jobs are suture's",
        )
    else:
        yield ok("filter", "nothing leaves that a method does not declare, and no job can change that")
