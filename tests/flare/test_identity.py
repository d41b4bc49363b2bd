"""Signatures by the keys of startup kits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from suture.core.errors import ConfigError
from suture.flare.admin.kit import kits_in
from suture.flare.admin.poc import project_of, project_template, provision
from suture.flare.identity import KitIdentity
from suture.protocol.masking import MaskingRefused

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
ROOT = rsa.generate_private_key(65537, 2048)


def certified(
    name: str, key: Key, by: rsa.RSAPrivateKey = ROOT, days: int = 1, role: str = ""
) -> x509.Certificate:
    """A certificate as FLARE's provisioning makes it: a user's has a role."""

    def named(text: str) -> x509.Name:
        more = [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role and text == name else []
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text), *more])

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("root"))
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=9)).not_valid_after(now + timedelta(days=days))
    return builder.sign(by, SHA256())


def kit(folder: Path, name: str, key: Key | None = None, **how: Any) -> KitIdentity:
    key = key or rsa.generate_private_key(65537, 2048)
    folder = folder / name
    folder.mkdir()
    (folder / "rootCA.pem").write_bytes(certified("root", ROOT).public_bytes(Encoding.PEM))
    (folder / "client.crt").write_bytes(certified(name, key, **how).public_bytes(Encoding.PEM))
    form = Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    (folder / "client.key").write_bytes(key.private_bytes(*form))
    return KitIdentity(folder)


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
        with pytest.raises(MaskingRefused, match=f"signature of {site}"):
            beta.check(site, certificate, signature, message)


def test_a_certificate_of_another_root_or_out_of_date_proves_nothing(tmp_path: Path) -> None:
    beta, key = kit(tmp_path, "beta"), rsa.generate_private_key(65537, 2048)
    old = kit(tmp_path, "old", days=-1)
    with pytest.raises(MaskingRefused):
        beta.check("old", old.certificate, old.sign(b"keys"), b"keys")
    forged = certified("alpha", key, by=key).public_bytes(Encoding.PEM)
    (tmp_path / "beta" / "client.crt").write_bytes(forged)
    (tmp_path / "beta" / "client.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    liar = KitIdentity(tmp_path / "beta")
    with pytest.raises(MaskingRefused):
        beta.check("alpha", liar.certificate, liar.sign(b"keys"), b"keys")


def test_a_user_is_no_site(tmp_path: Path) -> None:
    beta, other = kit(tmp_path, "beta"), kit(tmp_path, "other", role="lead")
    with pytest.raises(MaskingRefused, match="signature of other"):
        beta.check("other", other.certificate, other.sign(b"keys"), b"keys")


@pytest.mark.parametrize("broken", ["client.key", "client.crt", "rootCA.pem"])
def test_a_kit_without_its_files_is_named(broken: str, tmp_path: Path) -> None:
    kit(tmp_path, "alpha")
    (tmp_path / "alpha" / broken).write_text("nothing")
    with pytest.raises(ConfigError, match=broken):
        KitIdentity(tmp_path / "alpha")
    (tmp_path / "alpha" / broken).unlink()
    with pytest.raises(ConfigError, match=broken):
        KitIdentity(tmp_path / "alpha")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an RSA key"):
        kit(tmp_path, "alpha", ec.generate_private_key(ec.SECP256R1()))


def test_kits_of_flares_provisioning_believe_one_another(tmp_path: Path) -> None:
    project = tmp_path / "project.yml"
    project.write_text(yaml.safe_dump(project_of(project_template(), ["alpha", "beta"], 8002)))
    provision(project, tmp_path)
    kits = kits_in(tmp_path)
    alpha, beta = (KitIdentity(kits[name].folder / "startup") for name in ("alpha", "beta"))
    beta.check("alpha", alpha.certificate, alpha.sign(b"keys"), b"keys")
    user = next(kit for kit in kits.values() if kit.role == "admin")
    lead = KitIdentity(user.folder / "startup")
    with pytest.raises(MaskingRefused, match="signature of"):
        beta.check(user.name, lead.certificate, lead.sign(b"keys"), b"keys")
