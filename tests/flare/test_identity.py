"""Signatures by the keys of startup kits."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from suture.core.errors import ConfigError
from suture.flare.kit import kits_in
from suture.flare.workspace import KitIdentity
from suture.privacy.masking import MaskingRefused
from suture_admin.poc import project_of, project_template, provision
from world import refused

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
ROOT = rsa.generate_private_key(65537, 2048)


def certified(
    name: str,
    key: Key,
    by: rsa.RSAPrivateKey = ROOT,
    days: int = 1,
    role: str = "",
    host: str = "",
    authority: bool = False,
) -> x509.Certificate:
    """A certificate as FLARE's provisioning makes it: a user's has a role, a server's its host's name."""

    def named(text: str) -> x509.Name:
        more = [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role and text == name else []
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text), *more])

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("root"))
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=9)).not_valid_after(now + timedelta(days=days))
    hosts = x509.SubjectAlternativeName([x509.DNSName(host or name)])
    builder = builder.add_extension(hosts, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
    return builder.sign(by, SHA256())


def kit(folder: Path, name: str, key: Key | None = None, server: str = "server", **how: Any) -> KitIdentity:
    key = key or rsa.generate_private_key(65537, 2048)
    startup = folder / name / "startup"
    startup.mkdir(parents=True)
    (startup / "rootCA.pem").write_bytes(certified("root", ROOT).public_bytes(Encoding.PEM))
    (startup / "client.crt").write_bytes(certified(name, key, **how).public_bytes(Encoding.PEM))
    form = Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    (startup / "client.key").write_bytes(key.private_bytes(*form))
    servers = [{"name": "trial", "service": {"target": "localhost:8002"}, "identity": server}]
    (startup / "fed_client.json").write_text(json.dumps({"servers": servers}))
    return KitIdentity(folder / name)


def believes(judge: KitIdentity, other: KitIdentity, site: str) -> bytes:
    """The key of a site, by which the other one has signed."""
    return judge.check(site, other.certificate, other.sign(b"keys"), b"keys")


def test_a_signature_is_of_the_site_that_the_project_has_certified(tmp_path: Path) -> None:
    alpha, beta = kit(tmp_path, "alpha"), kit(tmp_path, "beta")
    signature = alpha.sign(b"keys")
    beta.check("alpha", alpha.certificate, signature, b"keys")
    for site, certificate, message in (
        ("beta", alpha.certificate, b"keys"),
        ("alpha", beta.certificate, b"keys"),
        ("alpha", alpha.certificate, b"others"),
        ("alpha", "", b"keys"),
        ("alpha", alpha.certificate.replace("A", "B"), b"keys"),
    ):
        with refused(f"signature of {site}", by=MaskingRefused):
            beta.check(site, certificate, signature, message)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("other", {"role": "lead"}),
        ("other", {"role": "server"}),  # FLARE's distributed provisioning writes it
        ("server", {}),  # and the central one does not: the name says it
        ("other", {"host": "localhost"}),
        ("other", {"authority": True}),
        ("other", {"days": -1}),
        ("near", {}),
        ("far", {}),
    ],
)
def test_who_is_no_site_signs_for_none(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Users, the server under its own name or another's, relays, the root, and who was a site once."""
    other = kit(tmp_path, name, **how)
    kit(tmp_path, "beta")
    relay = {"relay_config": {"identity": "near", "fqcn": "far.near"}}
    (tmp_path / "beta" / "startup" / "relay__resources.json").write_text(json.dumps(relay))
    beta = KitIdentity(tmp_path / "beta")
    for site in (name, "alpha"):
        with refused(f"signature of {site}", by=MaskingRefused):
            believes(beta, other, site)


def test_a_certificate_of_two_names_or_of_another_root_is_of_no_site(tmp_path: Path) -> None:
    beta, key = kit(tmp_path, "beta"), rsa.generate_private_key(65537, 2048)
    liar, cert = kit(tmp_path, "liar", key), certified("alpha", key)
    two = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in ("alpha", "gamma")])
    builder = x509.CertificateBuilder(two, cert.issuer, key.public_key(), cert.serial_number)
    builder = builder.not_valid_before(cert.not_valid_before_utc).not_valid_after(cert.not_valid_after_utc)
    for forged in (builder.sign(ROOT, SHA256()), certified("alpha", key, by=key)):
        liar.certificate = forged.public_bytes(Encoding.PEM).decode()
        for site in ("alpha", "gamma"):
            with refused(f"signature of {site}", by=MaskingRefused):
                believes(beta, liar, site)


@pytest.mark.complete
def test_two_certificates_with_one_key_are_one_party(tmp_path: Path) -> None:
    """`check` returns the key; a certificate of the distributed provisioning names the role of a site too."""
    key = rsa.generate_private_key(65537, 2048)
    beta = kit(tmp_path, "beta")
    one = believes(beta, kit(tmp_path, "alpha", key, role="client"), "alpha")
    two = believes(beta, kit(tmp_path, "gamma", key), "gamma")
    assert one == two != believes(beta, beta, "beta")


@pytest.mark.parametrize("broken", ["fed_client.json", "client.key", "client.crt", "rootCA.pem"])
def test_a_kit_without_its_files_is_named(broken: str, tmp_path: Path) -> None:
    kit(tmp_path, "alpha")
    path = tmp_path / "alpha" / "startup" / broken
    for spoil in (lambda: path.write_text("nothing"), path.unlink):
        spoil()
        with refused(broken, by=ConfigError):
            KitIdentity(tmp_path / "alpha")


def test_a_key_of_another_kind_and_a_kit_that_names_no_server_are_refused(tmp_path: Path) -> None:
    """Nobody could tell then that a certificate is the server's."""
    with refused("RSA", by=ConfigError):
        kit(tmp_path, "alpha", ec.generate_private_key(ec.SECP256R1()))
    with refused("server", by=ConfigError):
        kit(tmp_path, "beta", server="")


@pytest.mark.complete
def test_kits_of_flares_provisioning_believe_one_another(tmp_path: Path) -> None:
    project = tmp_path / "project.yml"
    project.write_text(yaml.safe_dump(project_of(project_template(), ["alpha", "beta"], 8002)))
    provision(project, tmp_path)
    kits = kits_in(tmp_path)
    alpha, beta = (KitIdentity(kits[name].folder) for name in ("alpha", "beta"))
    server = KitIdentity(kits["server"].folder)
    for judge in (beta, server):
        believes(judge, alpha, "alpha")
    user = next(kit for kit in kits.values() if kit.role == "admin")
    for party in ("server", "alpha"):
        with refused(f"signature of {party}", by=MaskingRefused):
            believes(beta, server, party)
    key = load_pem_private_key((user.folder / "startup" / "client.key").read_bytes(), None)
    cert = (user.folder / "startup" / "client.crt").read_text()
    signature = key.sign(b"keys", PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH), SHA256())  # type: ignore
    with refused(f"signature of {user.name}", by=MaskingRefused):
        beta.check(user.name, cert, signature, b"keys")
