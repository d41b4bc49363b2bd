"""Checks of one party's startup kit: certificates, connection to the server, and policy."""

from __future__ import annotations

import os
import shlex
import socket
import ssl
import stat
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPConnection
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from suture.core.errors import ConfigError, SutureError
from suture.core.files import read_regular
from suture.federation.ownership import DEFAULT_STUDY
from suture.flare.compat.deployed import images, launchers, mounted_at
from suture.flare.compat.registration import refusal
from suture.flare.kit import CERTIFICATES, Kit, certificate, common_name, out_of_date, read_kit_json
from suture.methods import outside
from suture.methods.source import class_path, list_entry
from suture_admin.kits import components_of, policy_file
from suture_admin.policy import (
    bypasses,
    code_rights,
    exposed,
    launcher_of,
    missing_classes,
    permits,
    storages,
    survives,
)

_SOON = timedelta(days=30)
_WAIT = 5.0
_VERDICT = 2.0
"""Seconds for which a server may refuse a certificate after the handshake."""
_ANEW = "have this kit provisioned again (docs/deployment.md, Administer a network)"
_RESTORE = "restore it from the startup kit's archive"

STORE = "NVFL_JOB_STORE_ROOT"
"""The variable by which FLARE has another folder for a server's jobs."""

_Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; a line of `suture doctor`.

    Attributes:
        about: the subject of the check, in a word or two.
        text: what the check found.
        remedy: what to do about it; empty where nothing has to be done.
    """

    about: str
    status: _Status
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


def independent(*checks: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of checks, none of which another one's failure ends.

    A failure that several checks meet, such as a broken file, is one finding.
    """
    told = set()
    for check in checks:
        try:
            yield from check()
        except Exception as problem:  # noqa: BLE001 - who examines must not stop at the first surprise
            kind = "" if isinstance(problem, SutureError) else f"{type(problem).__name__}: "
            if (text := f"{kind}{problem}") not in told:
                told.add(text)
                yield _find_broken(text)


def _find_broken(text: str) -> Finding:
    """Return the finding of a check that failed, about the file that its text names."""
    remedies = {
        "resources.json": _RESTORE,
        "authorization.json": _RESTORE,
        "privacy.json": "correct it, or move it away",
    }
    name = next((name for name in remedies if name in text), "doctor")
    otherwise = "correct what it names; if it names nothing, report it as a bug"
    return error(name, text, remedies.get(name, otherwise))


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
    if wrong := out_of_date(cert, _ANEW):
        return error("certificate", f"{name} {wrong[0]}", wrong[1])
    ends, left = cert.not_valid_after_utc, cert.not_valid_after_utc - datetime.now(UTC)
    text = f"{name} is valid until {ends:%Y-%m-%d}, {left.days} more days"
    return warning("certificate", text, _ANEW) if left < _SOON else ok("certificate", text)


def _key(kit: Kit, cert: x509.Certificate) -> Iterator[Finding]:
    """Check that the private key belongs to the certificate, and that no other user can read it."""
    path = kit.folder / "startup" / CERTIFICATES[kit.role].replace(".crt", ".key")
    try:
        key = load_pem_private_key(read_regular(path), None)
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
    proxy = _proxy(kit)
    where = f"{host}:{kit.port}"
    where += f" through the proxy {proxy.netloc.rpartition('@')[2]}" if proxy else ""
    try:
        plain = _open(host, kit.port, proxy)
    except socket.gaierror as problem:
        text = f"the name {proxy.hostname if proxy else host} has no address ({problem})"
        yield error("connection", text, "add it to the DNS or to /etc/hosts")
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
            with _context(kit).wrap_socket(plain, server_hostname=host) as tls:
                name = _peer(tls)
        except (OSError, ssl.SSLError) as problem:
            remedy = (
                "another program has the port, a proxy opens TLS on the way, or a certificate of this kit or "
                "of the server is expired or of another project"
            )
            yield error("connection", f"{where} does not connect with this kit ({problem})", remedy)
            return
    if name == kit.identity:
        yield ok("connection", f"{where} answers with the server's certificate and accepts this kit's")
        if kit.role == "site":
            yield _registration(kit)
    else:
        text = f"{where} answers with the certificate of {name!r}, not of {kit.identity!r}"
        remedy = "another party answers in place of the server: examine the name's address and that machine"
        yield error("connection", text, remedy)


