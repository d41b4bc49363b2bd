"""Signatures of secure aggregation by the keys of startup kits."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from suture.core.errors import ConfigError
from suture.core.plain import read_regular
from suture.flare.kit import CERTIFICATES, certificate, out_of_date, read_kit, read_kit_json
from suture.protocol.masking import Identity, MaskingRefused

_RELAY = "relay__resources.json"
"""FLARE's file of the relay that a site connects to."""

_PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


class KitIdentity(Identity):
    """The certificate and private key of a startup kit; it believes sites that the project has certified.

    FLARE's provisioning writes a role into users' certificates alone, and its distributed provisioning into
    all: `client` is a site's. The server, and the relays above a site, are known by their names in the kit.

    Args:
        folder: of the kit of a site, or of the server, which signs nothing.

    Raises:
        ConfigError: a file is missing or damaged, or the key is of a kind that FLARE's provisioning does not
            make.
    """

    def __init__(self, folder: Path) -> None:
        kit = read_kit(folder)
        startup, own = kit.folder / "startup", CERTIFICATES[kit.role]
        self._root = certificate(startup / "rootCA.pem")
        relay = read_kit_json(startup / _RELAY)["relay_config"] if (startup / _RELAY).is_file() else {}
        self._no_sites = {kit.identity, *str(relay.get("fqcn", "")).split(".")}
        if not kit.identity:
            raise ConfigError(f"{startup} names no server; provision the kit again")
        self.certificate = certificate(startup / own).public_bytes(Encoding.PEM).decode()
        file = (startup / own).with_suffix(".key")
        try:
            key = load_pem_private_key(read_regular(file), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: {error}; provision the kit again") from error
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"{file} is not an RSA key; secure aggregation needs one")
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """As `Identity.sign`."""
        return self._key.sign(message, _PADDING, SHA256())

    def check(self, site: str, certificate: str, signature: bytes, message: bytes) -> bytes:
        """As `Identity.check`."""
        try:
            cert = x509.load_pem_x509_certificate(certificate.encode())
            cert.verify_directly_issued_by(self._root)
            key = cert.public_key()
            if not _is_of(cert, site) or site in self._no_sites or out_of_date(cert, ""):
                raise ValueError("another party's, or out of date")
            if not isinstance(key, RSAPublicKey):
                raise ValueError("a key of another kind")
            key.verify(signature, message, _PADDING, SHA256())
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise MaskingRefused(
                f"the signature of {site} is not by the key of a site's certificate of that name from this "
                "project"
            ) from None
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _is_of(cert: x509.Certificate, site: str) -> bool:
    """Whether a certificate states a site of this name: no user, no authority, and no host of a server."""
    name, role = (
        [attribute.value for attribute in cert.subject.get_attributes_for_oid(oid)]
        for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME)
    )
    by_kind = {extension.oid: extension.value for extension in cert.extensions}
    hosts = by_kind.get(x509.SubjectAlternativeName.oid, ())
    authority = by_kind.get(x509.BasicConstraints.oid)
    return (
        (name, role) in (([site], []), ([site], ["client"]))
        and all(isinstance(host, x509.DNSName) and host.value == site for host in hosts)
        and not (isinstance(authority, x509.BasicConstraints) and authority.ca)
    )
