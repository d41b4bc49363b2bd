"""Signatures of secure aggregation by the key of a site's startup kit."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from suture.core.errors import ConfigError
from suture.core.plain import read_regular
from suture.flare.admin.kit import certificate, common_name, out_of_date
from suture.protocol.masking import Identity, MaskingRefused

_PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


class KitIdentity(Identity):
    """The certificate and private key of a startup kit; it believes sites that the project has certified.

    Args:
        startup: folder of the kit's certificates.

    Raises:
        ConfigError: a file is missing or damaged, or the key is of a kind that FLARE's provisioning does not
            make.
    """

    def __init__(self, startup: Path) -> None:
        self._root = certificate(startup / "rootCA.pem")
        self.certificate = certificate(startup / "client.crt").public_bytes(Encoding.PEM).decode()
        try:
            key = load_pem_private_key(read_regular(startup / "client.key"), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{startup / 'client.key'}: {error}; provision the kit again") from error
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"{startup / 'client.key'} is not an RSA key; secure aggregation needs one")
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """As `Identity.sign`."""
        return self._key.sign(message, _PADDING, SHA256())

    def check(self, site: str, certificate: str, signature: bytes, message: bytes) -> None:
        """As `Identity.check`."""
        try:
            cert = x509.load_pem_x509_certificate(certificate.encode())
            cert.verify_directly_issued_by(self._root)
            key = cert.public_key()
            user = cert.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)  # FLARE's place of a role
            if user or common_name(cert) != site or out_of_date(cert, ""):
                raise ValueError("another party's, or out of date")
            if not isinstance(key, RSAPublicKey):
                raise ValueError("a key of another kind")
            key.verify(signature, message, _PADDING, SHA256())
        except (ValueError, TypeError, IndexError, InvalidSignature, UnsupportedAlgorithm):
            raise MaskingRefused(
                f"the signature of {site} is not by the key of a certificate of that name from this project"
            ) from None