def _proxy(kit: Kit) -> SplitResult | None:
    """Return the proxy that gRPC takes to the server from the environment; other schemes take none."""

    def first(*names: str) -> str:  # in small letters alone; an empty one counts
        return next((os.environ[name] for name in names if name in os.environ), "")

    proxy = urlsplit(first("grpc_proxy", "https_proxy", "http_proxy"))
    without = [name.strip().lstrip(".") for name in first("no_grpc_proxy", "no_proxy").split(",")]
    direct = any(name and f".{kit.host}".endswith(f".{name}") for name in without)
    used = kit.role != "server" and "grpc" in kit.scheme and proxy.scheme == "http" and not direct
    return proxy if used else None


def _open(host: str, port: int, proxy: SplitResult | None) -> socket.socket:
    """Open a TCP connection, through a proxy if there is one.

    Raises:
        OSError: nobody answers, or the proxy refuses.
    """
    if proxy is None:
        return socket.create_connection((host, port), timeout=_WAIT)
    login = b64encode(unquote(proxy.netloc.rpartition("@")[0]).encode()).decode()
    tunnel = HTTPConnection(str(proxy.hostname), proxy.port, timeout=_WAIT)
    tunnel.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {login}"} if login else {})
    tunnel.connect()
    return tunnel.sock


def _registration(kit: Kit) -> Finding:
    """Check whether the server would let the site take part; its administrator may have disabled it."""
    if reason := refusal(kit):
        remedy = (
            f"ask the project's administrator; they enable a site by: nvflare system enable-client {kit.name}"
        )
        return error("registration", f"the server refuses this site: {reason}", remedy)
    return ok("registration", "the server does not refuse this site")


def _peer(tls: ssl.SSLSocket) -> str:
    """Return the name in the certificate of who answers, once they have accepted ours.

    In TLS 1.3 a client's handshake ends before the server has examined the client's certificate. It refuses
    it with the first byte that it sends, and says nothing where it accepts it and waits for us.

    Raises:
        OSError: our certificate was refused, or the connection was closed.
    """
    certified = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    tls.settimeout(_VERDICT)
    try:
        if not tls.recv(1):
            raise ConnectionResetError("the connection was closed after the handshake")
    except TimeoutError:
        pass
    return common_name(certified)


def _context(kit: Kit) -> ssl.SSLContext:
    startup = kit.folder / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # FLARE's certificates name parties; it checks the name itself after the handshake.
    context.check_hostname = False
    if "grpc" in kit.scheme:
        context.set_alpn_protocols(["h2"])  # else gRPC closes the connection after the handshake
    context.load_verify_locations(startup / "rootCA.pem")
    crt = startup / CERTIFICATES[kit.role]
    context.load_cert_chain(crt, crt.with_suffix(".key"))
    return context


def check_policy(kit: Kit) -> Iterator[Finding]:
    """Check resources.json, authorization.json and privacy.json of one party, and what FLARE stores."""
    checks = (_classes, _code, _methods, _launchers, _images, _killed_processes, _logs, _ways_round, _storage)
    return independent(*(partial(check, kit) for check in checks))


def _classes(kit: Kit) -> Iterator[Finding]:
    """Check whether jobs may name the classes of the installed package."""
    missing, path = missing_classes(kit), policy_file(kit, "resources")
    refused = f"{path} does not allow suture's classes"
    remedy = f"{_policy(kit)}: adds {', '.join(missing)} to class_allow_list in {path.name}"
    if not missing:
        yield ok("installed code", f"{path} allows suture's classes")
    elif _bringing(kit):
        yield warning("installed code", f"{refused}: jobs must bring the package", remedy)
    else:
        yield error("installed code", f"{refused}, and jobs may bring no code", remedy)


def _code(kit: Kit) -> Iterator[Finding]:
    """Check whether jobs may bring code of their own."""
    granted, rights = _bringing(kit), policy_file(kit, "authorization")
    if not granted:
        yield ok("code of jobs", f"{rights} refuses it (byoc)")
        return
    at_server = "read every file of the server, its private key too"
    does = "bypass the filter" if kit.role == "site" else at_server
    text = f"{rights} lets jobs of {', '.join(granted)} bring code (byoc); it can {does}"
    yield warning("code of jobs", text, f"{_policy(kit)}: sets byoc to none for every role")


def _bringing(kit: Kit) -> list[str]:
    """Return the roles whose jobs may bring code."""
    return [role for role, right in code_rights(kit).items() if right != "none"]


def _methods(kit: Kit) -> Iterator[Finding]:
    """Check which methods of other packages are installed, and whether the party allows them."""
    try:
        points = outside().values()
    except ConfigError as problem:
        yield error("methods", str(problem), "uninstall one of the packages")
        return
    for point in points:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        text = f"{point.name} ({class_path(point)}{package}) is installed"
        if permits(kit, class_path(point)):
            yield ok("methods", f"{text} and allowed")
        else:
            text += " and not allowed: jobs with it are refused, unless they bring their code"
            yield warning("methods", text, f"{_policy(kit)} --allow {list_entry(point)}")


