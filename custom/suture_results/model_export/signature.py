"""Signatures of model folders, in the format of OpenSSF Model Signing; no network is used.

They are made and checked by an optional package, `pip install "suture[sign]"`.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, DataError
from suture.core.files import read_json, read_regular
from suture.models.saved import stated_digest, weights_digest

_SIGNATURE = "model.sig"


def check_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's weights, which model.json states too.

    Raises:
        ConfigError: the folder holds no model.
        DataError: the weights are missing, or not those.
    """
    stated = stated_digest(folder)
    if not (folder / "model.safetensors").is_file():
        raise DataError(f"{folder} has no model.safetensors; restore it from a backup")
    if stated != weights_digest(folder):
        raise DataError(
            f"{folder}: model.safetensors does not match the digest in model.json; restore both from a backup"
        )
    return stated


def sign(folder: Path, key: Path) -> Path:
    """Sign every file of a model folder; return the path of the signature.

    Args:
        key: private key in PEM, of the curve P-256, P-384 or P-521, not encrypted.

    Raises:
        ConfigError: the package is not installed, or the key is no such key.
        DataError: the weights are not those that model.json states, or a file cannot be signed.
    """
    check_digest(folder)
    _files(folder)
    package, out = needed("model_signing", "a signature", "sign"), folder / _SIGNATURE
    with _key_error(key, "private"):
        config = package.signing.Config().use_elliptic_key_signer(private_key=key)
    hashing = package.hashing.Config().set_ignored_paths(paths=[_SIGNATURE], ignore_git_paths=False)
    config.set_hashing_config(hashing)
    try:
        config.sign(folder, out)
    except ValueError as error:
        raise DataError(f"{folder} cannot be signed: {error}") from error
    return out


def verify(folder: Path, key: Path) -> None:
    """Check that a model folder is what the owner of a key signed.

    Args:
        key: the public key in PEM.

    Raises:
        ConfigError: the package is not installed, or the key is no such key.
        DataError: there is no signature, or one by another key, or a file was changed, added or removed, or
            is one that the signature leaves out.
    """
    package, signature = needed("model_signing", "a signature", "sign"), folder / _SIGNATURE
    if not signature.is_file():
        raise DataError(f"{folder} has no {_SIGNATURE}: it is not signed")
    with _key_error(key, "public"):
        config = package.verifying.Config().use_elliptic_key_verifier(public_key=key)
    files = _files(folder)
    try:
        signed, algorithm = _read_signed(signature)
        # The package's own guess leaves out the files of git. What the signature leaves out itself is added.
        hashing = package.hashing.Config().set_ignored_paths(paths=[_SIGNATURE], ignore_git_paths=False)
        config.set_hashing_config(hashing.use_file_serialization(hashing_algorithm=algorithm))
        config.verify(folder, signature)
    except Exception as error:  # what a damaged signature raises depends on where it is damaged
        raise DataError(
            f"{folder} differs from what was signed with the key of {key}: {_why(str(error))}"
        ) from error
    if beyond := sorted(files - signed):
        raise DataError(
            f"{folder} contains files that the signature does not cover: {', '.join(beyond)}; remove "
            "them, or get the folder again from the signer"
        )


def _files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, hidden ones too, but for the signature.

    Raises:
        DataError: there is a link, or something that is neither file nor folder: no signature covers it.
    """
    inside = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    odd = sorted(
        path.relative_to(folder).as_posix() for path in inside if path.is_symlink() or not path.is_file()
    )
    if odd:
        raise DataError(
            f"{folder} contains links or special files: {', '.join(odd)}; replace them by regular files"
        )
    return {path.relative_to(folder).as_posix() for path in inside} - {_SIGNATURE}


def _read_signed(signature: Path) -> tuple[set[str], str]:
    """Return the paths of the files of which a signature states the digests, and the algorithm of these."""
    statement = json.loads(b64decode(read_json(signature)["dsseEnvelope"]["payload"]))["predicate"]
    return {str(one["name"]) for one in statement["resources"]}, statement["serialization"]["hash_type"]


_DIFFERENCES = {
    "changed": r"Hash mismatch for '(.+)': Expected '",
    "missing": r"Missing files in model '.*?': (.+)",
    "added": r"Extra files found in model '.*?': (.+)",
}
"""What the package says of files that differ, in patterns of the names."""


def _why(text: str) -> str:
    """Return what is wrong with a signed folder, and the remedy, from what the package says of it."""
    if differences := _differences(text):
        return f"{differences}; get the folder again from them"
    if "Key mismatch" in text:
        return (
            f"{_SIGNATURE} was made with another key; ask the signer for the folder, or for their public key"
        )
    return f"{_SIGNATURE} was changed or damaged; get the folder again from them"


def _differences(text: str) -> str:
    """Return which files differ, without their digests; nothing where the text does not say so."""
    try:  # the package writes a list of sentences as Python does, quotes escaped
        sentences: Sequence[str] = ast.literal_eval(text.removeprefix("Signature mismatch: "))
    except (SyntaxError, ValueError):
        return ""
    names = {
        what: [found[1] for one in sentences if (found := re.match(pattern, one, re.DOTALL))]
        for what, pattern in _DIFFERENCES.items()
    }
    return "; ".join(f"{what}: {', '.join(some)}" for what, some in names.items() if some)


_MAKE = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem"
_CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
_FORMS = {
    "private": "a private key",
    "public": "a public key",
    "certificate": "a certificate",
    "encrypted": "an encrypted key",
    "none": "no key",
}
_PUBLIC_OF = {
    "private": "openssl pkey -in {key} -pubout -out key.pub",
    "certificate": "openssl x509 -in {key} -pubkey -noout -out key.pub",
}
"""What makes the public key of what was given in its place."""


@contextmanager
def _key_error(key: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:  # an RSA key has no curve
        form, algorithm = _content(read_regular(key))
        held = f"{_FORMS[form]} ({algorithm})" if algorithm else _FORMS[form]
        raise ConfigError(
            f"{key} holds {held}; a {kind} key of the curve P-256, P-384 or P-521 is needed, in PEM and not "
            f"encrypted: {_remedy(key, kind, form, algorithm)}"
        ) from error


def _remedy(key: Path, kind: str, form: str, algorithm: str) -> str:
    """Return the command that makes a right key."""
    name = shlex.quote(str(key))
    if kind == "private":
        return f"openssl pkey -in {name} -out key.pem" if form == "encrypted" else _MAKE
    if algorithm.removeprefix("EC ") in _CURVES.values() and form in _PUBLIC_OF:
        return _PUBLIC_OF[form].format(key=name)
    return f"ask the signer, who makes it by {_PUBLIC_OF['private'].format(key='key.pem')}"


def _content(pem: bytes) -> tuple[str, str]:
    """Return what a file holds in place of a right key: one of `_FORMS`, and the algorithm."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509 import load_pem_x509_certificate

    if b"ENCRYPTED" in pem:
        return "encrypted", ""
    readers: dict[str, Callable[[bytes], Any]] = {
        "private": lambda data: serialization.load_pem_private_key(data, None).public_key(),
        "public": serialization.load_pem_public_key,
        "certificate": lambda data: load_pem_x509_certificate(data).public_key(),
    }
    for form, read in readers.items():
        try:
            key = read(pem)
        except (ValueError, TypeError):
            continue
        name = type(key).__name__.removesuffix("PublicKey")
        return form, f"EC {_CURVES.get(key.curve.name, key.curve.name)}" if name == "EC" else name
    return "none", ""
