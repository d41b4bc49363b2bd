"""Signatures of model folders, in the format of OpenSSF Model Signing; no network is used.

They are made and checked by an optional package, `pip install "suture[sign]"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError, DataError
from suture.models.saved import stated_digest, weights_digest

SIGNATURE = "model.sig"


def check_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's weights, which model.json states too.

    Raises:
        ConfigError: the folder holds no model, or one of an earlier version, which states no digest.
        DataError: the weights are missing, or not those.
    """
    stated = stated_digest(folder)
    if stated is None:
        raise ConfigError(
            f"{folder / 'model.json'} states no digest: an earlier version of suture wrote it; "
            "run its job again with this version"
        )
    if not (folder / "model.safetensors").is_file():
        raise DataError(f"{folder} has no model.safetensors; restore it from a backup")
    if stated != weights_digest(folder):
        raise DataError(
            f"{folder}: model.safetensors is not the file whose digest model.json states; restore both from "
            "a backup"
        )
    return stated


def sign(folder: Path, key: Path) -> Path:
    """Sign every file of a model folder, but those of git; return the path of the signature.

    Args:
        key: private key in PEM, of the curve P-256, P-384 or P-521, not encrypted.

    Raises:
        ConfigError: the package is not installed, or the key is no such key.
        DataError: the weights are not those that model.json states, or a file cannot be signed.
    """
    check_digest(folder)
    package, out = _package(), folder / SIGNATURE
    with _key_error(key, "private"):
        config = package.signing.Config().use_elliptic_key_signer(private_key=key)
    config.set_hashing_config(package.hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
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
        DataError: there is no signature, or one by another key, or a file was changed, added or removed.
    """
    package, signature = _package(), folder / SIGNATURE
    if not signature.is_file():
        raise DataError(f"{folder} has no {SIGNATURE}: nobody has signed it")
    with _key_error(key, "public"):
        config = package.verifying.Config().use_elliptic_key_verifier(public_key=key)
    # Of the signature the file's own list of ignored paths is part, and it is signed too.
    try:
        config.verify(folder, signature)
    except Exception as error:  # what a damaged signature raises depends on where it is damaged
        why = _differences(str(error)) or "the signature is not by this key, or it or a file was changed"
        raise DataError(
            f"{folder} is not what the owner of {key} signed: {why}; get the folder again from them"
        ) from error


_DIFFERENCES = {
    "changed": r"Hash mismatch for \\?['\"](.+?)\\?['\"]: Expected",
    "missing": r"Missing files in model '[^']*': ([^\"]+)",
    "added": r"Extra files found in model '[^']*': ([^\"]+)",
}
"""What the package says of files that differ, in patterns of the names; it may escape quotes."""


def _differences(text: str) -> str:
    """Return which files differ, without their digests; nothing where the text does not say so."""
    found = ((what, ", ".join(re.findall(pattern, text))) for what, pattern in _DIFFERENCES.items())
    return "; ".join(f"{what}: {names}" for what, names in found if names)


def _package() -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise ConfigError(
            f'signatures need packages that are not installed ({error.name}): pip install "suture[sign]"'
        ) from error
    return model_signing


@contextmanager
def _key_error(key: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError) as error:  # an RSA key has no curve
        why = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise ConfigError(
            f"{key} is no unencrypted {kind} key in PEM of the curve P-256, P-384 or P-521{why}"
        ) from error