def _launchers(kit: Kit) -> Iterator[Finding]:
    """Check that one component starts jobs: with two, or none, FLARE starts no job."""
    path = policy_file(kit, "resources")
    found = launchers(components_of(path))
    if len(found) == 1:
        yield ok("launcher", found[0])
    elif found:
        text = f"{path} has {len(found)} job launchers, and FLARE starts no job: {', '.join(found)}"
        remedy = f"{_policy(kit)} removes Suture's; if others remain, delete all but one from components"
        yield error("launcher", text, remedy)
    else:
        yield error("launcher", f"{path} has no job launcher: no job starts", _RESTORE)


def _images(kit: Kit) -> Iterator[Finding]:
    """Check which image gets the party's private key and data: its own, or any that a submitter names."""
    components = components_of(policy_file(kit, "resources"))
    if not mounted_at(components):
        return
    path, granted, own = (
        kit.folder / "local" / "study_runtime.yaml",
        _bringing(kit),
        images(kit.folder, components),
    )
    without = [study for study, image in own.items() if not image] or ([] if own else [DEFAULT_STUDY])
    if granted:
        text = f"jobs of {', '.join(granted)} may name any image (byoc): it gets the private key and the data"
        yield warning("image", text, f"{_policy(kit)}, and name the image in {path}")
    elif without:
        text = f"{path} names no image for jobs of {', '.join(without)}, and no job may name one: none starts"
        yield error("image", text, "add `container: {image: IMAGE}` to the study; see docs/deployment.md")
    else:
        yield ok(
            "image", f"{', '.join(sorted(set(own.values())))}; no job may name another, nor a Python in it"
        )


def _killed_processes(kit: Kit) -> Iterator[Finding]:
    """Check whether the death of a process ends more than it must."""
    prepared = survives(kit)
    lost = "a killed job process ends the whole job, or a lost request is noticed after five minutes"
    what = lost if kit.role == "site" else "jobs of before a crash stay"
    if prepared and kit.role == "site" and (own := launcher_of(kit)):
        yield ok("killed processes", f"end their job, which `suture resume` continues ({own} starts jobs)")
    elif prepared:
        yield ok("killed processes", "are started again" if kit.role == "site" else "leave no job as RUNNING")
    else:
        yield warning("killed processes", what, f"{_policy(kit)}, where suture is installed")


def _logs(kit: Kit) -> Iterator[Finding]:
    """Check whether the error log stays at a site, since it may name files and patients."""
    if kit.role != "site":
        return
    path = policy_file(kit, "resources")
    if read_kit_json(path).get("allow_log_streaming", True):
        text = f"{path} sends the site's error log to the server; it may name files"
        yield warning("logs", text, f"{_policy(kit)}: sets allow_log_streaming to false")
    else:
        yield ok("logs", "stay at the site")


def _ways_round(kit: Kit) -> Iterator[Finding]:
    """Check whether a job can do more than its method declares."""
    ways = list(bypasses(kit))
    if kit.role == "site":
        about, does = "filter", "send what its method does not declare"
        sound = "nothing leaves that a method does not declare, and no job can change that"
    else:
        about, does = "jobs", "do more at the server than its method does"
        sound = "run suture's code and no other"
    if ways:
        text = f"a job could {does}: {'; '.join(ways)}"
        yield warning(about, text, f"{_policy(kit)}, where all jobs are suture's")
    else:
        yield ok(about, sound)


def _storage(kit: Kit) -> Iterator[Finding]:
    """Check whether other servers or users of the machine have the jobs of this one, with their results."""
    if (elsewhere := os.environ.get(STORE)) and kit.role == "server":
        text = f"FLARE stores jobs in {elsewhere}, which {STORE} names, whatever {kit.folder} says"
        yield warning("storage of jobs", text, f"unset {STORE}, also for the service that starts the server")
    for name, folder in storages(kit).items():
        if text := exposed(folder):
            remedy = f"{_policy(kit)}: stores them in the kit from now on; then remove what is its own there"
            yield warning(f"storage of {name}", text, remedy)
        else:
            yield ok(f"storage of {name}", str(folder))


def _policy(kit: Kit) -> str:
    """Return the command line that installs the policy of a kit."""
    return f"suture policy {shlex.quote(str(kit.folder))}"
